/* Error changes of BF16 and F16 blocks with AVX-512. These sources have so few mantissa bits that
 * every term and every sum is exact in float32, so the order of summation does not matter. */
#include "pairs_avx512.h"

/* The elements nearest to 32 magnitude words, times 2^shift relative to the scale of `byte`. */
INLINE mx_pairs nearest_pairs(__m512i magnitude, int byte, int shift) {
    /* Elements (at scale 1) by step; steps of a saturated value go on. */
    const __m512i elements = _mm512_set_epi16(
        0x40c0, 0x40c0, 0x40c0, 0x40c0, 0x40c0, 0x40c0, 0x40c0, 0x40c0, 0x40c0, 0x40c0, 0x40c0,
        0x40c0, 0x40c0, 0x40c0, 0x4080, 0x4080, 0x4040, 0x4040, 0x4000, 0x4000, 0x3fc0, 0x3fc0,
        0x3f80, 0x3f80, 0x3f80, 0x3f00, 0x3f00, 0x3f00, 0x3f00, 0x3f00, 0x3f00, 0x0000);
    int low = (int)quarter_word(byte) + 128 * shift - 31;
    __m512i step = _mm512_srli_epi16(_mm512_subs_epu16(magnitude, _mm512_set1_epi16((short)low)), 5);
    step = _mm512_min_epu16(step, _mm512_set1_epi16(31));
    mx_pairs pairs = pairs_of_words(_mm512_permutexvar_epi16(step, elements));
    __m512 factor = _mm512_set1_ps(shift > 0 ? 2.0f : shift < 0 ? 0.5f : 1.0f);
    pairs.even = _mm512_mul_ps(pairs.even, factor);
    pairs.odd = _mm512_mul_ps(pairs.odd, factor);
    return pairs;
}

INLINE __m512 change_of(__m512 doubled, __m512 p, __m512 q) {
    return _mm512_mul_ps(_mm512_sub_ps(q, p), _mm512_sub_ps(doubled, _mm512_add_ps(p, q)));
}

INLINE int better_byte_short(const void *source, const uint16_t *words, int dtype, int byte,
                             int try_up, int try_down) {
    const __m512 sign = _mm512_set1_ps(-0.0f);
    __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(words),
                                         _mm512_set1_epi16(WORD_MAGNITUDE));
    int shift = try_up ? 1 : -1; /* never both: one needs a value beyond 6, the other none */
    (void)try_down;
    if (byte + shift > MX_MAX_SCALE_BYTE || byte + shift < EXACT_FROM)
        return better_byte(source, dtype, byte, try_up, try_down, 0);
    __m512 twice = _mm512_set1_ps(2.0f * float_of((uint32_t)(254 - byte) << 23));
    mx_pairs value = load_pairs(source, dtype), q = nearest_pairs(magnitude, byte, 0);
    mx_pairs p = nearest_pairs(magnitude, byte, shift);
    __m512 even = _mm512_mul_ps(_mm512_andnot_ps(sign, value.even), twice);
    __m512 odd = _mm512_mul_ps(_mm512_andnot_ps(sign, value.odd), twice);
    __m512 change = _mm512_add_ps(change_of(even, p.even, q.even), change_of(odd, p.odd, q.odd));
    return _mm512_reduce_add_ps(change) < 0 ? byte + shift : byte;
}
