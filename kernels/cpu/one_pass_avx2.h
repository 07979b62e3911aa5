/* Encoding BF16 blocks and measuring them in one pass, with AVX2, two blocks at a time; see
 * one_pass.h. */
#include "scan_avx2.h"

#define ONE_PASS_BATCH 32 /* its counts fit bytes, and its sums fit lanes with half as many blocks */
#define FETCH_AHEAD 4096 /* bytes: scans read in bursts, which the hardware does not foresee */

typedef __m256i mx_lanes;

INLINE unsigned set_words(__m128i all_or_none) {
    return (unsigned)_mm_movemask_epi8(_mm_packs_epi16(all_or_none, _mm_setzero_si128()));
}

INLINE uint8_t above(__m128i a, __m128i b) {
    return (uint8_t)~set_words(_mm_cmpeq_epi16(_mm_subs_epu16(a, b), _mm_setzero_si128()));
}

INLINE uint8_t at_least(__m128i a, __m128i b) {
    return (uint8_t)set_words(_mm_cmpeq_epi16(_mm_subs_epu16(b, a), _mm_setzero_si128()));
}

#include "sums.h"

/* What the loop reads from memory: as literals, GCC would make them anew for every block. */
typedef struct {
    __m256i magnitude, hidden, six, join, order;
    __m256i tie, down; /* a value on a midpoint is rounded down if its bits of `tie` are `down` */
    __m256i low_power, high_power; /* the bytes of 2^i */
    __m256i last_step, below_six, codes; /* codes of steps, but for those from `below_six` + 1 on */
    __m256i elements, sign; /* 16 times the elements of codes */
} mx_constants;

INLINE __m256i twice(const void *bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
}

static void make_constants(mx_constants *c, const mx_plan *plan) {
    static const uint8_t low_power[16] = {1, 2, 4, 8, 16, 32, 64, 128};
    static const uint8_t high_power[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 128};
    static const uint8_t codes[16] = {0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6};
    static const uint8_t elements[16] = {0, 8, 16, 24, 32, 48, 64, 96};
    c->magnitude = _mm256_set1_epi16(WORD_MAGNITUDE);
    c->hidden = _mm256_set1_epi16((short)0x8000);
    c->six = _mm256_set1_epi16(6 << MX_UNIT_BITS);
    c->join = _mm256_set1_epi16(0x1001);
    c->order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    c->tie = _mm256_set1_epi16(plan->tie_bump ? 0x40 : 0);
    c->down = _mm256_set1_epi16(plan->tie_add != 31); /* never, for ties away from zero */
    c->low_power = twice(low_power);
    c->high_power = twice(high_power);
    c->last_step = _mm256_set1_epi8(15);
    c->below_six = _mm256_set1_epi8(19);
    c->codes = twice(codes);
    c->elements = twice(elements);
    c->sign = _mm256_set1_epi8(8);
}

#define EACH for (size_t k = 0; k < 2; k++)

INLINE __m256i load_half(const uint16_t *words, size_t half) {
    return _mm256_loadu_si256((const __m256i *)(const void *)(words + MX_BLOCK / 2 * half));
}

/* Zeros were counted as flushed, and values that are no unit, but not zero, measured as zeros. */
static __attribute__((noinline)) void treat_tiny(const uint16_t *words, uint8_t *codes, int byte,
                                                 const mx_plan *plan, mx_statistics *to) {
    const int none = (byte - MX_UNIT_BITS) << 7; /* words below it are no unit */
    int zeros = 0, tiny = 0;
    for (int i = 0; i < MX_BLOCK; i++) {
        zeros += !(words[i] & WORD_MAGNITUDE);
        tiny += (words[i] & WORD_MAGNITUDE) < none;
    }
    to->flushed -= zeros;
    to->error[byte] += tiny - zeros;
    encode_given(words, byte, plan, codes);
}

/* Counts of a batch, and the bits that are set in any sum that it added to. */
typedef struct {
    __m256i clipped, flushed, any;
} mx_masks;

/* Add the squares of a block. */
INLINE void add_squares_to(mx_lanes *sum, __m256i first, __m256i second, mx_masks *masks) {
    __m256i squares = _mm256_add_epi32(_mm256_madd_epi16(first, first),
                                       _mm256_madd_epi16(second, second));
    *sum = _mm256_add_epi32(*sum, squares);
    masks->any = _mm256_or_si256(masks->any, *sum);
}

/* Encode and measure two blocks that have slots; whether any of their values is tiny. `less` is the
 * scale byte less the one whose units are scales. */
INLINE int measure_two(const uint16_t *words, uint8_t *codes, const uint8_t *scales,
                       const uint8_t *less, const mx_constants *c, int zeros_have_signs, size_t i,
                       mx_sums *sums, mx_masks *masks) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i v0[2], v1[2], x0[2], x1[2], t0[2], t1[2], power[2], code[2], sign[2], flushed[2];
    EACH v0[k] = load_half(words, 2 * k);
    EACH v1[k] = load_half(words, 2 * k + 1);
    /* The units: 1.mantissa times a power of two, cut off. */
    EACH x0[k] = _mm256_srli_epi16(_mm256_and_si256(v0[k], c->magnitude), 7);
    EACH x1[k] = _mm256_srli_epi16(_mm256_and_si256(v1[k], c->magnitude), 7);
    EACH power[k] = _mm256_packus_epi16(x0[k], x1[k]);
    EACH power[k] = _mm256_subs_epu8(power[k], _mm256_set1_epi8((char)less[k]));
    EACH x0[k] = _mm256_or_si256(_mm256_slli_epi16(v0[k], 8), c->hidden);
    EACH x1[k] = _mm256_or_si256(_mm256_slli_epi16(v1[k], 8), c->hidden);
    EACH t0[k] = _mm256_shuffle_epi8(c->low_power, power[k]);
    EACH t1[k] = _mm256_shuffle_epi8(c->high_power, power[k]);
    EACH x0[k] = _mm256_mulhi_epu16(x0[k], _mm256_unpacklo_epi8(t0[k], t1[k]));
    EACH x1[k] = _mm256_mulhi_epu16(x1[k], _mm256_unpackhi_epi8(t0[k], t1[k]));
    __m256i lowest = _mm256_cmpeq_epi8(_mm256_min_epu8(power[0], power[1]), zero);
    EACH sign[k] = _mm256_packs_epi16(v0[k], v1[k]); /* saturation keeps the sign */
    /* A value on a midpoint that is to be rounded down is put below it. */
    EACH t0[k] = _mm256_cmpeq_epi16(_mm256_and_si256(v0[k], c->tie), c->down);
    EACH t1[k] = _mm256_cmpeq_epi16(_mm256_and_si256(v1[k], c->tie), c->down);
    EACH t0[k] = _mm256_srai_epi16(_mm256_add_epi16(x0[k], t0[k]), MX_UNIT_BITS - 2);
    EACH t1[k] = _mm256_srai_epi16(_mm256_add_epi16(x1[k], t1[k]), MX_UNIT_BITS - 2);
    EACH {
        v0[k] = _mm256_cmpgt_epi16(x0[k], c->six);
        v1[k] = _mm256_cmpgt_epi16(x1[k], c->six);
        v0[k] = _mm256_add_epi16(v0[k], v1[k]);
    }
    masks->clipped = _mm256_sub_epi16(masks->clipped, _mm256_add_epi16(v0[0], v0[1]));
    EACH t0[k] = _mm256_packus_epi16(t0[k], t1[k]);
    EACH flushed[k] = _mm256_cmpeq_epi8(t0[k], zero);
    masks->flushed = _mm256_sub_epi8(masks->flushed, _mm256_add_epi8(flushed[0], flushed[1]));
    EACH code[k] = _mm256_shuffle_epi8(c->codes, _mm256_min_epu8(t0[k], c->last_step));
    EACH code[k] = _mm256_sub_epi8(code[k], _mm256_cmpgt_epi8(t0[k], c->below_six));
    EACH {
        sign[k] = _mm256_and_si256(_mm256_srli_epi16(sign[k], 4), c->sign);
        if (!zeros_have_signs) sign[k] = _mm256_andnot_si256(flushed[k], sign[k]);
    }
    EACH t1[k] = _mm256_shuffle_epi8(c->elements, code[k]);
    EACH code[k] = _mm256_maddubs_epi16(_mm256_or_si256(code[k], sign[k]), c->join);
    EACH t0[k] = _mm256_sub_epi16(x0[k], _mm256_unpacklo_epi8(zero, t1[k]));
    EACH t1[k] = _mm256_sub_epi16(x1[k], _mm256_unpackhi_epi8(zero, t1[k]));
    EACH x0[k] = _mm256_srli_epi16(x0[k], MX_SIGNAL_CUT);
    EACH x1[k] = _mm256_srli_epi16(x1[k], MX_SIGNAL_CUT);
    EACH {
        int slot = scales[k] % SLOTS;
        sums->blocks[slot]++;
        add_squares_to(&sums->slots[slot].error[(i + k) % 4], t0[k], t1[k], masks);
        add_squares_to(&sums->slots[slot].signal[(i + k) % 4], x0[k], x1[k], masks);
    }
    __m256i packed = _mm256_packus_epi16(code[0], code[1]);
    packed = _mm256_permutevar8x32_epi32(packed, c->order);
    _mm256_storeu_si256((__m256i *)(void *)codes, packed);
    return _mm256_movemask_epi8(lowest);
}

INLINE void measure_as(const uint16_t *words, uint8_t *codes, const uint8_t *scales,
                       const mx_flags *flags, size_t blocks, const mx_plan *plan,
                       const mx_constants *c, int signs, mx_sums *sums, mx_statistics *to) {
    mx_masks masks;
    memset(&masks, 0, sizeof masks);
    uint8_t less[ONE_PASS_BATCH];
    for (size_t i = 0; i < blocks; i++) less[i] = (uint8_t)(scales[i] - MX_UNIT_BITS - 1);
    for (size_t i = 0; i < blocks; i += 2) {
        if (UNLIKELY(flags[i / 8].outside)) continue;
        const uint16_t *two = words + MX_BLOCK * i;
        uint8_t *out = codes + MX_BLOCK_BYTES * i;
        EACH _mm_prefetch((const char *)(two + MX_BLOCK * k) + FETCH_AHEAD, _MM_HINT_T0);
        if (UNLIKELY(measure_two(two, out, scales + i, less + i, c, signs, i, sums, &masks)))
            EACH treat_tiny(two + MX_BLOCK * k, out + MX_BLOCK_BYTES * k, scales[i + k], plan, to);
    }
    sums->any = masks.any;
    to->clipped += (int64_t)add_lanes(_mm256_madd_epi16(masks.clipped, _mm256_set1_epi16(1)));
    to->flushed += (int64_t)add_lanes(_mm256_sad_epu8(masks.flushed, _mm256_setzero_si256()));
}

static void measure_batch(const uint16_t *words, uint8_t *codes, const uint8_t *scales,
                          const mx_flags *flags, size_t blocks, const mx_plan *plan,
                          const mx_constants *c, mx_sums *sums, mx_statistics *to) {
    if (plan->steps[32])
        measure_as(words, codes, scales, flags, blocks, plan, c, 1, sums, to);
    else
        measure_as(words, codes, scales, flags, blocks, plan, c, 0, sums, to);
}

INLINE uint64_t sum_lanes(__m256i *sums) {
    const __m256i low = _mm256_set1_epi64x(0xffffffff);
    __m256i total = _mm256_setzero_si256();
    for (int k = 0; k < 4; k++) {
        total = _mm256_add_epi64(total, _mm256_and_si256(sums[k], low));
        total = _mm256_add_epi64(total, _mm256_srli_epi64(sums[k], 32));
        sums[k] = _mm256_setzero_si256();
    }
    uint64_t lane[4];
    memcpy(lane, &total, sizeof lane);
    return lane[0] + lane[1] + lane[2] + lane[3];
}

/* Whether another batch might be too much for a lane that the last one added to. */
INLINE int may_overflow(const mx_sums *sums, int error_too) {
    (void)error_too;
    return _mm256_movemask_ps(_mm256_castsi256_ps(sums->any)) != 0;
}

/* Raise the largest error so far by those of some blocks. */
static void check_errors(const uint16_t *words, const uint8_t *codes, const uint8_t *scales,
                         unsigned blocks, mx_sums *sums) {
    (void)codes;
    for (; blocks; blocks &= blocks - 1) {
        int i = __builtin_ctz(blocks);
        mx_halves value;
        load_halves(words + MX_BLOCK * i, MX_BF16, &value);
        float worst = largest_error(&value, float_of((uint32_t)(254 - scales[i]) << 23));
        uint32_t word = bits_of(worst * float_of((uint32_t)scales[i] << 23)) >> 16;
        sums->worst = word > sums->worst ? word : sums->worst;
    }
}

#include "one_pass.h"
