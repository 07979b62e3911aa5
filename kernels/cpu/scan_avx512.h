/* Scale bytes of BF16 blocks that are to be measured, and what is particular about the blocks. */
#include "measure.h"

#include <immintrin.h>

#define SLOTS 16 /* neighbouring scale bytes that have sums at a time */
#define SLOTS_FROM 16 /* from this scale byte on, subnormal values are below every unit */
#define SLOTS_TO MX_MAX_SCALE_BYTE /* which may be less than the rule wants */

/* Sums of the blocks with one scale byte; four, so that blocks need not wait for the last one. */
typedef struct {
    __m512i error[4], signal[4];
} mx_slot;

typedef struct {
    mx_slot slots[SLOTS];
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

/* Two blocks in the halves of `a` and two in those of `b`: their maxima in the quarters 0, 2, 1, 3. */
INLINE __m512i merge_quarters_of(__m512i a, __m512i b) {
    const __m512i others = _mm512_setr_epi64(2, 3, 8, 9, 6, 7, 12, 13);
    return _mm512_max_epu16(_mm512_mask_blend_epi64(0xcc, a, b),
                            _mm512_permutex2var_epi64(a, others, b));
}

/* Largest magnitude word of each of eight blocks. */
INLINE __m128i scan_eight(const uint16_t *words) {
    const __m256i magnitude = _mm256_set1_epi16(WORD_MAGNITUDE);
    __m256i most[8];
    for (int i = 0; i < 8; i++) {
        const __m256i *half = (const __m256i *)(const void *)(words + MX_BLOCK * i);
        most[i] = _mm256_max_epu16(_mm256_and_si256(_mm256_loadu_si256(half), magnitude),
                                   _mm256_and_si256(_mm256_loadu_si256(half + 1), magnitude));
    }
    __m512i pair[4];
    for (int i = 0; i < 4; i++)
        pair[i] = _mm512_inserti64x4(_mm512_castsi256_si512(most[i]), most[i + 4], 1);
    __m512i low = merge_quarters_of(pair[0], pair[1]), high = merge_quarters_of(pair[2], pair[3]);
    __m512i all = _mm512_max_epu16(_mm512_unpacklo_epi64(low, high),
                                   _mm512_unpackhi_epi64(low, high));
    all = _mm512_max_epu16(all, _mm512_rol_epi64(all, 32));
    all = _mm512_max_epu16(all, _mm512_rol_epi32(all, 16));
    /* The blocks are in the quadwords 0, 2, 1, 3, 4, 6, 5, 7. */
    return _mm_shuffle_epi8(_mm512_cvtepi64_epi16(all),
                            _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
}

INLINE mx_flags scale_eight(const uint16_t *words, uint8_t *scales, const mx_plan *plan,
                            mx_sums *sums) {
    __m128i word = scan_eight(words);
    sums->most = _mm_max_epu16(sums->most, word);
    __m128i biased = _mm_adds_epu16(word, _mm_set1_epi16((short)plan->bias_up));
    biased = _mm_subs_epu16(biased, _mm_set1_epi16((short)plan->bias_down));
    __m128i byte = _mm_subs_epu16(_mm_srli_epi16(biased, 7), _mm_set1_epi16(2));
    byte = _mm_min_epu16(byte, _mm_set1_epi16(MX_MAX_SCALE_BYTE));
    _mm_storel_epi64((__m128i *)(void *)scales, _mm_packus_epi16(byte, byte));
    mx_flags flags;
    __m128i slot = _mm_sub_epi16(byte, _mm_set1_epi16((short)sums->first));
    flags.outside = _mm_cmpge_epu16_mask(slot, _mm_set1_epi16(SLOTS));
    if (!plan->beyond_seven) { /* no error is larger than the scale */
        flags.check = _mm_cmpgt_epu16_mask(byte, _mm_set1_epi16((short)(sums->worst >> 7)));
        return flags;
    }
    /* Only the largest value can have a larger error, its distance from 6 scales. */
    __m128i unit = _mm_slli_epi16(byte, 7);
    __m128i over = _mm_subs_epu16(word, _mm_add_epi16(unit, _mm_set1_epi16(0x160)));
    __m128i bound = _mm_add_epi16(unit, _mm_slli_epi16(over, 2));
    flags.check = _mm_cmpgt_epu16_mask(bound, _mm_set1_epi16((short)sums->worst));
    flags.outside |= _mm_cmpge_epu16_mask(word, _mm_add_epi16(unit, _mm_set1_epi16(0x180)));
    return flags;
}
