/* The exported functions: the list of compiled instruction sets, and calls into one of them. */
#include "codec.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

/* Asked of the processor itself: not every compiler brings what __builtin_cpu_supports needs. */
static int has(unsigned first_ecx, unsigned seventh_ebx, unsigned seventh_ecx, unsigned saved) {
    const unsigned osxsave = 1u << 27;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & osxsave) == 0) return 0;
    if ((c & first_ecx) != first_ecx) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & saved) != saved) return 0; /* the system does not keep these registers */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b & seventh_ebx) == seventh_ebx && (c & seventh_ecx) == seventh_ecx;
}

#define FMA_POPCNT_AVX_F16C (1u << 12 | 1u << 23 | 1u << 28 | 1u << 29)
#define AVX2_BMI2 (1u << 5 | 1u << 8)
#define AVX512_F_DQ_BW_VL (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31)
#define AVX512_VBMI_VBMI2_VNNI (1u << 1 | 1u << 6 | 1u << 11)

static int has_avx2(void) { return has(FMA_POPCNT_AVX_F16C, AVX2_BMI2, 0, 0x6); }

static int has_avx512(void) {
    return has(FMA_POPCNT_AVX_F16C, AVX2_BMI2 | AVX512_F_DQ_BW_VL, AVX512_VBMI_VBMI2_VNNI, 0xe6);
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
