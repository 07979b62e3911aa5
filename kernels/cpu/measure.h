/* Statistics of encoded blocks. Sums of squares are rounded to integers block by block, so that
 * they do not depend on the order of blocks; see mxfp4/statistics.py. */
#ifndef MXFP4_MEASURE_H
#define MXFP4_MEASURE_H

#include "values.h"

#include <math.h>

INLINE float tree_sum_float(const float *terms) {
    float sum[MX_BLOCK / 2];
    for (int i = 0; i < 16; i++) sum[i] = terms[2 * i] + terms[2 * i + 1];
    for (int i = 0; i < 8; i++) sum[i] += sum[i + 8];
    for (int i = 0; i < 4; i++) sum[i] += sum[i + 4];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

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

INLINE void measure_block(const void *source, const uint16_t *words, int dtype, int byte,
                          const mx_plan *plan, mx_statistics *to) {
    float scaled[MX_BLOCK], signal[MX_BLOCK], error[MX_BLOCK];
    uint32_t most = 0, worst = 0; /* magnitudes are ordered as their bits are */
    load_scaled(source, dtype, byte, scaled);
    for (int i = 0; i < MX_BLOCK; i++) {
        float difference = scaled[i] - nearest(scaled[i]);
        signal[i] = scaled[i] * scaled[i];
        error[i] = difference * difference;
        uint32_t magnitude = bits_of(difference) & 0x7fffffffu, size = bits_of(scaled[i]);
        worst = magnitude > worst ? magnitude : worst;
        most = size > most ? size : most;
    }
    double max_abs = scale_of(byte) * (double)float_of(most);
    double max_error = scale_of(byte) * (double)float_of(worst);
    to->max_abs = max_abs > to->max_abs ? max_abs : to->max_abs;
    to->max_abs_error = max_error > to->max_abs_error ? max_error : to->max_abs_error;
    to->zero_blocks += most == 0;
    count_words(words, byte, plan, to);
    to->histogram[byte]++;
    to->signal[byte] += llrintf(tree_sum_float(signal) * MX_SUM_UNIT);
    to->error[byte] += llrintf(tree_sum_float(error) * MX_SUM_UNIT);
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
    for (; i < blocks; i++)
        measure_block((const char *)source + i * width, words + i * MX_BLOCK, dtype, scales[i],
                      plan, to);
}

#endif
