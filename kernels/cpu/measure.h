/* Statistics of encoded blocks. Magnitudes are cut to integers first, so that all sums are
 * exact whatever their order; see mxfp4/statistics.py. */
#ifndef MXFP4_MEASURE_H
#define MXFP4_MEASURE_H

#include "vectors.h"

#define MX_UNIT_BITS 12 /* magnitudes are multiples of 2^-12 of the scale */
#define MX_UNIT ((float)(1 << MX_UNIT_BITS))
#define MX_SIGNAL_CUT 2 /* bits that the signal drops before it is squared */

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

INLINE void add_extremes(double most, double worst, mx_statistics *to) {
    to->max_abs = most > to->max_abs ? most : to->max_abs;
    to->max_abs_error = worst > to->max_abs_error ? worst : to->max_abs_error;
}

/* `signal` and `error` in units of 2^-24 squared scales. */
INLINE void add_sums(int byte, uint64_t blocks, uint64_t signal, uint64_t error,
                     mx_statistics *to) {
    to->histogram[byte] += (int64_t)blocks;
    to->signal[byte] += (int64_t)signal;
    to->error[byte] += (int64_t)error;
}

/* Cut off, but to no less than 1 except for zeros. */
INLINE mx_ints units_of(mx_floats scaled, mx_floats value) {
    mx_ints units = ints_of(scaled * MX_UNIT);
    return units - ((mx_ints)(units == 0) & (mx_ints)((mx_ints)value != 0));
}

/* Sums of squares of a block in 64 bits, for values of 8 scales and more, and for scale byte 0, whose
 * blocks may be so far below the scale that the signal needs all bits. */
static __attribute__((noinline)) void add_wide_squares(const mx_ints *units, const mx_ints *errors,
                                                       int byte, mx_statistics *to) {
    int32_t unit[MX_BLOCK], rest[MX_BLOCK];
    int64_t signal = 0, error = 0;
    memcpy(unit, units, sizeof unit);
    memcpy(rest, errors, sizeof rest);
    for (int i = 0; i < MX_BLOCK; i++) {
        int64_t kept = byte ? unit[i] >> MX_SIGNAL_CUT << MX_SIGNAL_CUT : unit[i];
        signal += kept * kept;
        error += (int64_t)rest[i] * rest[i];
    }
    add_sums(byte, 1, (uint64_t)signal, (uint64_t)error, to);
}

INLINE void add_squares(const mx_ints *units, const mx_ints *errors, int byte, mx_statistics *to) {
    mx_ints any = {0};
    mx_uints signals = {0}, squares = {0};
    for (int i = 0; i < 2 * MX_PARTS; i++) {
        any |= units[i];
        signals += (mx_uints)square_of(units[i] >> MX_SIGNAL_CUT);
        squares += (mx_uints)square_of(errors[i]);
    }
    uint32_t lane[3][MX_VECTOR / 4];
    int32_t all = 0;
    memcpy(lane[0], &any, sizeof any);
    memcpy(lane[1], &signals, sizeof signals);
    memcpy(lane[2], &squares, sizeof squares);
    uint64_t signal = 0, error = 0;
    for (int i = 0; i < MX_VECTOR / 4; i++) {
        all |= (int32_t)lane[0][i];
        signal += lane[1][i];
        error += lane[2][i];
    }
    if (UNLIKELY(all >= 8 << MX_UNIT_BITS || !byte))
        add_wide_squares(units, errors, byte, to);
    else
        add_sums(byte, 1, signal << (2 * MX_SIGNAL_CUT), error, to);
}

/* The largest difference between a value and its element, in scales. */
INLINE float largest_error(const mx_halves *value, float inverse) {
    mx_floats worst = {0};
    for (int i = 0; i < MX_PARTS; i++) {
        mx_floats even = value->even[i] * inverse, odd = value->odd[i] * inverse;
        worst = larger_floats(worst, magnitude_of(even - nearest_floats(even)));
        worst = larger_floats(worst, magnitude_of(odd - nearest_floats(odd)));
    }
    return largest_of(worst);
}

INLINE void measure_block(const void *source, const uint16_t *words, int dtype, int byte,
                          const mx_plan *plan, mx_statistics *to) {
    if (UNLIKELY(!byte && block_maximum(words) == 0)) {
        to->zero_blocks++;
        to->histogram[0]++;
        return;
    }
    const float inverse = float_of((uint32_t)(254 - byte) << 23);
    const float scale = float_of(byte ? (uint32_t)byte << 23 : 1u << 22);
    mx_ints units[2 * MX_PARTS], errors[2 * MX_PARTS];
    mx_floats most = {0}, worst = {0};
    mx_halves value;
    load_halves(source, dtype, &value);
    for (int i = 0; i < 2 * MX_PARTS; i++) {
        mx_floats half = i < MX_PARTS ? value.even[i] : value.odd[i - MX_PARTS];
        mx_floats scaled = half * inverse, element = nearest_floats(scaled);
        most = larger_floats(most, half);
        worst = larger_floats(worst, magnitude_of(scaled - element));
        units[i] = units_of(scaled, half);
        errors[i] = units[i] - ints_of(element * MX_UNIT);
    }
    add_squares(units, errors, byte, to);
    add_extremes((double)largest_of(most), (double)(largest_of(worst) * scale), to);
    count_words(words, byte, plan, to);
}

#if defined(__AVX2__)
#include "measure_avx2.h"
#else
INLINE void measure(const void *source, const uint16_t *words, int dtype, const uint8_t *codes,
                    const uint8_t *scales, size_t blocks, const mx_plan *plan, mx_statistics *to) {
    size_t width = MX_BLOCK * width_of(dtype);
    (void)codes;
    for (size_t i = 0; i < blocks; i++)
        measure_block((const char *)source + i * width, words + i * MX_BLOCK, dtype, scales[i],
                      plan, to);
}
#endif

#endif
