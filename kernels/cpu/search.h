/* The least squared error among the scale byte of the standard and its two neighbours.
 *
 * Compared are sums of differences, (v - p)^2 - (v - q)^2 = (q - p) (2v - p - q) for the nearest
 * elements p and q of two candidates: terms are zero where both round alike, and exact in double.
 */
#ifndef MXFP4_SEARCH_H
#define MXFP4_SEARCH_H

#include "vectors.h"

/* Squared error with the scale times `factor` minus that with the scale as it is. */
INLINE double error_change(const float *scaled, float factor, const float *weights) {
    double change[MX_BLOCK];
    for (int i = 0; i < MX_BLOCK; i++) {
        float p = nearest(scaled[i] * (1.0f / factor)) * factor, q = nearest(scaled[i]);
        change[i] = (double)(q - p) * ((2.0 * (double)scaled[i] - (double)p) - (double)q);
    }
    if (weights)
        for (int i = 0; i < MX_BLOCK / 2; i++) {
            change[i] *= (double)weights[2 * i];
            change[i + MX_BLOCK / 2] *= (double)weights[2 * i + 1];
        }
    return tree_sum(change);
}

/* The same for BF16 and F16 without weights: so few mantissa bits that float32 is exact too. */
INLINE float error_change_short(const mx_halves *value, int byte, float factor) {
    const float inverse = float_of((uint32_t)(254 - byte) << 23);
    mx_floats change[MX_PARTS];
    for (int i = 0; i < MX_PARTS; i++) {
        mx_floats even = value->even[i] * inverse, odd = value->odd[i] * inverse;
        mx_floats p = nearest_floats(even * (1.0f / factor)) * factor, q = nearest_floats(even);
        change[i] = (q - p) * ((2.0f * even - p) - q);
        p = nearest_floats(odd * (1.0f / factor)) * factor;
        q = nearest_floats(odd);
        change[i] += (q - p) * ((2.0f * odd - p) - q);
    }
    return sum_halves(change);
}

/* Whether a neighbour of `byte` can be better at all, without weights.
 *
 * Up: up to 6 the elements of the doubled scale are among those of this scale, so only a block with
 * a value beyond 6 can gain. Down: the halved scale differs below 1, where a value gains at most
 * 1/16, and above 3.5, where the largest value A (at least 4) alone loses min(2A - 7, 6A - 27). Up
 * to 31 values gain less than 2, so A is below 4 * (1 + 15/128), and 17 values are below 1. */
INLINE void worth_trying(const uint16_t *words, int byte, int *up, int *down) {
#if defined(MX_AVX512)
    __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(words),
                                         _mm512_set1_epi16(WORD_MAGNITUDE));
    int unit = byte << 7;
    *up = _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16((short)(unit + 0x140))) != 0;
    int top = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16((short)(unit + 0x10f))) == 0;
    __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16((short)unit));
    *down = top & (__builtin_popcount(small) >= 17);
#elif defined(__AVX2__)
    const __m256i magnitude = _mm256_set1_epi16(WORD_MAGNITUDE), *half = (const void *)words;
    __m256i a0 = _mm256_and_si256(_mm256_loadu_si256(half), magnitude);
    __m256i a1 = _mm256_and_si256(_mm256_loadu_si256(half + 1), magnitude);
    int unit = byte << 7, most = (int)maximum_of(a0, a1);
    __m256i one = _mm256_set1_epi16((short)unit);
    __m256i small = _mm256_packs_epi16(_mm256_cmpgt_epi16(one, a0), _mm256_cmpgt_epi16(one, a1));
    int count = __builtin_popcount((unsigned)_mm256_movemask_epi8(small));
    *up = most > unit + 0x140;
    *down = (most < unit + 0x10f) & (count >= 17);
#else
    unsigned one = (unsigned)byte << 7, most = 0, small = 0;
    for (int i = 0; i < MX_BLOCK; i++) {
        uint16_t magnitude = words[i] & WORD_MAGNITUDE;
        most = magnitude > most ? magnitude : most;
        small += magnitude < one;
    }
    *up = most > one + 0x140;                  /* 6 scales */
    *down = most < one + 0x10f && small >= 17; /* 4 * (1 + 15/128) scales */
#endif
}

/* The best of a scale byte and those of its neighbours that are to be tried. */
INLINE int better_byte(const void *source, int dtype, int byte, int try_up, int try_down,
                       const float *weights) {
    double up = 0, down = 0;
    try_up = try_up && byte < MX_MAX_SCALE_BYTE;
    try_down = try_down && byte > 0;
    if (dtype != MX_F32 && !weights) {
        mx_halves value;
        load_halves(source, dtype, &value);
        if (try_up) up = (double)error_change_short(&value, byte, 2.0f);
        if (try_down) down = (double)error_change_short(&value, byte, 0.5f);
    } else {
        float scaled[MX_BLOCK];
        load_scaled(source, dtype, byte, scaled);
        if (try_up) up = error_change(scaled, 2.0f, weights);
        if (try_down) down = error_change(scaled, 0.5f, weights);
    }
    return up < 0 && up <= down ? byte + 1 : down < 0 && down < up ? byte - 1 : byte;
}

#if defined(MX_AVX512)
#include "search_avx512.h"
#endif

/* Replace scale bytes by better neighbours, and the codes of their blocks. `first` is the number of
 * the first block, which fixes the weights. At most MX_BATCH blocks. */
INLINE void search(const void *source, const uint16_t *words, int dtype, uint8_t *codes,
                   uint8_t *scales, size_t blocks, size_t first, const mx_options *options,
                   const mx_plan *plan) {
    uint8_t tried[MX_BATCH], up[MX_BATCH], down[MX_BATCH], byte[MX_BATCH];
    size_t count = 0; /* lists instead of branches, which nothing could predict */
    for (size_t i = 0; i < blocks; i++) {
        int try_up = 1, try_down = 1;
        if (!options->importance)
            worth_trying(words + MX_BLOCK * i, scales[i], &try_up, &try_down);
        tried[count] = (uint8_t)i;
        up[count] = (uint8_t)try_up;
        down[count] = (uint8_t)try_down;
        count += (size_t)(try_up | try_down);
    }
    for (size_t k = 0; k < count; k++) {
        size_t i = tried[k];
        const void *block = (const char *)source + i * MX_BLOCK * width_of(dtype);
        const float *weights = options->importance;
        if (weights) weights += MX_BLOCK * ((first + i) % options->period);
#if defined(MX_AVX512)
        if (dtype != MX_F32 && !weights && scales[i] >= EXACT_FROM) {
            byte[k] = (uint8_t)better_byte_short(block, words + MX_BLOCK * i, dtype, scales[i],
                                                 up[k], down[k]);
            continue;
        }
#endif
        byte[k] = (uint8_t)better_byte(block, dtype, scales[i], up[k], down[k], weights);
    }
    size_t changed = 0;
    for (size_t k = 0; k < count; k++) {
        size_t i = tried[k];
        int differs = byte[k] != scales[i];
        scales[i] = byte[k];
        tried[changed] = (uint8_t)i;
        changed += (size_t)differs;
    }
    for (size_t k = 0; k < changed; k++) {
        size_t i = tried[k];
        encode_given(words + MX_BLOCK * i, scales[i], plan, codes + MX_BLOCK_BYTES * i);
    }
}

#endif
