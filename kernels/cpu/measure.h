/* Statistics of encoded blocks. Sums of squares are rounded to integers block by block, so that
 * they do not depend on the order of blocks; see mxfp4/statistics.py. */
#ifndef MXFP4_MEASURE_H
#define MXFP4_MEASURE_H

#include "vectors.h"

#include <math.h>

/* Elements beyond 6 scales, and elements that are not zero but became zero. */
INLINE void count_words(const uint16_t *words, int byte, const mx_plan *plan, mx_statistics *to) {
    uint16_t largest = (uint16_t)((byte << 7) + (2 << 7) + 0x40);
    uint16_t lowest = (uint16_t)(quarter_word(byte) - plan->flush_ties);
    uint16_t clipped = 0, flushed = 0;
    for (int i = 0; i < MX_BLOCK; i++) {
        uint16_t magnitude = words[i] & WORD_MAGNITUDE;
        clipped += magnitude > largest;
        flushed += (uint16_t)(magnitude - 1) < lowest;
    }
    to->clipped += clipped;
    to->flushed += flushed;
}

typedef struct {
    mx_floats most, worst; /* largest magnitude and largest error so far, in every lane */
} mx_extremes;

INLINE void measure_block(const void *source, const uint16_t *words, int dtype, int byte,
                          const mx_plan *plan, mx_extremes *extremes, mx_statistics *to) {
    const float inverse = float_of((uint32_t)(254 - byte) << 23);
    const float scale = float_of(byte ? (uint32_t)byte << 23 : 1u << 22);
    mx_floats signal[MX_PARTS], error[MX_PARTS];
    mx_halves value;
    load_halves(source, dtype, &value);
    for (int i = 0; i < MX_PARTS; i++) {
        mx_floats even = value.even[i] * inverse, odd = value.odd[i] * inverse;
        mx_floats even_error = even - nearest_floats(even), odd_error = odd - nearest_floats(odd);
        mx_floats larger = larger_floats(magnitude_of(even_error), magnitude_of(odd_error));
        extremes->worst = larger_floats(extremes->worst, larger * scale);
        extremes->most = larger_floats(extremes->most, larger_floats(value.even[i], value.odd[i]));
        signal[i] = even * even + odd * odd;
        error[i] = even_error * even_error + odd_error * odd_error;
    }
    if (UNLIKELY(!byte)) to->zero_blocks += block_maximum(words) == 0;
    count_words(words, byte, plan, to);
    to->histogram[byte]++;
    to->signal[byte] += llrintf(sum_halves(signal) * MX_SUM_UNIT);
    to->error[byte] += llrintf(sum_halves(error) * MX_SUM_UNIT);
}

INLINE void add_extremes(double most, double worst, mx_statistics *to) {
    to->max_abs = most > to->max_abs ? most : to->max_abs;
    to->max_abs_error = worst > to->max_abs_error ? worst : to->max_abs_error;
}

#if defined(MX_AVX512)
#include "measure_avx512.h"
#endif

INLINE void measure(const void *source, const uint16_t *words, int dtype, const uint8_t *codes,
                    const uint8_t *scales, size_t blocks, const mx_plan *plan, mx_statistics *to) {
    size_t i = 0, width = MX_BLOCK * width_of(dtype);
#if defined(MX_AVX512)
    for (; i + 8 <= blocks; i += 8)
        measure_eight((const char *)source + i * width, words + i * MX_BLOCK, dtype,
                      codes + i * MX_BLOCK_BYTES, scales + i, plan, to);
#endif
    (void)codes;
    mx_extremes extremes = {{0}, {0}};
    for (; i < blocks; i++)
        measure_block((const char *)source + i * width, words + i * MX_BLOCK, dtype, scales[i],
                      plan, &extremes, to);
    add_extremes((double)largest_of(extremes.most), (double)largest_of(extremes.worst), to);
}

#endif
