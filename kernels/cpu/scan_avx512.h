/* The largest magnitude words of blocks with AVX-512. */
#include "words.h"

#include <immintrin.h>

/* Two blocks in the halves of `a` and two in those of `b`: their maxima in the quarters 0, 2, 1, 3. */
INLINE __m512i merge_quarters_of(__m512i a, __m512i b) {
    const __m512i others = _mm512_setr_epi64(2, 3, 8, 9, 6, 7, 12, 13);
    return _mm512_max_epu16(_mm512_mask_blend_epi64(0xcc, a, b),
                            _mm512_permutex2var_epi64(a, others, b));
}

/* Largest magnitude word of each of eight blocks. */
INLINE __m128i scan_eight(const uint16_t *words) {
    const __m256i magnitude = _mm256_set1_epi16(WORD_MAGNITUDE);
    __m256i most[8];
    for (int i = 0; i < 8; i++) {
        const __m256i *half = (const __m256i *)(const void *)(words + MX_BLOCK * i);
        most[i] = _mm256_max_epu16(_mm256_and_si256(_mm256_loadu_si256(half), magnitude),
                                   _mm256_and_si256(_mm256_loadu_si256(half + 1), magnitude));
    }
    __m512i pair[4];
    for (int i = 0; i < 4; i++)
        pair[i] = _mm512_inserti64x4(_mm512_castsi256_si512(most[i]), most[i + 4], 1);
    __m512i low = merge_quarters_of(pair[0], pair[1]), high = merge_quarters_of(pair[2], pair[3]);
    __m512i all = _mm512_max_epu16(_mm512_unpacklo_epi64(low, high),
                                   _mm512_unpackhi_epi64(low, high));
    all = _mm512_max_epu16(all, _mm512_rol_epi64(all, 32));
    all = _mm512_max_epu16(all, _mm512_rol_epi32(all, 16));
    /* The blocks are in the quadwords 0, 2, 1, 3, 4, 6, 5, 7. */
    return _mm_shuffle_epi8(_mm512_cvtepi64_epi16(all),
                            _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
}
