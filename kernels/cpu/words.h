/* Encoding blocks of 16-bit words: the plan of a call, and the exact arithmetic for one block.
 *
 * A word is a value reduced to the 16 bits of BF16, with the last bit set if a set bit was cut off
 * (see reduce in codec.c). No threshold needs more than two mantissa bits, so words compare with
 * all of them as the values do.
 *
 * With `quarter` the word of a quarter of the scale, the midpoints between codes lie at distances
 * 0, 192, 288, 352, 416, 480 and 544 from it: all multiples of 32. The step of a value, the number
 * of multiples of 32 it is beyond, therefore fixes its code.
 */
#ifndef MXFP4_WORDS_H
#define MXFP4_WORDS_H

#include "codec.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

#define WORD_MAGNITUDE 0x7fff
#define WORD_INFINITY 0x7f80
#define EXACT_FROM 3 /* smallest scale byte whose quarter is not subnormal */
#define STEP_LIMIT 24 /* steps are below this: no rule leaves an element beyond 16 scales */

typedef struct {
    uint16_t bias_up, bias_down; /* added to, taken from the largest word of a block */
    uint16_t tie_add;            /* step = (word + tie_add + bump - quarter) / 32 */
    uint16_t tie_bump;           /* 1: bump is bit 6 of the word, set where the upper code is even */
    uint16_t sign_minus, sign_above; /* a code is negative if word - sign_minus > sign_above */
    uint8_t steps[64];               /* code of a step, and of a step of a negative value at + 32 */
    uint16_t flush_ties;             /* 0 if a value on the lowest midpoint becomes zero, else 1 */
    int search;
    int beyond_seven; /* whether a rule other than the search leaves values beyond 7 scales */
} mx_plan;

static void make_plan(mx_plan *plan, const mx_options *options) {
    static const uint8_t first_step[8] = {0, 1, 7, 10, 12, 14, 16, 18};
    int drop = options->zero_sign == MX_ZERO_DROP, set = options->zero_sign == MX_ZERO_SET;
    plan->bias_up = (uint16_t)(options->bias > 0 ? options->bias : 0);
    plan->bias_down = (uint16_t)(options->bias < 0 ? -options->bias : 0);
    plan->tie_add = options->ties == MX_TIES_AWAY ? 32 : 31;
    plan->tie_bump = options->ties == MX_TIES_EVEN;
    plan->flush_ties = options->ties == MX_TIES_AWAY;
    plan->sign_minus = (uint16_t)set;
    plan->sign_above = set ? 0x7ffe : options->zero_sign == MX_ZERO_SOURCE ? 0x7fff : 0x8000;
    plan->search = options->search;
    plan->beyond_seven = options->bias < 0x20;
    for (int step = 0; step < 32; step++) {
        uint8_t code = 0;
        for (uint8_t c = 1; c < 8; c++) code = step >= first_step[c] ? c : code;
        plan->steps[step] = code;
        plan->steps[step + 32] = drop && !code ? 0 : code | 8;
    }
}

/* The scale byte for the largest magnitude word of a block. */
INLINE int scale_byte(unsigned amax, const mx_plan *plan) {
    unsigned biased = amax + plan->bias_up;
    biased = biased > plan->bias_down ? biased - plan->bias_down : 0;
    int byte = (int)(biased >> 7) - 2;
    byte = byte < 0 ? 0 : byte;
    return byte > MX_MAX_SCALE_BYTE ? MX_MAX_SCALE_BYTE : byte;
}

/* The word of a quarter of the scale, also where it is subnormal. */
INLINE unsigned quarter_word(int byte) {
    return byte >= EXACT_FROM ? (unsigned)(byte - 2) << 7 : 0x10u << byte;
}

INLINE unsigned largest_word(const uint16_t *words, int count) {
    uint16_t most = 0;
    for (int i = 0; i < count; i++) {
        uint16_t magnitude = words[i] & WORD_MAGNITUDE;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

INLINE unsigned block_maximum(const uint16_t *words) { return largest_word(words, MX_BLOCK); }

/* The step of one magnitude word for any scale byte. Below EXACT_FROM the words are first put on a
 * linear scale, units of 2^-133, and compared there. */
INLINE unsigned word_step(unsigned magnitude, int byte, const mx_plan *plan) {
    static const uint16_t midpoint[7] = {16, 48, 80, 112, 160, 224, 320};
    static const uint8_t step[8] = {0, 1, 7, 10, 12, 14, 16, 18};
    if (byte >= EXACT_FROM) {
        unsigned bump = plan->tie_bump ? (magnitude >> 6) & 1 : 0;
        unsigned sum = magnitude + plan->tie_add + bump, quarter = quarter_word(byte);
        return sum > quarter ? (sum - quarter) >> 5 : 0;
    }
    unsigned exponent = magnitude >> 7, code = 0;
    uint32_t value = exponent ? (128u | (magnitude & 127)) << (exponent - 1) : magnitude;
    for (unsigned i = 0; i < 7; i++) {
        uint32_t at = (uint32_t)midpoint[i] << byte;
        int up_at_tie = plan->tie_bump ? i & 1 : plan->flush_ties;
        code += up_at_tie ? value >= at : value > at;
    }
    return step[code];
}

/* Codes of one block under a given scale byte. */
static void encode_block(const uint16_t *words, int byte, const mx_plan *plan, uint8_t *codes) {
    for (int i = 0; i < MX_BLOCK_BYTES; i++) {
        unsigned packed = 0;
        for (int half = 0; half < 2; half++) {
            uint16_t word = words[2 * i + half];
            unsigned step = word_step(word & WORD_MAGNITUDE, byte, plan);
            unsigned negative = (uint16_t)(word - plan->sign_minus) > plan->sign_above;
            packed |= (unsigned)plan->steps[step + 32 * negative] << (4 * half);
        }
        codes[i] = (uint8_t)packed;
    }
}

#endif
