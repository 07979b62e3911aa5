/* The block codec on a CPU: what the library exports, and what its objects share.
 *
 * A block is 32 values; it becomes 16 bytes of codes (the even element in the low nibble) and one
 * scale byte. codec.c is compiled once per instruction set, dispatch.c picks one at run time.
 */
#ifndef MXFP4_CODEC_H
#define MXFP4_CODEC_H

#include <stddef.h>
#include <stdint.h>

#define MX_BLOCK 32
#define MX_BLOCK_BYTES (MX_BLOCK / 2)
#define MX_MAX_SCALE_BYTE 252
#define MX_BATCH 64 /* blocks between two passes over the same data, for a level-1 cache */

enum mx_dtype { MX_BF16, MX_F16, MX_F32 };
enum mx_ties { MX_TIES_EVEN, MX_TIES_ZERO, MX_TIES_AWAY };
enum mx_zero_sign { MX_ZERO_UNDERFLOW, MX_ZERO_SOURCE, MX_ZERO_DROP, MX_ZERO_SET };

typedef struct {
    int32_t bias;      /* of the scale rule, on the upper 16 bits of a float32 */
    int32_t ties;      /* enum mx_ties */
    int32_t zero_sign; /* enum mx_zero_sign */
    int32_t search;    /* not 0: least squared error among the byte of the rule and its neighbours */
    const float *importance; /* [period][32] weights of the squared errors, or null */
    uint64_t period;
} mx_options;

typedef struct {
    int64_t zero_blocks, clipped, flushed;
    double max_abs, max_abs_error;
    int64_t histogram[256], signal[256], error[256];
} mx_statistics;

/* Encode `blocks` blocks; add to `statistics` unless it is null. Returns -1, or the index of the
 * first block with a NaN or an infinity, after which nothing more is written. */
typedef int64_t mx_encode_function(int dtype, const void *source, uint8_t *codes, uint8_t *scales,
                                   uint64_t blocks, const mx_options *options,
                                   mx_statistics *statistics);

/* Decode to `dtype` (MX_BF16 or MX_F32). Byte 255 gives NaN. */
typedef void mx_decode_function(int dtype, const uint8_t *codes, const uint8_t *scales, void *out,
                                uint64_t blocks);

typedef struct {
    const char *name;
    int (*supported)(void);
    mx_encode_function *encode;
    mx_decode_function *decode;
} mx_instruction_set;

#endif
