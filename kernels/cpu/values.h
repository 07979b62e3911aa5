/* Source values: as float32, as words, and their distance from the nearest element. */
#ifndef MXFP4_VALUES_H
#define MXFP4_VALUES_H

#include "words.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE size_t width_of(int dtype) { return dtype == MX_F32 ? 4 : 2; }

/* Float32 bits of a float16, exact for all of them. */
INLINE uint32_t widen_half(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu, exponent = magnitude >> 10;
    uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
    uint32_t infinite = normal + ((255u - 31u - 127u + 15u) << 23);
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t bits = exponent == 0 ? subnormal : exponent == 31 ? infinite : normal;
    return bits | (uint32_t)(half & 0x8000u) << 16;
}

/* 2^(byte - 127), exact for all bytes. */
INLINE double scale_of(int byte) {
    uint64_t bits = (uint64_t)(byte - 127 + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* Float32 bits of the 32 values of a block. */
INLINE void load_bits(const void *source, int dtype, uint32_t *bits) {
    const uint16_t *half = source;
    if (dtype == MX_F32)
        memcpy(bits, source, MX_BLOCK * sizeof *bits);
    else if (dtype == MX_BF16)
        for (int i = 0; i < MX_BLOCK; i++) bits[i] = (uint32_t)half[i] << 16;
    else
#if defined(__F16C__)
        for (int i = 0; i < MX_BLOCK; i += 8) {
            __m128i part = _mm_loadu_si128((const __m128i *)(const void *)(half + i));
            _mm256_storeu_si256((__m256i *)(void *)(bits + i),
                                _mm256_castps_si256(_mm256_cvtph_ps(part)));
        }
#else
        for (int i = 0; i < MX_BLOCK; i++) bits[i] = widen_half(half[i]);
#endif
}

/* Magnitudes of a block in units of the scale: the even elements first, then the odd ones, so that
 * neighbours are 16 apart and vectors can be added without shuffles. */
INLINE void load_scaled(const void *source, int dtype, int byte, float *scaled) {
    const float inverse = float_of((uint32_t)(254 - byte) << 23);
    uint32_t bits[MX_BLOCK], even[MX_BLOCK / 2], odd[MX_BLOCK / 2];
    if (dtype == MX_BF16) {
        memcpy(bits, source, MX_BLOCK * sizeof(uint16_t)); /* two words each */
        for (int i = 0; i < MX_BLOCK / 2; i++) {
            even[i] = bits[i] << 16 & 0x7fffffffu;
            odd[i] = bits[i] & 0x7fff0000u;
        }
    } else {
        load_bits(source, dtype, bits);
        for (int i = 0; i < MX_BLOCK / 2; i++) {
            even[i] = bits[2 * i] & 0x7fffffffu;
            odd[i] = bits[2 * i + 1] & 0x7fffffffu;
        }
    }
    for (int i = 0; i < MX_BLOCK / 2; i++) {
        scaled[i] = float_of(even[i]) * inverse;
        scaled[i + MX_BLOCK / 2] = float_of(odd[i]) * inverse;
    }
}

/* Sum of 32 terms in the order of load_scaled: neighbours first, then halves. Every implementation
 * keeps this order. */
INLINE double tree_sum(const double *terms) {
    double sum[MX_BLOCK / 2];
    for (int i = 0; i < 16; i++) sum[i] = terms[i] + terms[i + 16];
    for (int i = 0; i < 8; i++) sum[i] += sum[i + 8];
    for (int i = 0; i < 4; i++) sum[i] += sum[i + 4];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* Reduce blocks to words: the upper half of the float32, and 1 in the last bit if the lower half
 * was not zero. */
INLINE void reduce(const void *source, int dtype, uint16_t *words, size_t blocks) {
    for (size_t i = 0; i < blocks; i++) {
        uint32_t bits[MX_BLOCK];
        load_bits((const char *)source + i * MX_BLOCK * width_of(dtype), dtype, bits);
        for (int k = 0; k < MX_BLOCK; k++)
            words[MX_BLOCK * i + (size_t)k] = (uint16_t)((bits[k] >> 16) | ((bits[k] & 0xffff) != 0));
    }
}

/* The element nearest to a magnitude, ties either way. Adding 1.5 * 2^23 times the spacing of the
 * elements rounds to a multiple of that spacing. */
INLINE float nearest(float scaled) {
    uint32_t power = bits_of(scaled) & 0x7f800000u;
    power = power < 0x3f800000u ? 0x3f800000u : power; /* spacing 1/2 below 2 */
    float shift = float_of(power + (22u << 23) + 0x400000u);
    float rounded = (scaled + shift) - shift;
    return rounded < 6.0f ? rounded : 6.0f;
}

#endif
