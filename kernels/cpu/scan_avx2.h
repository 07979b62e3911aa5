/* The largest magnitude words of blocks with AVX2. */
#include "words.h"

#include <immintrin.h>

/* Maxima of each block in both quadwords of each half: those of `a` first, those of `b` second. */
INLINE __m256i merge_quadwords(__m256i a, __m256i b) {
    return _mm256_max_epu16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* Two blocks in `a` and two in `b`, both halves of each: one quadword for each. */
INLINE __m256i merge_halves(__m256i a, __m256i b) {
    return _mm256_max_epu16(_mm256_blend_epi32(a, b, 0xf0), _mm256_permute2x128_si256(a, b, 0x21));
}

INLINE __m256i merge_doublewords(__m256i a, __m256i b) {
    const __m256 first = _mm256_castsi256_ps(a), second = _mm256_castsi256_ps(b);
    return _mm256_max_epu16(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88)),
                            _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd)));
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
    __m256i low = merge_halves(merge_quadwords(most[0], most[1]), merge_quadwords(most[4], most[5]));
    __m256i high = merge_halves(merge_quadwords(most[2], most[3]), merge_quadwords(most[6], most[7]));
    __m256i all = merge_doublewords(low, high); /* the blocks 0 to 3 in one half, 4 to 7 in the other */
    all = _mm256_max_epu16(all, _mm256_srli_epi32(all, 16));
    all = _mm256_and_si256(all, _mm256_set1_epi32(0xffff));
    return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
