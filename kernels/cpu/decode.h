/* Decoding: a table of the 16 elements at scale 1, with the exponent added to all but the zeros. */
#ifndef MXFP4_DECODE_H
#define MXFP4_DECODE_H

#include "values.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Between these bytes every element but zero is a normal, finite BF16 number. */
#define NORMAL_FROM 2
#define NORMAL_TO MX_MAX_SCALE_BYTE

#define SCALE_ONE 127

static const uint16_t ELEMENT_WORDS[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                           0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                           0xc000, 0xc040, 0xc080, 0xc0c0};

/* Any byte: float32 bits of one element, computed in double; byte 255 gives NaN without a sign. */
static uint32_t element_bits(unsigned code, int byte) {
    static const double value[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    float result = (float)(value[code & 7] * scale_of(byte));
    uint32_t bits;
    memcpy(&bits, &result, sizeof bits);
    return byte == 255 ? 0x7fc00000u : bits | (uint32_t)(code & 8) << 28;
}

static void decode_block_bf16(const uint8_t *codes, int byte, uint16_t *out) {
    for (int i = 0; i < MX_BLOCK; i++)
        out[i] = (uint16_t)(element_bits(codes[i / 2] >> (4 * (i & 1)) & 15u, byte) >> 16);
}

static void decode_block_f32(const uint8_t *codes, int byte, uint32_t *out) {
    for (int i = 0; i < MX_BLOCK; i++)
        out[i] = element_bits(codes[i / 2] >> (4 * (i & 1)) & 15u, byte);
}

INLINE int is_normal(int byte) { return byte >= NORMAL_FROM && byte <= NORMAL_TO; }

#if defined(MX_AVX512)
INLINE __m512i element_table(int byte) {
    const __m512i ones = _mm512_broadcast_i64x4(
        _mm256_loadu_si256((const __m256i *)(const void *)ELEMENT_WORDS));
    __m512i exponent = _mm512_set1_epi16((short)((byte - SCALE_ONE) * 128));
    return _mm512_mask_add_epi16(ones, 0xfefefefe, ones, exponent);
}

INLINE __m512i element_words(const uint8_t *codes, int byte) {
    __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
    index = _mm512_or_si512(index, _mm512_slli_epi32(index, 12));
    return _mm512_permutexvar_epi16(index, element_table(byte));
}

static void decode_bf16(const uint8_t *codes, const uint8_t *scales, uint16_t *out, size_t blocks) {
    for (size_t i = 0; i < blocks; i++, codes += MX_BLOCK_BYTES, out += MX_BLOCK) {
        if (UNLIKELY(!is_normal(scales[i])))
            decode_block_bf16(codes, scales[i], out);
        else
            _mm512_storeu_si512(out, element_words(codes, scales[i]));
    }
}

static void decode_f32(const uint8_t *codes, const uint8_t *scales, uint32_t *out, size_t blocks) {
    for (size_t i = 0; i < blocks; i++, codes += MX_BLOCK_BYTES, out += MX_BLOCK) {
        if (UNLIKELY(!is_normal(scales[i]))) {
            decode_block_f32(codes, scales[i], out);
            continue;
        }
        __m512i words = element_words(codes, scales[i]);
        __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words));
        __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1));
        _mm512_storeu_si512(out, _mm512_slli_epi32(low, 16));
        _mm512_storeu_si512(out + MX_BLOCK / 2, _mm512_slli_epi32(high, 16));
    }
}
#elif defined(__AVX2__)
/* Words 0-15 and 16-31 of a block; upper and lower bytes come from two tables of 16 entries. */
INLINE void element_words(const uint8_t *codes, int byte, __m256i *first, __m256i *second) {
    const __m256i upper = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf, (char)0xbf,
        (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0));
    const __m256i lower = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0,
                      (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0));
    const __m128i nibble = _mm_set1_epi8(15);
    const __m256i magnitude = _mm256_set1_epi16(WORD_MAGNITUDE), zero = _mm256_setzero_si256();
    __m128i packed = _mm_loadu_si128((const __m128i *)(const void *)codes);
    __m128i even = _mm_and_si128(packed, nibble);
    __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    __m256i code = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
    __m256i high = _mm256_shuffle_epi8(upper, code), low = _mm256_shuffle_epi8(lower, code);
    __m256i w0 = _mm256_unpacklo_epi8(low, high), w1 = _mm256_unpackhi_epi8(low, high);
    __m256i exponent = _mm256_set1_epi16((short)((byte - SCALE_ONE) * 128));
    __m256i zero0 = _mm256_cmpeq_epi16(_mm256_and_si256(w0, magnitude), zero);
    __m256i zero1 = _mm256_cmpeq_epi16(_mm256_and_si256(w1, magnitude), zero);
    w0 = _mm256_add_epi16(w0, _mm256_andnot_si256(zero0, exponent));
    w1 = _mm256_add_epi16(w1, _mm256_andnot_si256(zero1, exponent));
    *first = _mm256_permute2x128_si256(w0, w1, 0x20);
    *second = _mm256_permute2x128_si256(w0, w1, 0x31);
}

static void decode_bf16(const uint8_t *codes, const uint8_t *scales, uint16_t *out, size_t blocks) {
    for (size_t i = 0; i < blocks; i++, codes += MX_BLOCK_BYTES, out += MX_BLOCK) {
        if (UNLIKELY(!is_normal(scales[i]))) {
            decode_block_bf16(codes, scales[i], out);
            continue;
        }
        __m256i first, second;
        element_words(codes, scales[i], &first, &second);
        _mm256_storeu_si256((__m256i *)(void *)out, first);
        _mm256_storeu_si256((__m256i *)(void *)(out + MX_BLOCK / 2), second);
    }
}

INLINE void store_floats(__m256i words, uint32_t *out) {
    __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(words));
    __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(words, 1));
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_slli_epi32(low, 16));
    _mm256_storeu_si256((__m256i *)(void *)(out + 8), _mm256_slli_epi32(high, 16));
}

static void decode_f32(const uint8_t *codes, const uint8_t *scales, uint32_t *out, size_t blocks) {
    for (size_t i = 0; i < blocks; i++, codes += MX_BLOCK_BYTES, out += MX_BLOCK) {
        if (UNLIKELY(!is_normal(scales[i]))) {
            decode_block_f32(codes, scales[i], out);
            continue;
        }
        __m256i first, second;
        element_words(codes, scales[i], &first, &second);
        store_floats(first, out);
        store_floats(second, out + MX_BLOCK / 2);
    }
}
#else
/* Word of a code by arithmetic: exponent and mantissa follow from code * 64, except for 0.5 and 0. */
INLINE uint16_t element_word(unsigned code, unsigned base) {
    unsigned magnitude = code & 7;
    unsigned word = base + (magnitude << 6);
    word = magnitude == 1 ? base : word;
    word = magnitude == 0 ? 0 : word;
    return (uint16_t)(word | (code & 8) << 12);
}

static void decode_bf16(const uint8_t *codes, const uint8_t *scales, uint16_t *out, size_t blocks) {
    for (size_t i = 0; i < blocks; i++, codes += MX_BLOCK_BYTES, out += MX_BLOCK) {
        if (UNLIKELY(!is_normal(scales[i]))) {
            decode_block_bf16(codes, scales[i], out);
            continue;
        }
        uint16_t base = (uint16_t)((scales[i] - 1u) << 7), code[MX_BLOCK];
        for (int k = 0; k < MX_BLOCK_BYTES; k++) {
            code[2 * k] = codes[k] & 15;
            code[2 * k + 1] = codes[k] >> 4;
        }
        for (int k = 0; k < MX_BLOCK; k++) out[k] = element_word(code[k], base);
    }
}

static void decode_f32(const uint8_t *codes, const uint8_t *scales, uint32_t *out, size_t blocks) {
    for (size_t i = 0; i < blocks; i++, codes += MX_BLOCK_BYTES, out += MX_BLOCK) {
        uint16_t words[MX_BLOCK];
        if (UNLIKELY(!is_normal(scales[i]))) {
            decode_block_f32(codes, scales[i], out);
            continue;
        }
        decode_bf16(codes, scales + i, words, 1);
        for (int k = 0; k < MX_BLOCK; k++) out[k] = (uint32_t)words[k] << 16;
    }
}
#endif

#endif
