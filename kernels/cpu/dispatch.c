/* The exported functions: the list of compiled instruction sets, and calls into one of them. */
#include "codec.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define DECLARE(suffix)                         \
    extern mx_encode_function mx_encode_##suffix; \
    extern mx_decode_function mx_decode_##suffix;

static int always(void) { return 1; }

#if defined(__x86_64__)
DECLARE(avx512)
DECLARE(avx2)
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("bmi2");
}
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
}
#endif
DECLARE(baseline)

/* Fastest first; the last one runs everywhere. */
static const mx_instruction_set SETS[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, mx_encode_avx512, mx_decode_avx512},
    {"avx2", has_avx2, mx_encode_avx2, mx_decode_avx2},
    {"sse2", always, mx_encode_baseline, mx_decode_baseline},
#elif defined(__aarch64__)
    {"neon", always, mx_encode_baseline, mx_decode_baseline},
#else
    {"baseline", always, mx_encode_baseline, mx_decode_baseline},
#endif
};

EXPORT int32_t mxfp4_set_count(void) { return (int32_t)(sizeof SETS / sizeof *SETS); }

EXPORT const char *mxfp4_set_name(int32_t set) { return SETS[set].name; }

EXPORT int32_t mxfp4_set_supported(int32_t set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    return SETS[set].supported();
}

EXPORT int64_t mxfp4_encode(int32_t set, int32_t dtype, const void *source, uint8_t *codes,
                            uint8_t *scales, uint64_t blocks, const mx_options *options,
                            mx_statistics *statistics) {
    return SETS[set].encode(dtype, source, codes, scales, blocks, options, statistics);
}

EXPORT void mxfp4_decode(int32_t set, int32_t dtype, const uint8_t *codes, const uint8_t *scales,
                         void *out, uint64_t blocks) {
    SETS[set].decode(dtype, codes, scales, out, blocks);
}
