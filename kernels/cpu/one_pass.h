/* Encoding BF16 blocks and measuring them in one pass, for all instruction sets that have the parts.
 *
 * A batch is scanned for its scale bytes first and encoded second, a few blocks at a time. Squares go
 * straight to sums of 32 bits in every lane, kept apart by scale byte, so that nothing is summed
 * across a vector before a sum might overflow. What this does not cover is left to measure_block:
 * scale bytes far from those of the blocks before, subnormal scales, values of 8 scales and more.
 */

/* Add all slots to the statistics, and let them begin at another scale byte. */
static void move_slots(mx_sums *sums, int first, mx_statistics *to) {
    for (int byte = sums->first; byte < sums->first + SLOTS; byte++) {
        int slot = byte % SLOTS;
        if (!sums->blocks[slot]) continue;
        add_sums(byte, sums->blocks[slot],
                 sum_lanes(sums->slots[slot].signal) << (2 * MX_SIGNAL_CUT),
                 sum_lanes(sums->slots[slot].error), to);
        sums->blocks[slot] = 0;
    }
    sums->first = first;
}

INLINE void encode_alone(const uint16_t *words, uint8_t *codes, int byte, const mx_plan *plan,
                         mx_statistics *to) {
    encode_given(words, byte, plan, codes);
    measure_block(words, words, MX_BF16, byte, plan, to);
}

/* Scan up to a batch of whole eights; fewer if the slots have to move for the next eight. Returns
 * the number of blocks, or the complement of the first block with a NaN or an infinity. */
INLINE int64_t scan_batch(const uint16_t *words, uint8_t *scales, size_t blocks,
                          const mx_plan *plan, mx_flags *flags, unsigned *any, mx_sums *sums,
                          mx_statistics *to) {
    for (size_t i = 0; i < blocks; i += 8) {
        const uint16_t *eight = words + MX_BLOCK * i;
        flags[i / 8] = scale_eight(scan_eight(eight), scales + i, plan, sums);
        *any |= (unsigned)(flags[i / 8].outside | flags[i / 8].check);
        if (!UNLIKELY(flags[i / 8].outside)) continue;
        int low = 255, high = 0;
        for (int k = 0; k < 8; k++) {
            if (block_maximum(eight + MX_BLOCK * k) >= WORD_INFINITY) return ~(int64_t)(i + (size_t)k);
            low = scales[i + (size_t)k] < low ? scales[i + (size_t)k] : low;
            high = scales[i + (size_t)k] > high ? scales[i + (size_t)k] : high;
        }
        if (low < SLOTS_FROM || high >= SLOTS_TO || high - low >= SLOTS / 2) continue;
        if (low >= sums->first && high < sums->first + SLOTS) continue;
        if (i) return (int64_t)i;
        low -= SLOTS / 4;
        low = low < SLOTS_FROM ? SLOTS_FROM : low > SLOTS_TO - SLOTS ? SLOTS_TO - SLOTS : low;
        move_slots(sums, low, to);
        flags[0] = scale_eight(scan_eight(eight), scales, plan, sums);
    }
    return (int64_t)blocks;
}

/* As mx_encode_function, for BF16 and all rules but the search. */
static int64_t encode_measured(const uint16_t *words, uint8_t *codes, uint8_t *scales,
                               size_t blocks, const mx_plan *plan, mx_statistics *to) {
    mx_sums sums;
    memset(&sums, 0, sizeof sums);
    sums.first = SLOTS_FROM;
    mx_constants constants;
    make_constants(&constants, plan);
    size_t i = 0;
    unsigned batches = 0;
    while (i + 8 <= blocks) {
        mx_flags flags[ONE_PASS_BATCH / 8];
        const uint16_t *part = words + MX_BLOCK * i;
        uint8_t *part_codes = codes + MX_BLOCK_BYTES * i, *part_scales = scales + i;
        size_t most = blocks - i < ONE_PASS_BATCH ? (blocks - i) / 8 * 8 : ONE_PASS_BATCH;
        unsigned any = 0; /* block is particular */
        int64_t count = scan_batch(part, part_scales, most, plan, flags, &any, &sums, to);
        if (UNLIKELY(count < 0)) return (int64_t)i + ~count;
        measure_batch(part, part_codes, part_scales, flags, (size_t)count, plan, &constants, &sums,
                      to);
        for (int64_t k = 0; UNLIKELY(any) && k < count; k += 8) {
            if (flags[k / 8].outside)
                for (int64_t b = k; b < k + 8; b++)
                    encode_alone(part + MX_BLOCK * b, part_codes + MX_BLOCK_BYTES * b,
                                 part_scales[b], plan, to);
            else if (flags[k / 8].check)
                check_errors(part + MX_BLOCK * k, part_codes + MX_BLOCK_BYTES * k, part_scales + k,
                             flags[k / 8].check, &sums);
        }
        /* Up to 7 scales, no error is beyond one scale: less than 2^29 in a batch. */
        int error_too = plan->beyond_seven || ++batches % 4 == 0;
        if (UNLIKELY(may_overflow(&sums, error_too))) move_slots(&sums, sums.first, to);
        i += (size_t)count;
    }
    for (; i < blocks; i++) {
        unsigned amax = block_maximum(words + MX_BLOCK * i);
        if (amax >= WORD_INFINITY) return (int64_t)i;
        scales[i] = (uint8_t)scale_byte(amax, plan);
        encode_alone(words + MX_BLOCK * i, codes + MX_BLOCK_BYTES * i, scales[i], plan, to);
    }
    move_slots(&sums, sums.first, to);
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(sums.most, _mm_set1_epi16(-1)));
    uint32_t most = 0xffff ^ ((uint32_t)_mm_cvtsi128_si32(least) & 0xffff);
    add_extremes((double)float_of(most << 16), (double)float_of(sums.worst << 16), to);
    return -1;
}
