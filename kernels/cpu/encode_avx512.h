/* Encoding words with AVX-512 (BW, DQ, VL, VBMI), eight blocks at a time. */
#include "words.h"

#include <immintrin.h>

/* Codes of two blocks: steps as bytes, looked up with the sign as sixth bit, nibbles joined. */
INLINE __m256i code_pair(__m512i v0, __m512i v1, __m512i low0, __m512i low1, const mx_plan *plan,
                         __m512i table, int zero_sets_sign) {
    const __m512i magnitude = _mm512_set1_epi16(WORD_MAGNITUDE);
    const __m512i bump = _mm512_set1_epi16((short)plan->tie_bump);
    const __m512i above = _mm512_set1_epi16((short)plan->sign_above);
    const __m512i negative_step = _mm512_set1_epi16(32), join = _mm512_set1_epi16(0x1001);
    const __m512i order = _mm512_set_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 62, 60, 58, 56, 46, 44, 42, 40, 30, 28, 26, 24, 14, 12, 10, 8, 54, 52, 50, 48, 38, 36,
        34, 32, 22, 20, 18, 16, 6, 4, 2, 0);
    __m512i a0 = _mm512_and_si512(v0, magnitude), a1 = _mm512_and_si512(v1, magnitude);
    __m512i s0 = _mm512_add_epi16(a0, _mm512_and_si512(_mm512_srli_epi16(a0, 6), bump));
    __m512i s1 = _mm512_add_epi16(a1, _mm512_and_si512(_mm512_srli_epi16(a1, 6), bump));
    s0 = _mm512_srli_epi16(_mm512_subs_epu16(s0, low0), 5);
    s1 = _mm512_srli_epi16(_mm512_subs_epu16(s1, low1), 5);
    if (zero_sets_sign) {
        v0 = _mm512_sub_epi16(v0, _mm512_set1_epi16(1));
        v1 = _mm512_sub_epi16(v1, _mm512_set1_epi16(1));
    }
    __mmask32 n0 = _mm512_cmpgt_epu16_mask(v0, above), n1 = _mm512_cmpgt_epu16_mask(v1, above);
    s0 = _mm512_mask_add_epi16(s0, n0, s0, negative_step);
    s1 = _mm512_mask_add_epi16(s1, n1, s1, negative_step);
    __m512i codes = _mm512_permutexvar_epi8(_mm512_packus_epi16(s0, s1), table);
    codes = _mm512_maddubs_epi16(codes, join);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi8(order, codes));
}

/* Largest magnitude word of eight blocks, in all words of a quadword; QUAD says which. */
static const int QUAD[8] = {0, 2, 4, 6, 1, 3, 5, 7};

INLINE __m512i merge_halves(__m512i a, __m512i b) {
    return _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
}

INLINE __m512i merge_quarters(__m512i a, __m512i b) {
    return _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
}

INLINE __m512i eight_maxima(const __m512i *v) {
    const __m512i magnitude = _mm512_set1_epi16(WORD_MAGNITUDE);
    __m512i a[8];
    for (int i = 0; i < 8; i++) a[i] = _mm512_and_si512(v[i], magnitude);
    __m512i low = merge_quarters(merge_halves(a[0], a[1]), merge_halves(a[2], a[3]));
    __m512i high = merge_quarters(merge_halves(a[4], a[5]), merge_halves(a[6], a[7]));
    __m512i most = _mm512_max_epu16(_mm512_unpacklo_epi64(low, high),
                                    _mm512_unpackhi_epi64(low, high));
    most = _mm512_max_epu16(most, _mm512_rol_epi64(most, 32));
    return _mm512_max_epu16(most, _mm512_rol_epi32(most, 16));
}

/* Encode eight blocks; returns their first with a NaN or infinity, or -1. */
INLINE int encode_eight(const uint16_t *words, uint8_t *codes, uint8_t *scales,
                        const mx_plan *plan, __m512i table, int zero_sets_sign, int stream) {
    __m512i v[8];
    for (int i = 0; i < 8; i++) v[i] = _mm512_loadu_si512(words + MX_BLOCK * i);
    __m512i most = eight_maxima(v);
    __m512i biased = _mm512_adds_epu16(most, _mm512_set1_epi16((short)plan->bias_up));
    biased = _mm512_subs_epu16(biased, _mm512_set1_epi16((short)plan->bias_down));
    __m512i exponent = _mm512_srli_epi16(biased, 7); /* scale byte + 2 */
    exponent = _mm512_min_epu16(exponent, _mm512_set1_epi16(MX_MAX_SCALE_BYTE + 2));
    __mmask32 tiny = _mm512_cmplt_epu16_mask(exponent, _mm512_set1_epi16(EXACT_FROM + 2));
    __mmask32 wild = _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(WORD_INFINITY));

    uint64_t low[8] __attribute__((aligned(64)));
    __m512i quarter = _mm512_slli_epi16(_mm512_sub_epi16(exponent, _mm512_set1_epi16(4)), 7);
    _mm512_store_si512(low, _mm512_sub_epi16(quarter, _mm512_set1_epi16((short)plan->tie_add)));
    __m128i bytes = _mm512_cvtepi64_epi8(_mm512_subs_epu16(exponent, _mm512_set1_epi16(2)));
    bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1,
                                                  -1, -1));
    _mm_storel_epi64((__m128i *)scales, bytes);
    for (int i = 0; i < 8; i += 2) {
        __m256i pair = code_pair(v[i], v[i + 1], _mm512_set1_epi64((long long)low[QUAD[i]]),
                                 _mm512_set1_epi64((long long)low[QUAD[i + 1]]), plan, table,
                                 zero_sets_sign);
        __m256i *out = (__m256i *)(codes + MX_BLOCK_BYTES * i);
        if (stream)
            _mm256_stream_si256(out, pair);
        else
            _mm256_storeu_si256(out, pair);
    }
    if (UNLIKELY(tiny | wild))
        for (int i = 0; i < 8; i++) {
            if (wild >> (4 * QUAD[i]) & 1) return i;
            if (tiny >> (4 * QUAD[i]) & 1)
                encode_block(words + MX_BLOCK * i, scales[i], plan, codes + MX_BLOCK_BYTES * i);
        }
    return -1;
}

INLINE int64_t encode_words_as(const uint16_t *words, uint8_t *codes, uint8_t *scales, size_t blocks,
                               const mx_plan *plan, int zero_sets_sign, int stream) {
    const __m512i table = _mm512_loadu_si512(plan->steps);
    size_t i = 0;
    for (; i + 8 <= blocks; i += 8) {
        int bad = encode_eight(words + MX_BLOCK * i, codes + MX_BLOCK_BYTES * i, scales + i, plan,
                               table, zero_sets_sign, stream);
        if (UNLIKELY(bad >= 0)) return (int64_t)i + bad;
    }
    if (i < blocks) {
        uint16_t last[8 * MX_BLOCK] = {0};
        uint8_t last_codes[8 * MX_BLOCK_BYTES], last_scales[8];
        memcpy(last, words + MX_BLOCK * i, (blocks - i) * sizeof(uint16_t) * MX_BLOCK);
        int bad = encode_eight(last, last_codes, last_scales, plan, table, zero_sets_sign, 0);
        if (bad >= 0) return (int64_t)i + bad;
        memcpy(codes + MX_BLOCK_BYTES * i, last_codes, (blocks - i) * MX_BLOCK_BYTES);
        memcpy(scales + i, last_scales, blocks - i);
    }
    return -1;
}

static int64_t encode_words(const uint16_t *words, uint8_t *codes, uint8_t *scales, size_t blocks,
                            const mx_plan *plan) {
    if (plan->sign_minus) return encode_words_as(words, codes, scales, blocks, plan, 1, 0);
    return encode_words_as(words, codes, scales, blocks, plan, 0, 0);
}

/* Codes of one block under a given scale byte. */
INLINE void encode_given(const uint16_t *words, int byte, const mx_plan *plan, uint8_t *codes) {
    if (UNLIKELY(byte < EXACT_FROM)) {
        encode_block(words, byte, plan, codes);
        return;
    }
    __m512i v = _mm512_loadu_si512(words);
    __m512i low = _mm512_set1_epi16((short)(quarter_word(byte) - plan->tie_add));
    __m256i pair = code_pair(v, v, low, low, plan, _mm512_loadu_si512(plan->steps),
                             plan->sign_minus);
    _mm_storeu_si128((__m128i *)codes, _mm256_castsi256_si128(pair));
}
