/* Statistics of encoded blocks with AVX2: units and elements as words, 16 at a time. */

#define MEASURED_FROM 16 /* from this scale byte on, units of a block are exact in float32 */

/* Twice the elements of 16 bytes of codes, as words in the order of the block. */
INLINE void doubled_elements(const uint8_t *codes, __m256i *low, __m256i *high) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, 1, 2, 3, 4, 6, 8, 12);
    const __m128i nibble = _mm_set1_epi8(15);
    __m128i packed = _mm_loadu_si128((const __m128i *)(const void *)codes);
    __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(packed, nibble));
    __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
    *low = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(even, odd));
    *high = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(even, odd));
}

/* Units of 16 neighbours, from their even and odd values. */
INLINE __m256i unit_words(mx_floats even, mx_floats odd, mx_floats factor, __m256i magnitude) {
    mx_ints pairs = ints_of(even * factor) | ints_of(odd * factor) << 16;
    __m256i some = _mm256_min_epu16(magnitude, _mm256_set1_epi16(1));
    return _mm256_max_epu16((__m256i)pairs, some);
}

INLINE int count_pairs(__m256i a, __m256i b) {
    return __builtin_popcount((unsigned)_mm256_movemask_epi8(_mm256_packs_epi16(a, b)));
}

INLINE uint64_t add_lanes(__m256i sums) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(four);
}

/* What is kept over a batch: counts, and for BF16 the largest word and the word of the largest error
 * so far. */
typedef struct {
    int64_t clipped, flushed;
    __m256i most;
    uint32_t worst;
} mx_kept;

/* No error of a block is beyond its scale but that of a value beyond 7 scales. */
INLINE void check_error(const mx_halves *value, int byte, int beyond_seven, mx_kept *kept) {
    if (!UNLIKELY((uint32_t)byte << 7 > kept->worst || beyond_seven)) return;
    float worst = largest_error(value, float_of((uint32_t)(254 - byte) << 23));
    uint32_t word = bits_of(worst * float_of((uint32_t)byte << 23)) >> 16;
    kept->worst = word > kept->worst ? word : kept->worst;
}

/* Whether a block was measured; those that need more than 32 bits are not. */
INLINE int measure_words(const void *source, const uint16_t *words, int dtype,
                         const uint8_t *codes, int byte, mx_kept *kept, mx_statistics *to) {
    const __m256i zero = _mm256_setzero_si256(), sign = _mm256_set1_epi16(WORD_MAGNITUDE);
    mx_halves value;
    load_halves(source, dtype, &value);
    const __m256i *part = (const __m256i *)(const void *)words;
    __m256i a0 = _mm256_and_si256(_mm256_loadu_si256(part), sign);
    __m256i a1 = _mm256_and_si256(_mm256_loadu_si256(part + 1), sign);
    mx_floats factor = (mx_floats){0} + float_of((uint32_t)(254 + MX_UNIT_BITS - byte) << 23);
    __m256i x0 = unit_words(value.even[0], value.odd[0], factor, a0);
    __m256i x1 = unit_words(value.even[1], value.odd[1], factor, a1);
    if (UNLIKELY(_mm256_movemask_epi8(_mm256_packs_epi16(x0, x1)))) return 0; /* 8 scales or more */
    __m256i q0, q1;
    doubled_elements(codes, &q0, &q1);
    const __m256i six = _mm256_set1_epi16((short)((byte << 7) + (2 << 7) + 0x40));
    kept->clipped += count_pairs(_mm256_cmpgt_epi16(a0, six), _mm256_cmpgt_epi16(a1, six));
    __m256i none0 = _mm256_cmpeq_epi16(a0, zero), none1 = _mm256_cmpeq_epi16(a1, zero);
    kept->flushed += count_pairs(_mm256_andnot_si256(none0, _mm256_cmpeq_epi16(q0, zero)),
                                 _mm256_andnot_si256(none1, _mm256_cmpeq_epi16(q1, zero)));
    __m256i e0 = _mm256_sub_epi16(x0, _mm256_slli_epi16(q0, MX_UNIT_BITS - 1));
    __m256i e1 = _mm256_sub_epi16(x1, _mm256_slli_epi16(q1, MX_UNIT_BITS - 1));
    x0 = _mm256_srli_epi16(x0, MX_SIGNAL_CUT);
    x1 = _mm256_srli_epi16(x1, MX_SIGNAL_CUT);
    __m256i error = _mm256_add_epi32(_mm256_madd_epi16(e0, e0), _mm256_madd_epi16(e1, e1));
    __m256i signal = _mm256_add_epi32(_mm256_madd_epi16(x0, x0), _mm256_madd_epi16(x1, x1));
    add_sums(byte, 1, add_lanes(signal) << (2 * MX_SIGNAL_CUT), add_lanes(error), to);
    if (dtype == MX_BF16) {
        __m256i seven = _mm256_set1_epi16((short)((byte << 7) + 0x160));
        __m256i most = _mm256_max_epu16(a0, a1);
        kept->most = _mm256_max_epu16(kept->most, most);
        int beyond = _mm256_movemask_epi8(_mm256_cmpgt_epi16(most, seven));
        check_error(&value, byte, beyond, kept);
    } else {
        mx_floats most = {0};
        for (int i = 0; i < MX_PARTS; i++)
            most = larger_floats(most, larger_floats(value.even[i], value.odd[i]));
        float worst = largest_error(&value, float_of((uint32_t)(254 - byte) << 23));
        add_extremes((double)largest_of(most),
                     (double)(worst * float_of((uint32_t)byte << 23)), to);
    }
    return 1;
}

INLINE void measure(const void *source, const uint16_t *words, int dtype, const uint8_t *codes,
                    const uint8_t *scales, size_t blocks, const mx_plan *plan, mx_statistics *to) {
    mx_kept kept = {0, 0, _mm256_setzero_si256(), 0};
    /* Cut off, it is below the largest error so far, which is fine for a bound. */
    kept.worst = bits_of((float)to->max_abs_error) >> 16;
    for (size_t i = 0; i < blocks; i++) {
        const void *block = (const char *)source + i * MX_BLOCK * width_of(dtype);
        const uint16_t *at = words + MX_BLOCK * i;
        if (UNLIKELY(scales[i] < MEASURED_FROM) ||
            !measure_words(block, at, dtype, codes + MX_BLOCK_BYTES * i, scales[i], &kept, to))
            measure_block(block, at, dtype, scales[i], plan, to);
    }
    to->clipped += kept.clipped;
    to->flushed += kept.flushed;
    if (dtype != MX_BF16) return;
    uint16_t word[MX_BLOCK / 2];
    memcpy(word, &kept.most, sizeof word);
    uint32_t most = largest_word(word, MX_BLOCK / 2);
    add_extremes((double)float_of(most << 16), (double)float_of(kept.worst << 16), to);
}
