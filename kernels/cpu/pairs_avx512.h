/* A block as two vectors of float32: its even and its odd elements. */
#ifndef MXFP4_PAIRS_AVX512_H
#define MXFP4_PAIRS_AVX512_H

#include "values.h"

#include <immintrin.h>

typedef struct {
    __m512 even, odd;
} mx_pairs;

/* The float32 values whose upper halves are 32 words. */
INLINE mx_pairs pairs_of_words(__m512i words) {
    mx_pairs pairs;
    pairs.even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    pairs.odd = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
    return pairs;
}

INLINE mx_pairs load_pairs(const void *source, int dtype) {
    if (dtype == MX_BF16) return pairs_of_words(_mm512_loadu_si512(source));
    __m512 first, second;
    if (dtype == MX_F16) {
        __m512i halves = _mm512_loadu_si512(source);
        first = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    } else {
        first = _mm512_loadu_ps(source);
        second = _mm512_loadu_ps((const float *)source + 16);
    }
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    mx_pairs pairs;
    pairs.even = _mm512_permutex2var_ps(first, even, second);
    pairs.odd = _mm512_permutex2var_ps(first, _mm512_or_si512(even, _mm512_set1_epi32(1)), second);
    return pairs;
}

#endif
