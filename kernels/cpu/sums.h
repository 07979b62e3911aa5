/* Sums of squares kept apart by scale byte, in lanes of 32 bits (mx_lanes, of the instruction set),
 * and scale bytes of BF16 blocks that are to be measured. */
#include "measure.h"

#include <immintrin.h>

#define SLOTS 16 /* neighbouring scale bytes that have sums at a time */
#define SLOTS_FROM 16 /* from this scale byte on, subnormal values are below every unit */
#define SLOTS_TO MX_MAX_SCALE_BYTE /* which may be less than the rule wants */

/* Sums of the blocks with one scale byte; four, so that blocks need not wait for the last one. */
typedef struct {
    mx_lanes error[4], signal[4];
} mx_slot;

typedef struct {
    mx_slot slots[SLOTS];
    mx_lanes any; /* for may_overflow */
    uint32_t blocks[SLOTS];
    int first;        /* the smallest scale byte with a slot; that of a byte is byte % SLOTS */
    __m128i most;     /* largest magnitude words so far */
    uint32_t worst;   /* word of the largest error so far */
} mx_sums;

typedef struct {
    int64_t clipped, flushed;
} mx_counts;

typedef struct {
    uint8_t outside; /* blocks without a slot, or with values of 8 scales or more */
    uint8_t check;   /* blocks that may hold a larger error than all before */
} mx_flags;

/* Scale bytes from the largest magnitude words of eight blocks. */
INLINE mx_flags scale_eight(__m128i word, uint8_t *scales, const mx_plan *plan, mx_sums *sums) {
    sums->most = _mm_max_epu16(sums->most, word);
    __m128i biased = _mm_adds_epu16(word, _mm_set1_epi16((short)plan->bias_up));
    biased = _mm_subs_epu16(biased, _mm_set1_epi16((short)plan->bias_down));
    __m128i byte = _mm_subs_epu16(_mm_srli_epi16(biased, 7), _mm_set1_epi16(2));
    byte = _mm_min_epu16(byte, _mm_set1_epi16(MX_MAX_SCALE_BYTE));
    _mm_storel_epi64((__m128i *)(void *)scales, _mm_packus_epi16(byte, byte));
    mx_flags flags;
    __m128i slot = _mm_sub_epi16(byte, _mm_set1_epi16((short)sums->first));
    flags.outside = at_least(slot, _mm_set1_epi16(SLOTS));
    if (!plan->beyond_seven) { /* no error is larger than the scale */
        flags.check = above(byte, _mm_set1_epi16((short)(sums->worst >> 7)));
        return flags;
    }
    /* Only the largest value can have a larger error, its distance from 6 scales. */
    __m128i unit = _mm_slli_epi16(byte, 7);
    __m128i over = _mm_subs_epu16(word, _mm_add_epi16(unit, _mm_set1_epi16(0x160)));
    __m128i bound = _mm_add_epi16(unit, _mm_slli_epi16(over, 2));
    flags.check = above(bound, _mm_set1_epi16((short)sums->worst));
    flags.outside |= at_least(word, _mm_add_epi16(unit, _mm_set1_epi16(0x180)));
    return flags;
}
