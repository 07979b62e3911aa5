/* Half a block of float32 as vectors of the compiler: its even or its odd elements. */
#ifndef MXFP4_VECTORS_H
#define MXFP4_VECTORS_H

#include "values.h"

#if defined(__AVX2__)
#define MX_VECTOR 32
#else
#define MX_VECTOR 16
#endif
#define MX_PARTS (MX_BLOCK / 2 * 4 / MX_VECTOR)

typedef float mx_floats __attribute__((vector_size(MX_VECTOR)));
typedef int32_t mx_ints __attribute__((vector_size(MX_VECTOR)));
typedef uint32_t mx_uints __attribute__((vector_size(MX_VECTOR)));
typedef float mx_four __attribute__((vector_size(16)));

typedef struct {
    mx_floats even[MX_PARTS], odd[MX_PARTS];
} mx_halves;

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX2__)
INLINE mx_floats larger_floats(mx_floats a, mx_floats b) { return (mx_floats)_mm256_max_ps(a, b); }
INLINE mx_floats smaller_floats(mx_floats a, mx_floats b) { return (mx_floats)_mm256_min_ps(a, b); }
INLINE mx_ints larger_ints(mx_ints a, mx_ints b) {
    return (mx_ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
}
#else
INLINE mx_ints larger_ints(mx_ints a, mx_ints b) {
    mx_ints first = (mx_ints)(a > b);
    return (a & first) | (b & ~first);
}
/* Floats that are not negative are ordered as their bits are. */
INLINE mx_floats larger_floats(mx_floats a, mx_floats b) {
    return (mx_floats)larger_ints((mx_ints)a, (mx_ints)b);
}
INLINE mx_floats smaller_floats(mx_floats a, mx_floats b) {
    mx_ints first = (mx_ints)((mx_ints)a < (mx_ints)b);
    return (mx_floats)(((mx_ints)a & first) | ((mx_ints)b & ~first));
}
#endif

/* Cut off towards zero. */
INLINE mx_ints ints_of(mx_floats a) { return __builtin_convertvector(a, mx_ints); }

/* Squares of integers below 2^15 in magnitude; larger ones are cut. */
INLINE mx_ints square_of(mx_ints a) {
#if defined(__AVX2__)
    __m256i magnitude = _mm256_abs_epi32((__m256i)a);
    return (mx_ints)_mm256_madd_epi16(magnitude, magnitude);
#elif defined(__SSE2__)
    __m128i sign = _mm_srai_epi32((__m128i)a, 31);
    __m128i magnitude = _mm_sub_epi32(_mm_xor_si128((__m128i)a, sign), sign);
    return (mx_ints)_mm_madd_epi16(magnitude, magnitude);
#else
    return a * a;
#endif
}

INLINE mx_floats magnitude_of(mx_floats a) { return (mx_floats)((mx_ints)a & 0x7fffffff); }

/* GCC copies to a variable in pieces, and waits for them when it loads the variable. */
INLINE mx_ints load_ints(const void *source) {
#if defined(__AVX2__)
    return (mx_ints)_mm256_loadu_si256((const __m256i *)source);
#elif defined(__SSE2__)
    return (mx_ints)_mm_loadu_si128((const __m128i *)source);
#else
    mx_ints value;
    memcpy(&value, source, sizeof value);
    return value;
#endif
}

/* Magnitudes of the values of a block. */
INLINE void load_halves(const void *source, int dtype, mx_halves *to) {
    if (dtype == MX_BF16) {
        for (int i = 0; i < MX_PARTS; i++) {
            mx_ints pair = load_ints((const char *)source + i * MX_VECTOR);
            to->even[i] = magnitude_of((mx_floats)(pair << 16));
            to->odd[i] = (mx_floats)(pair & 0x7fff0000);
        }
        return;
    }
    uint32_t bits[MX_BLOCK], even[MX_BLOCK / 2], odd[MX_BLOCK / 2];
    load_bits(source, dtype, bits);
    for (int i = 0; i < MX_BLOCK / 2; i++) {
        even[i] = bits[2 * i] & 0x7fffffffu;
        odd[i] = bits[2 * i + 1] & 0x7fffffffu;
    }
    memcpy(to->even, even, sizeof even);
    memcpy(to->odd, odd, sizeof odd);
}

/* `nearest` of values.h in every lane. */
INLINE mx_floats nearest_floats(mx_floats scaled) {
    mx_ints power = larger_ints((mx_ints)scaled & 0x7f800000, (mx_ints){0} + 0x3f800000);
    mx_floats shift = (mx_floats)(power + ((22 << 23) + 0x400000));
    mx_floats rounded = (scaled + shift) - shift;
    return smaller_floats(rounded, (mx_floats){0} + 6.0f);
}

/* The tree sum of values.h, from the sums of neighbours. */
INLINE float sum_halves(mx_floats *sum) {
    for (int half = MX_PARTS / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    float last[MX_VECTOR / 4];
    memcpy(last, sum, sizeof last);
#if MX_VECTOR == 32
    mx_four low, high;
    memcpy(&low, last, sizeof low);
    memcpy(&high, last + 4, sizeof high);
    low += high;
    memcpy(last, &low, sizeof low);
#endif
    return (last[0] + last[2]) + (last[1] + last[3]);
}

INLINE float largest_of(mx_floats v) {
    float lane[MX_VECTOR / 4], most = 0;
    memcpy(lane, &v, sizeof lane);
    for (int i = 0; i < MX_VECTOR / 4; i++) most = lane[i] > most ? lane[i] : most;
    return most;
}

#endif
