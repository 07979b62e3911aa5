/* Encoding words with the vector extensions of GCC and Clang: SSE2, NEON and whatever else has
 * vectors of 16 bytes. */
#include "words.h"

#define LANES 8 /* words in a vector */
#define PARTS (MX_BLOCK / LANES)

typedef int16_t words_t __attribute__((vector_size(16)));
typedef uint16_t unsigned_words_t __attribute__((vector_size(16)));
typedef uint32_t pairs_t __attribute__((vector_size(16)));

INLINE words_t larger(words_t a, words_t b) {
    words_t first = (words_t)(a > b);
    return (a & first) | (b & ~first);
}

INLINE unsigned maximum_of(const words_t *v) {
    words_t most = v[0] & WORD_MAGNITUDE;
    for (int i = 1; i < PARTS; i++) most = larger(most, v[i] & WORD_MAGNITUDE);
    int16_t lane[LANES], largest = 0;
    memcpy(lane, &most, sizeof lane);
    for (int i = 0; i < LANES; i++) largest = lane[i] > largest ? lane[i] : largest;
    return (unsigned)largest;
}

/* Codes in words. The step is not looked up but computed: above step 6 the code is step / 2 - 2. */
INLINE words_t code_words(words_t v, int16_t low, const mx_plan *plan) {
    words_t magnitude = v & WORD_MAGNITUDE;
    words_t step = magnitude + ((magnitude >> 6) & (int16_t)plan->tie_bump) - low;
    step = (step & (words_t)(step > 0)) >> 5;
    words_t code = (step >> 1) - 2;
    code = larger(code, -(words_t)(step > 0) - (words_t)(step > 6));
    code -= (code - 7) & (words_t)(code > 7);
    unsigned_words_t shifted = (unsigned_words_t)v - plan->sign_minus;
    words_t negative = (words_t)(shifted > plan->sign_above);
    if (!plan->steps[32]) negative &= (words_t)(code != 0); /* zeros have no sign */
    return code | (negative & 8);
}

INLINE void encode_vectors(const words_t *v, int byte, const mx_plan *plan, uint8_t *codes) {
    int16_t low = (int16_t)(quarter_word(byte) - plan->tie_add);
    for (int i = 0; i < PARTS; i++) {
        pairs_t pair = (pairs_t)code_words(v[i], low, plan);
        pair |= pair >> 12;
        for (int k = 0; k < LANES / 2; k++) codes[i * LANES / 2 + k] = (uint8_t)pair[k];
    }
}

static int64_t encode_words(const uint16_t *words, uint8_t *codes, uint8_t *scales, size_t blocks,
                            const mx_plan *plan) {
    for (size_t i = 0; i < blocks; i++, words += MX_BLOCK, codes += MX_BLOCK_BYTES) {
        words_t v[PARTS];
        memcpy(v, words, sizeof v);
        unsigned amax = maximum_of(v);
        if (UNLIKELY(amax >= WORD_INFINITY)) return (int64_t)i;
        int byte = scale_byte(amax, plan);
        scales[i] = (uint8_t)byte;
        if (UNLIKELY(byte < EXACT_FROM))
            encode_block(words, byte, plan, codes);
        else
            encode_vectors(v, byte, plan, codes);
    }
    return -1;
}

/* Codes of one block under a given scale byte. */
INLINE void encode_given(const uint16_t *words, int byte, const mx_plan *plan, uint8_t *codes) {
    words_t v[PARTS];
    memcpy(v, words, sizeof v);
    if (UNLIKELY(byte < EXACT_FROM))
        encode_block(words, byte, plan, codes);
    else
        encode_vectors(v, byte, plan, codes);
}
