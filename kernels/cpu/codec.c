/* The codec for one instruction set: compiled once for each, with MX_SUFFIX naming it. */
#include "codec.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VBMI__) && defined(__AVX512VBMI2__) && defined(__AVX512VNNI__)
#define MX_AVX512
#endif

#if defined(MX_AVX512)
#include "encode_avx512.h"
#elif defined(__AVX2__)
#include "encode_avx2.h"
#else
#include "encode_generic.h"
#endif
#include "decode.h"
#include "measure.h"
#include "search.h"
#if defined(MX_AVX512)
#include "one_pass_avx512.h"
#define MX_ONE_PASS
#elif defined(__AVX2__)
#include "one_pass_avx2.h"
#define MX_ONE_PASS
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORTED(name) JOIN(name, MX_SUFFIX)

INLINE int64_t encode_as(int dtype, const char *source, uint8_t *codes, uint8_t *scales,
                         size_t blocks, const mx_options *options, const mx_plan *plan,
                         mx_statistics *statistics) {
    uint16_t reduced[MX_BATCH * MX_BLOCK];
    for (size_t i = 0; i < blocks; i += MX_BATCH) {
        size_t count = blocks - i < MX_BATCH ? blocks - i : MX_BATCH;
        const char *part = source + i * MX_BLOCK * width_of(dtype);
        uint8_t *part_codes = codes + i * MX_BLOCK_BYTES, *part_scales = scales + i;
        const uint16_t *words = (const uint16_t *)(const void *)part;
        if (dtype != MX_BF16) {
            reduce(part, dtype, reduced, count);
            words = reduced;
        }
        int64_t bad = encode_words(words, part_codes, part_scales, count, plan);
        if (UNLIKELY(bad >= 0)) return (int64_t)i + bad;
        if (plan->search)
            search(part, words, dtype, part_codes, part_scales, count, i, options, plan);
        if (statistics)
            measure(part, words, dtype, part_codes, part_scales, count, plan, statistics);
    }
    return -1;
}

int64_t EXPORTED(mx_encode_)(int dtype, const void *source, uint8_t *codes, uint8_t *scales,
                             uint64_t blocks, const mx_options *options,
                             mx_statistics *statistics) {
    mx_plan plan;
    make_plan(&plan, options);
    if (dtype == MX_BF16 && !plan.search && !statistics)
        return encode_words(source, codes, scales, blocks, &plan);
#if defined(MX_ONE_PASS)
    if (dtype == MX_BF16 && !plan.search)
        return encode_measured(source, codes, scales, blocks, &plan, statistics);
#endif
    if (dtype == MX_BF16)
        return encode_as(MX_BF16, source, codes, scales, blocks, options, &plan, statistics);
    if (dtype == MX_F16)
        return encode_as(MX_F16, source, codes, scales, blocks, options, &plan, statistics);
    return encode_as(MX_F32, source, codes, scales, blocks, options, &plan, statistics);
}

void EXPORTED(mx_decode_)(int dtype, const uint8_t *codes, const uint8_t *scales, void *out,
                          uint64_t blocks) {
    if (dtype == MX_BF16)
        decode_bf16(codes, scales, out, blocks);
    else
        decode_f32(codes, scales, out, blocks);
}
