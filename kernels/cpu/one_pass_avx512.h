/* Encoding BF16 blocks and measuring them in one pass, with AVX-512 (VBMI2 and VNNI too), four blocks
 * at a time; see one_pass.h. */
#include "pairs_avx512.h"
#include "scan_avx512.h"

#define ONE_PASS_BATCH 64

typedef __m512i mx_lanes;

INLINE uint8_t above(__m128i a, __m128i b) { return _mm_cmpgt_epu16_mask(a, b); }
INLINE uint8_t at_least(__m128i a, __m128i b) { return _mm_cmpge_epu16_mask(a, b); }

#include "sums.h"

#define EACH for (int j = 0; j < 4; j++)

/* What the loop keeps in registers. Its steps are as wide as those of words.h, quarters of the scale
 * from the lowest midpoint on, but all of the same width. */
typedef struct {
    __m512i exponents, one, less, tie, six, elements, codes, positive, join, order;
} mx_constants;

static void make_constants(mx_constants *c, const mx_plan *plan) {
    static const uint8_t first_step[8] = {0, 1, 3, 5, 7, 10, 14, 20};
    static const uint8_t halves[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    uint16_t elements[32];
    uint8_t codes[64], order[64], exponents[64];
    for (int step = 0; step < 32; step++) {
        uint8_t code = 0;
        for (uint8_t k = 1; k < 8; k++) code = step >= first_step[k] ? k : code;
        elements[step] = (uint16_t)(halves[code] << (MX_UNIT_BITS - 1));
        codes[step + 32] = code;
        codes[step] = code ? code | 8 : plan->steps[32]; /* of negative values */
    }
    for (int i = 0; i < 64; i++) {
        int block = i / 16, byte = i % 16;
        order[i] = (uint8_t)(2 * (byte / 4 * 8 + block % 2 * 4 + byte % 4) + block / 2 * 64);
        exponents[i] = (uint8_t)(i % 8 / 2 * 16 + 7);
    }
    c->exponents = _mm512_loadu_si512(exponents);
    c->one = _mm512_set1_epi16(1);
    c->less = _mm512_set1_epi16(plan->tie_add == 31); /* but not for ties away from zero */
    c->tie = _mm512_set1_epi16(plan->tie_bump ? 0x40 : 0);
    c->six = _mm512_set1_epi16((short)(6 << MX_UNIT_BITS));
    c->elements = _mm512_loadu_si512(elements);
    c->codes = _mm512_loadu_si512(codes);
    c->positive = _mm512_set1_epi8(32);
    c->join = _mm512_set1_epi16(0x1001);
    c->order = _mm512_loadu_si512(order);
}

/* Zeros were measured as if they were tiny, which is to be taken back, and the saturated words of zeros
 * and subnormals do not tell the sign of the code. */
static __attribute__((noinline)) void treat_zeros(const uint16_t *words, uint8_t *codes,
                                                  const uint8_t *scales, const mx_plan *plan,
                                                  mx_statistics *to) {
    EACH {
        __m512i v = _mm512_loadu_si512(words + MX_BLOCK * j);
        if (!_mm512_testn_epi16_mask(v, _mm512_set1_epi16(WORD_INFINITY))) continue;
        int zeros = __builtin_popcount(
            _mm512_testn_epi16_mask(v, _mm512_set1_epi16(WORD_MAGNITUDE)));
        to->flushed -= zeros;
        to->error[scales[j]] -= zeros;
        encode_given(words + MX_BLOCK * j, scales[j], plan, codes + MX_BLOCK_BYTES * j);
    }
}

/* Encode and measure four blocks that have slots. */
INLINE void measure_four(const uint16_t *words, uint8_t *codes, const uint8_t *scales,
                         const mx_plan *plan, const mx_constants *c, mx_sums *sums,
                         mx_counts *counts, mx_statistics *to) {
    __m512i v[4], x[4], t[4], sign[2], step[2];
    __mmask32 down[4];
    EACH v[j] = _mm512_loadu_si512(words + MX_BLOCK * j);
    /* The units: 1.mantissa shifted by its exponent and cut off, but 1 where that is nothing. */
    EACH x[j] = _mm512_maskz_multishift_epi64_epi8(0x5555555555555555, c->exponents, v[j]);
    EACH t[j] = _mm512_slli_epi16(v[j], 9);
    EACH x[j] = _mm512_subs_epu16(x[j], _mm512_set1_epi16((short)(scales[j] - MX_UNIT_BITS)));
    EACH down[j] = _mm512_testn_epi16_mask(v[j], c->tie);
    EACH x[j] = _mm512_shldv_epi16(c->one, t[j], x[j]);
    __m512i least = _mm512_min_epu16(_mm512_min_epu16(x[0], x[1]), _mm512_min_epu16(x[2], x[3]));
    EACH counts->clipped += (unsigned)__builtin_popcount(_mm512_cmpgt_epu16_mask(x[j], c->six));
    /* A value on a midpoint that is to be rounded down is put below it. */
    EACH t[j] = _mm512_mask_sub_epi16(x[j], down[j], x[j], c->less);
    EACH t[j] = _mm512_srli_epi16(t[j], MX_UNIT_BITS - 2);
    step[0] = _mm512_packus_epi16(t[0], t[1]);
    step[1] = _mm512_packus_epi16(t[2], t[3]);
    EACH t[j] = _mm512_sub_epi16(x[j], _mm512_permutexvar_epi16(t[j], c->elements));
    EACH x[j] = _mm512_srli_epi16(x[j], MX_SIGNAL_CUT);
    EACH {
        mx_slot *slot = &sums->slots[scales[j] % SLOTS];
        sums->blocks[scales[j] % SLOTS]++;
        slot->error[j] = _mm512_dpwssd_epi32(slot->error[j], t[j], t[j]);
        slot->signal[j] = _mm512_dpwssd_epi32(slot->signal[j], x[j], x[j]);
    }
    /* Signed saturation to a byte leaves 0x80 or 0x7f of all words but those of tiny values. */
    sign[0] = _mm512_packs_epi16(v[0], v[1]);
    sign[1] = _mm512_packs_epi16(v[2], v[3]);
    for (int k = 0; k < 2; k++) {
        __mmask64 zeros = _mm512_testn_epi8_mask(step[k], step[k]);
        counts->flushed += (unsigned)__builtin_popcountll(zeros);
        step[k] = _mm512_ternarylogic_epi64(step[k], sign[k], c->positive, 0xf8); /* a | b & c */
        step[k] = _mm512_permutexvar_epi8(step[k], c->codes);
        step[k] = _mm512_maddubs_epi16(step[k], c->join);
    }
    _mm512_storeu_si512(codes, _mm512_permutex2var_epi8(step[0], c->order, step[1]));
    if (UNLIKELY(_mm512_cmpeq_epi16_mask(least, c->one)))
        treat_zeros(words, codes, scales, plan, to);
}

static void measure_batch(const uint16_t *words, uint8_t *codes, const uint8_t *scales,
                          const mx_flags *flags, size_t blocks, const mx_plan *plan,
                          const mx_constants *constants, mx_sums *sums, mx_statistics *to) {
    const mx_constants c = *constants; /* a copy, which stores cannot change */
    mx_counts counts = {0};
    for (size_t i = 0; i < blocks; i += 4)
        if (!UNLIKELY(flags[i / 8].outside))
            measure_four(words + MX_BLOCK * i, codes + MX_BLOCK_BYTES * i, scales + i, plan, &c,
                         sums, &counts, to);
    to->clipped += counts.clipped;
    to->flushed += counts.flushed;
}

INLINE uint64_t sum_lanes(__m512i *sums) {
    const __m512i low = _mm512_set1_epi64(0xffffffff);
    __m512i total = _mm512_setzero_si512();
    for (int k = 0; k < 4; k++) {
        __m512i part = sums[k];
        total = _mm512_add_epi64(total, _mm512_and_si512(part, low));
        total = _mm512_add_epi64(total, _mm512_srli_epi64(part, 32));
        sums[k] = _mm512_setzero_si512();
    }
    return (uint64_t)_mm512_reduce_add_epi64(total);
}

/* Whether another batch, which adds less than 2^31 to a lane, might be too much for the signal, or
 * for the error too. */
INLINE int may_overflow(const mx_sums *sums, int error_too) {
    __m512i any = _mm512_setzero_si512();
    for (int slot = 0; slot < SLOTS; slot++) {
        if (!sums->blocks[slot]) continue;
        for (int k = 0; k < 4; k++) {
            any = _mm512_or_si512(any, sums->slots[slot].signal[k]);
            if (error_too) any = _mm512_or_si512(any, sums->slots[slot].error[k]);
        }
    }
    return _mm512_movepi32_mask(any) != 0;
}

/* Raise the largest error so far by those of some blocks. */
static void check_errors(const uint16_t *words, const uint8_t *codes, const uint8_t *scales,
                         unsigned blocks, mx_sums *sums) {
    const __m512 elements = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2,
                                           -3, -4, -6);
    for (; blocks; blocks &= blocks - 1) {
        int i = __builtin_ctz(blocks);
        __m512 inverse = _mm512_set1_ps(float_of((uint32_t)(254 - scales[i]) << 23));
        mx_pairs value = pairs_of_words(_mm512_loadu_si512(words + MX_BLOCK * i));
        __m512i index = _mm512_cvtepu8_epi32(
            _mm_loadu_si128((const __m128i *)(const void *)(codes + MX_BLOCK_BYTES * i)));
        __m512 even = _mm512_sub_ps(_mm512_mul_ps(value.even, inverse),
                                    _mm512_permutexvar_ps(index, elements));
        __m512 odd = _mm512_sub_ps(_mm512_mul_ps(value.odd, inverse),
                                   _mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), elements));
        __m512 error = _mm512_max_ps(_mm512_abs_ps(even), _mm512_abs_ps(odd));
        float scale = float_of((uint32_t)scales[i] << 23);
        error = _mm512_mul_ps(error, _mm512_set1_ps(scale));
        __m512 worst = _mm512_set1_ps(float_of(sums->worst << 16));
        if (_mm512_cmp_ps_mask(error, worst, _CMP_GT_OQ))
            sums->worst = bits_of(_mm512_reduce_max_ps(error)) >> 16;
    }
}

#include "one_pass.h"
