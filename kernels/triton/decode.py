"""Device functions: words to floats, scale bytes to factors, and the casts the interpreter needs.

Every decoder exists twice, as PTX and in plain Triton, both built from the table in `bits`. The
plain one also runs on AMD devices and in the interpreter. The interpreter computes bfloat16
arithmetic on raw bits and truncates when it rounds to bfloat16, so under it (INTERP) operands are
widened to float32, where products of two bfloat16 or float16 numbers are exact, and rounded by
integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4.kernels.triton.bits import BF16_WORD, FP16_WORD, PLANES, WordFormat, ptx_decoder


def _terms(word: WordFormat) -> tl.constexpr:
    """The decoding steps in the order of planes as plain numbers."""
    steps = [step for plane in word.steps for step in plane]
    return tl.constexpr(tuple((s.right, s.select, s.factor, s.keep) for s in steps))


_PTX_BF16 = tl.constexpr(ptx_decoder(BF16_WORD))
_PTX_FP16 = tl.constexpr(ptx_decoder(FP16_WORD))
_BF16_TILES = tl.constexpr((tl.bfloat16,) * PLANES)
_FP16_TILES = tl.constexpr((tl.float16,) * PLANES)
_BF16 = _terms(BF16_WORD)
_FP16 = _terms(FP16_WORD)
_BF16_UNBIAS = tl.constexpr(2.0**BF16_WORD.bias)
_FP16_UNBIAS = tl.constexpr(2.0**FP16_WORD.bias)


@triton.jit
def _bf16_term(w, TERM: tl.constexpr):
    return (((w >> _BF16[TERM][0]) & _BF16[TERM][1]) * _BF16[TERM][2]) & _BF16[TERM][3]


@triton.jit
def _fp16_term(w, TERM: tl.constexpr):
    return (((w >> _FP16[TERM][0]) & _FP16[TERM][1]) * _FP16[TERM][2]) & _FP16[TERM][3]


@triton.jit
def decode_planes(w, FLOAT: tl.constexpr, DECODER: tl.constexpr):
    """int16 words to four tiles of FLOAT, each the elements of one plane times 2^-bias."""
    if DECODER == "ptx":
        if tl.bfloat16 == FLOAT:
            a, b, c, d = tl.inline_asm_elementwise(
                _PTX_BF16, "=r,=r,=r,=r,r", [w], _BF16_TILES, True, 2
            )
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                _PTX_FP16, "=r,=r,=r,=r,r", [w], _FP16_TILES, True, 2
            )
    else:
        u = w.to(tl.uint16, bitcast=True)
        if tl.bfloat16 == FLOAT:
            a = _bf16_term(u, 0)
            b = _bf16_term(u, 1)
            c = _bf16_term(u, 2)
            d = _bf16_term(u, 3)
        else:
            a = _fp16_term(u, 0)
            b = _fp16_term(u, 1)
            c = _fp16_term(u, 2) | _fp16_term(u, 3)
            d = _fp16_term(u, 4) | _fp16_term(u, 5)
        a = a.to(tl.uint16).to(FLOAT, bitcast=True)
        b = b.to(tl.uint16).to(FLOAT, bitcast=True)
        c = c.to(tl.uint16).to(FLOAT, bitcast=True)
        d = d.to(tl.uint16).to(FLOAT, bitcast=True)
    return a, b, c, d


@triton.jit
def unbias(w, FLOAT: tl.constexpr):
    """Elements from a decoded plane, which may have been widened: w times 2^bias."""
    if tl.bfloat16 == FLOAT:
        return w * _BF16_UNBIAS
    else:
        return w * _FP16_UNBIAS


@triton.jit
def folded_scales(s, FLOAT: tl.constexpr):
    """Four stored bytes to four factors of FLOAT, whose exponent is the low bits of the byte."""
    if tl.bfloat16 == FLOAT:
        even = (s & 0x00FF00FF) << 7
        odd = ((s >> 8) & 0x00FF00FF) << 7
    else:
        even = (s & 0x001F001F) << 10
        odd = ((s >> 8) & 0x001F001F) << 10
    a = even.to(tl.uint16).to(FLOAT, bitcast=True)
    b = odd.to(tl.uint16).to(FLOAT, bitcast=True)
    c = (even >> 16).to(tl.uint16).to(FLOAT, bitcast=True)
    d = (odd >> 16).to(tl.uint16).to(FLOAT, bitcast=True)
    return a, b, c, d


@triton.jit
def power_of_two(byte):
    """float32 2^(byte - 127) of scale bytes 0 to 254 (int32); NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """float32 of bfloat16, float16 or float32; right in the interpreter too, subnormals kept."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, FLOAT: tl.constexpr, INTERP: tl.constexpr):
    """float32 to FLOAT, nearest, ties to even."""
    if INTERP and tl.bfloat16 == FLOAT:
        u = x.to(tl.uint32, bitcast=True)
        rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF
        # A NaN must not become an infinity by the rounding of its payload.
        rounded = tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(FLOAT)
