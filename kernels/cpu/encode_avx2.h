/* Encoding words with AVX2, one block at a time. */
#include "words.h"

#include <immintrin.h>

INLINE unsigned maximum_of(__m256i a0, __m256i a1) {
    __m256i most = _mm256_max_epu16(a0, a1);
    __m128i half = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
    return 0xffffu ^ ((unsigned)_mm_cvtsi128_si32(half) & 0xffffu);
}

/* All ones where the code is negative (but for the zeros of MX_ZERO_DROP). */
INLINE __m256i negative_words(__m256i v, const mx_plan *plan) {
    const __m256i flip = _mm256_set1_epi16((short)0x8000); /* AVX2 compares signed words only */
    __m256i shifted = _mm256_sub_epi16(v, _mm256_set1_epi16((short)plan->sign_minus));
    return _mm256_cmpgt_epi16(_mm256_xor_si256(shifted, flip),
                              _mm256_set1_epi16((short)(plan->sign_above ^ 0x8000)));
}

INLINE void encode_given_vectors(__m256i v0, __m256i v1, int byte, const mx_plan *plan,
                                 uint8_t *codes) {
    /* Codes of the steps 5 to 20; steps below have the code min(step, 1). */
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7));
    const __m256i magnitude = _mm256_set1_epi16(WORD_MAGNITUDE);
    const __m256i bump = _mm256_set1_epi16((short)plan->tie_bump);
    const __m256i low = _mm256_set1_epi16((short)(quarter_word(byte) - plan->tie_add));
    __m256i a0 = _mm256_and_si256(v0, magnitude), a1 = _mm256_and_si256(v1, magnitude);
    __m256i s0 = _mm256_add_epi16(a0, _mm256_and_si256(_mm256_srli_epi16(a0, 6), bump));
    __m256i s1 = _mm256_add_epi16(a1, _mm256_and_si256(_mm256_srli_epi16(a1, 6), bump));
    s0 = _mm256_srli_epi16(_mm256_subs_epu16(s0, low), 5);
    s1 = _mm256_srli_epi16(_mm256_subs_epu16(s1, low), 5);
    __m256i step = _mm256_packus_epi16(s0, s1); /* quadwords in the order 0, 2, 1, 3 */
    __m256i index = _mm256_min_epu8(_mm256_subs_epu8(step, _mm256_set1_epi8(5)),
                                    _mm256_set1_epi8(15));
    __m256i code = _mm256_max_epu8(_mm256_shuffle_epi8(table, index),
                                   _mm256_min_epu8(step, _mm256_set1_epi8(1)));
    __m256i negative = _mm256_packs_epi16(negative_words(v0, plan), negative_words(v1, plan));
    if (!plan->steps[32]) /* zeros have no sign */
        negative = _mm256_andnot_si256(_mm256_cmpeq_epi8(step, _mm256_setzero_si256()), negative);
    code = _mm256_or_si256(code, _mm256_and_si256(negative, _mm256_set1_epi8(8)));
    __m256i packed = _mm256_maddubs_epi16(code, _mm256_set1_epi16(0x1001));
    packed = _mm256_packus_epi16(packed, packed);
    __m128i first = _mm256_castsi256_si128(packed), second = _mm256_extracti128_si256(packed, 1);
    _mm_storeu_si128((__m128i *)codes, _mm_unpacklo_epi32(first, second));
}

static int64_t encode_words(const uint16_t *words, uint8_t *codes, uint8_t *scales, size_t blocks,
                            const mx_plan *plan) {
    const __m256i magnitude = _mm256_set1_epi16(WORD_MAGNITUDE);
    for (size_t i = 0; i < blocks; i++, words += MX_BLOCK, codes += MX_BLOCK_BYTES) {
        __m256i v0 = _mm256_loadu_si256((const __m256i *)words);
        __m256i v1 = _mm256_loadu_si256((const __m256i *)(words + MX_BLOCK / 2));
        unsigned amax = maximum_of(_mm256_and_si256(v0, magnitude), _mm256_and_si256(v1, magnitude));
        if (UNLIKELY(amax >= WORD_INFINITY)) return (int64_t)i;
        int byte = scale_byte(amax, plan);
        scales[i] = (uint8_t)byte;
        if (UNLIKELY(byte < EXACT_FROM))
            encode_block(words, byte, plan, codes);
        else
            encode_given_vectors(v0, v1, byte, plan, codes);
    }
    return -1;
}

/* Codes of one block under a given scale byte. */
INLINE void encode_given(const uint16_t *words, int byte, const mx_plan *plan, uint8_t *codes) {
    if (UNLIKELY(byte < EXACT_FROM))
        encode_block(words, byte, plan, codes);
    else
        encode_given_vectors(_mm256_loadu_si256((const __m256i *)words),
                             _mm256_loadu_si256((const __m256i *)(words + MX_BLOCK / 2)), byte,
                             plan, codes);
}
