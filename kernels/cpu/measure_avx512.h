/* Statistics of eight blocks with AVX-512; the same sums in the same order as measure_block. */
#include "pairs_avx512.h"

/* Sums over each of eight blocks: a vector of 16 sums of neighbours becomes one number. Two
 * quantities are reduced together, ending in the order SUM_OF. */
static const int SUM_OF[8] = {0, 8, 1, 9, 2, 10, 3, 11}; /* block to lane; the other one is at + 4 */

#define LARGER_MAGNITUDE 0xb /* of vrangeps */

INLINE __m512 fold_halves(__m512 signal, __m512 error) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(signal, error, 0x44),
                         _mm512_shuffle_f32x4(signal, error, 0xee));
}

INLINE __m512 fold_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

INLINE __m512 fold_pairs(__m512 a, __m512 b) {
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

INLINE __m512 fold_last(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

INLINE __m512 fold_eight(const __m512 *v) {
    __m512 low = fold_pairs(fold_quarters(v[0], v[1]), fold_quarters(v[2], v[3]));
    __m512 high = fold_pairs(fold_quarters(v[4], v[5]), fold_quarters(v[6], v[7]));
    return fold_last(low, high);
}

INLINE void add_sums(__m512 sums, const uint8_t *scales, mx_statistics *to) {
    int64_t sum[16] __attribute__((aligned(64)));
    sums = _mm512_mul_ps(sums, _mm512_set1_ps(MX_SUM_UNIT));
    _mm512_store_si512(sum, _mm512_cvtps_epi64(_mm512_castps512_ps256(sums)));
    _mm512_store_si512(sum + 8, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(sums, 1)));
    for (int i = 0; i < 8; i++) {
        to->histogram[scales[i]]++;
        to->signal[scales[i]] += sum[SUM_OF[i]];
        to->error[scales[i]] += sum[SUM_OF[i] + 4];
    }
}

INLINE void measure_eight(const char *source, const uint16_t *words, int dtype,
                          const uint8_t *codes, const uint8_t *scales, const mx_plan *plan,
                          mx_statistics *to) {
    const __m512 elements = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2,
                                           -3, -4, -6);
    __m512 folded[8], most = _mm512_setzero_ps(), worst = _mm512_setzero_ps();
    unsigned clipped = 0, flushed = 0;
    for (int i = 0; i < 8; i++) {
        int byte = scales[i];
        __m512 inverse = _mm512_set1_ps(float_of((uint32_t)(254 - byte) << 23));
        __m512 scale = _mm512_set1_ps(float_of(byte ? (uint32_t)byte << 23 : 1u << 22));
        mx_pairs value = load_pairs(source + (size_t)i * MX_BLOCK * width_of(dtype), dtype);
        __m512i index = _mm512_cvtepu8_epi32(
            _mm_loadu_si128((const __m128i *)(const void *)(codes + MX_BLOCK_BYTES * i)));
        __m512 even = _mm512_mul_ps(value.even, inverse), odd = _mm512_mul_ps(value.odd, inverse);
        __m512 even_error = _mm512_sub_ps(even, _mm512_permutexvar_ps(index, elements));
        index = _mm512_srli_epi32(index, 4);
        __m512 odd_error = _mm512_sub_ps(odd, _mm512_permutexvar_ps(index, elements));
        most = _mm512_max_ps(most, _mm512_range_ps(value.even, value.odd, LARGER_MAGNITUDE));
        __m512 larger = _mm512_range_ps(even_error, odd_error, LARGER_MAGNITUDE);
        worst = _mm512_max_ps(worst, _mm512_mul_ps(larger, scale));
        __m512 signal = _mm512_add_ps(_mm512_mul_ps(even, even), _mm512_mul_ps(odd, odd));
        __m512 error = _mm512_add_ps(_mm512_mul_ps(even_error, even_error),
                                     _mm512_mul_ps(odd_error, odd_error));
        folded[i] = fold_halves(signal, error);

        __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(words + MX_BLOCK * i),
                                             _mm512_set1_epi16(WORD_MAGNITUDE));
        __m512i largest = _mm512_set1_epi16((short)((byte << 7) + 0x140));
        __m512i lowest = _mm512_set1_epi16((short)(quarter_word(byte) - plan->flush_ties));
        __m512i less_one = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1));
        clipped += (unsigned)__builtin_popcount(_mm512_cmpgt_epu16_mask(magnitude, largest));
        flushed += (unsigned)__builtin_popcount(_mm512_cmplt_epu16_mask(less_one, lowest));
        if (UNLIKELY(!byte)) to->zero_blocks += _mm512_test_epi16_mask(magnitude, magnitude) == 0;
    }
    to->clipped += clipped;
    to->flushed += flushed;
    add_extremes((double)_mm512_reduce_max_ps(most), (double)_mm512_reduce_max_ps(worst), to);
    add_sums(fold_eight(folded), scales, to);
}
