"""Device code of the codec in checkpoint order: blocks of 32 to codes and scale bytes, and back.

Rounding to E2M1 is one integer rounding: scaled by 2^-126, the magnitudes 0, 0.5, 1, ... 6 become
the float32 numbers whose bits are the code shifted left by 22, subnormals included. The scaling
itself must be exact for that, which holds for bfloat16 and float16 sources wherever it matters;
float32 sources are compared with the midpoints instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4.kernels.triton.decode import narrow, power_of_two, widen
from mxfp4.spec import E2M1_MAX, E2M1_MIDPOINTS, E8M0_NAN, MAX_SCALE_BYTE

# In the order of `codec.TIES` and `codec.ZERO_SIGNS`.
TIES_EVEN = tl.constexpr(0)
TIES_ZERO = tl.constexpr(1)
TIES_AWAY = tl.constexpr(2)
SIGN_UNDERFLOW = tl.constexpr(0)
SIGN_SOURCE = tl.constexpr(1)
SIGN_DROP = tl.constexpr(2)
SIGN_SET = tl.constexpr(3)

_MIDPOINTS = tl.constexpr(E2M1_MIDPOINTS)
_MAX = tl.constexpr(E2M1_MAX)
_MAX_BYTE = tl.constexpr(MAX_SCALE_BYTE)
_NAN_BYTE = tl.constexpr(E8M0_NAN)
_CODE_SHIFT = tl.constexpr(22)
_TO_CODES = tl.constexpr(2.0**-126)
_FROM_CODES = tl.constexpr(2.0**126)


@triton.jit
def _nearest(a, TIES: tl.constexpr, BY_BITS: tl.constexpr):
    """Codes 0 to 7 (int32) of magnitudes (float32, not negative)."""
    if BY_BITS:
        u = (tl.minimum(a, _MAX) * _TO_CODES).to(tl.int32, bitcast=True)
        if TIES == TIES_EVEN:
            u += 0x1FFFFF + ((u >> _CODE_SHIFT) & 1)
        elif TIES == TIES_ZERO:
            u += 0x1FFFFF
        else:
            u += 0x200000
        code = u >> _CODE_SHIFT
    else:
        code = tl.zeros_like(a).to(tl.int32)
        for i in tl.static_range(7):
            # On midpoint i the candidates are codes i and i + 1.
            if TIES == TIES_AWAY or (TIES == TIES_EVEN and i % 2 == 1):
                code += (a >= _MIDPOINTS[i]).to(tl.int32)
            else:
                code += (a > _MIDPOINTS[i]).to(tl.int32)
    return code


@triton.jit
def _magnitudes(code):
    """float32 of codes 0 to 7."""
    return (code << _CODE_SHIFT).to(tl.float32, bitcast=True) * _FROM_CODES


@triton.jit
def _squared_errors(a, up: tl.constexpr, down: tl.constexpr, BY_BITS: tl.constexpr):
    """float64 [blocks]: exact squared error of the block with its scale times `up` = 1 / `down`."""
    value = _magnitudes(_nearest(a * down, TIES_EVEN, BY_BITS)) * up
    error = a.to(tl.float64) - value.to(tl.float64)
    return tl.sum(error * error, axis=1)


@triton.jit
def _inverse(byte):
    """float32 2^(127 - byte) of bytes 0 to 253."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    blocks,
    BIAS: tl.constexpr,
    SEARCH: tl.constexpr,
    TIES: tl.constexpr,
    SIGN: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """x [blocks, 32] to codes int32 [blocks, 4], eight a word, and scales uint8 [blocks].

    `BIAS` is the scale rule, see `mxfp4.spec.SCALE_BIAS`. A block with NaN or infinity gets scale
    byte 255.
    """
    BY_BITS: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = b < blocks
    offsets = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = widen(tl.load(x_ptr + offsets, mask=exists[:, None], other=0.0))
    u = x.to(tl.int32, bitcast=True)
    magnitude = u & 0x7FFFFFFF
    # As integers NaN > infinity > every number.
    amax = tl.max(magnitude, axis=1)
    byte = tl.minimum(tl.maximum(((amax + BIAS) >> 23) - 2, 0), _MAX_BYTE)
    a = magnitude.to(tl.float32, bitcast=True)
    if SEARCH:
        scaled = a * _inverse(byte)[:, None]
        same = _squared_errors(scaled, 1.0, 1.0, BY_BITS)
        up = _squared_errors(scaled, 2.0, 0.5, BY_BITS)
        down = _squared_errors(scaled, 0.5, 2.0, BY_BITS)
        take_up = (byte < _MAX_BYTE) & (up < same) & ((up <= down) | (byte == 0))
        take_down = (byte > 0) & (down < same) & ((down < up) | (byte == _MAX_BYTE))
        byte += take_up.to(tl.int32) - take_down.to(tl.int32)
    code = _nearest(a * _inverse(byte)[:, None], TIES, BY_BITS)
    negative = u < 0
    if SIGN == SIGN_UNDERFLOW:
        negative = negative & (magnitude != 0)
    elif SIGN == SIGN_DROP:
        negative = negative & (code != 0)
    elif SIGN == SIGN_SET:
        negative = negative | (magnitude == 0)
    code |= negative.to(tl.int32) << 3
    nibbles = code.reshape(BLOCKS, 4, 8) << (tl.arange(0, 8) * 4)[None, None, :]
    words = tl.sum(nibbles, axis=2)
    word_offsets = b[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(codes_ptr + word_offsets, words, mask=exists[:, None])
    byte = tl.where(amax >= 0x7F800000, _NAN_BYTE, byte)
    tl.store(scales_ptr + b, byte.to(tl.uint8), mask=exists)


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, out_ptr, blocks, BLOCKS: tl.constexpr, INTERP: tl.constexpr
):
    """codes int32 [blocks, 4] and scales uint8 [blocks] to out [blocks, 32]; NaN for byte 255."""
    FLOAT: tl.constexpr = out_ptr.dtype.element_ty
    b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = b < blocks
    word_offsets = b[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.load(codes_ptr + word_offsets, mask=exists[:, None], other=0)
    byte = tl.load(scales_ptr + b, mask=exists, other=0).to(tl.int32)
    code = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]).reshape(BLOCKS, 32)
    bits = ((code & 7) << _CODE_SHIFT) | ((code & 8) << 28)
    value = bits.to(tl.float32, bitcast=True) * _FROM_CODES * power_of_two(byte)[:, None]
    offsets = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + offsets, narrow(value, FLOAT, INTERP), mask=exists[:, None])
