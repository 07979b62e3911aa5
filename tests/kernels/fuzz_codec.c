/* Random blocks through two builds of the codec, which must give the same bytes and statistics.
 *
 * Compiled with sanitizers, so that reading or writing outside, and overflow, end it too. Exponents
 * are near each other in most cases and anywhere in some; zeros, subnormals, ties and all options
 * occur. Returns 1 after printing the first case that differs.
 */
#include "codec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern mx_encode_function mx_encode_one, mx_encode_other;
extern mx_decode_function mx_decode_one, mx_decode_other;

static uint64_t state = 88172645463325252ull;

static uint32_t below(uint32_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16) % limit;
}

/* One value: a sign, an exponent and a mantissa, which has few bits set in every third. */
static void draw(char *to, int dtype, int exponent) {
    uint32_t sign = below(2), mantissa = below(1 << 23), zero = below(30) == 0;
    if (below(3) == 0) mantissa &= 0x700000;
    if (zero) exponent = 0, mantissa = below(2) ? 0 : mantissa;
    uint32_t bits = sign << 31 | (uint32_t)exponent << 23 | mantissa;
    uint16_t half = (uint16_t)(bits >> 16);
    if (dtype == MX_F16) half = (uint16_t)(sign << 15 | (uint32_t)exponent << 10 | mantissa >> 13);
    if (dtype == MX_F32)
        memcpy(to, &bits, sizeof bits);
    else
        memcpy(to, &half, sizeof half);
}

static void draw_blocks(char *to, int dtype, size_t blocks) {
    const int most = dtype == MX_F16 ? 30 : 254;
    const size_t width = dtype == MX_F32 ? 4 : 2;
    int around = (int)below((uint32_t)most + 1), spread = 1 + (int)below(below(4) ? 12 : 250);
    for (size_t i = 0; i < blocks * MX_BLOCK; i++) {
        int exponent = around - (int)below((uint32_t)spread);
        draw(to + i * width, dtype, exponent < 0 ? 0 : exponent);
    }
}

static mx_options draw_options(float *importance) {
    static const int biases[] = {0x20, 0, 0x7f, -0x80, 0x40, -0x20, 0x3f};
    mx_options options = {0x20, (int)below(3), (int)below(4), (int)below(2), 0, 1};
    if (!options.search) options.bias = biases[below(7)];
    if (options.search && below(2)) {
        options.importance = importance;
        options.period = 3;
        for (int i = 0; i < 3 * MX_BLOCK; i++) importance[i] = (float)below(1000) / 100;
    }
    return options;
}

static int differ(int dtype, size_t blocks) {
    size_t bytes = blocks * MX_BLOCK * 4; /* to the byte, so that the sanitizer sees the end */
    char *source = malloc(dtype == MX_F32 ? bytes : bytes / 2), *out = malloc(2 * bytes);
    uint8_t *codes = calloc(2 * blocks, MX_BLOCK_BYTES), *scales = calloc(2 * blocks, 1);
    uint8_t *other_codes = codes + blocks * MX_BLOCK_BYTES, *other_scales = scales + blocks;
    mx_statistics found[2];
    float importance[3 * MX_BLOCK];
    memset(found, 0, sizeof found);
    draw_blocks(source, dtype, blocks);
    mx_options options = draw_options(importance);
    int measured = (int)below(2);
    int64_t one = mx_encode_one(dtype, source, codes, scales, blocks, &options,
                                measured ? &found[0] : 0);
    int64_t other = mx_encode_other(dtype, source, other_codes, other_scales, blocks, &options,
                                    measured ? &found[1] : 0);
    int wrong = one != other || memcmp(codes, other_codes, blocks * MX_BLOCK_BYTES) ||
                memcmp(scales, other_scales, blocks) || memcmp(&found[0], &found[1], sizeof *found);
    for (size_t i = 0; i < blocks; i++) scales[i] = (uint8_t)below(256);
    for (int to = 0; to < 2; to++) {
        size_t size = to ? bytes : bytes / 2;
        mx_decode_one(to ? MX_F32 : MX_BF16, codes, scales, out, blocks);
        mx_decode_other(to ? MX_F32 : MX_BF16, codes, scales, out + size, blocks);
        wrong |= memcmp(out, out + size, size) != 0;
    }
    free(source), free(out), free(codes), free(scales);
    return wrong;
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 1000;
    for (int i = 0; i < rounds; i++) {
        int dtype = (int)below(3);
        size_t blocks = below(150);
        if (differ(dtype, blocks)) {
            printf("round %d, dtype %d, %zu blocks\n", i, dtype, blocks);
            return 1;
        }
    }
    return 0;
}
