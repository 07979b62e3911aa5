"""The codec in numpy: exact integer arithmetic in a cache-sized workspace, for machines without C.

Every source is first reduced to 16 bits a value, sign, exponent and seven mantissa bits as in
BF16, with the last bit set whenever a set bit was cut off. No threshold of the codec, neither
between codes nor between scale bytes, needs more than two mantissa bits, so every comparison
comes out as on the full value, and one integer kernel serves BF16, F16 and F32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxfp4.spec import (
    BLOCK_SIZE,
    E2M1_MIDPOINTS,
    E2M1_SIGN,
    E2M1_VALUES,
    E8M0_BIAS,
    E8M0_NAN,
    MAX_SCALE_BYTE,
    SCALE_BIAS,
    CodecOptions,
    ScaleRule,
    TieRule,
    ZeroSign,
)
from mxfp4.statistics import SIGNAL_CUT, UNIT_BITS, TensorStatistics

CHUNK_BLOCKS = 2048
"""Blocks handled at a time: the workspace stays in a level-2 cache."""

EXACT_FROM = 3
"""Smallest scale byte at which elements are above the subnormals and bits can be subtracted."""

NORMAL_FROM = 2
"""Smallest scale byte at which every element but zero is a normal BF16 number."""

INFINITE = 0x7F80
"""The reduced 16 bits of infinity; NaN is above."""

_MAGNITUDE = np.int16(0x7FFF)
_VALUES = np.array(E2M1_VALUES, np.float32)
_SIGNED_VALUES = np.concatenate([_VALUES, -_VALUES])

# What a byte of codes holds: two float32 as one float64, two BF16 words as one uint32, and a mask
# of the words that are not zero.
_PAIRS = np.stack([np.tile(_SIGNED_VALUES, 16), np.repeat(_SIGNED_VALUES, 16)], axis=1)
_FLOAT_PAIRS = _PAIRS.view(np.float64)[:, 0]
_WORD_PAIRS = (_PAIRS.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint32)[:, 0]
_NOT_ZERO_PAIRS = ((_PAIRS != 0) * np.uint16(0xFFFF)).view(np.uint32)[:, 0]


def float_values(source: NDArray[np.generic], dtype: str) -> NDArray[np.float32]:
    """The float32 values of raw bits of `dtype` ("BF16", "F16" or "F32"); always exact."""
    if dtype == "BF16":
        return (source.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F16":
        with np.errstate(invalid="ignore"):
            return source.view(np.float16).astype(np.float32)
    return source.view(np.float32)


def reduced_bits(source: NDArray[np.generic], dtype: str) -> NDArray[np.uint16]:
    """Sixteen bits a value that compare with every threshold as the value does (see the top)."""
    if dtype == "BF16":
        return source.view(np.uint16)
    bits = float_values(source, dtype).view(np.uint32)
    cut_off = (bits & np.uint32(0xFFFF)) != 0
    words: NDArray[np.uint16] = (bits >> np.uint32(16)).astype(np.uint16)
    words |= cut_off
    return words


def encode_blocks(
    source: NDArray[np.generic],
    dtype: str,
    options: CodecOptions,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    *,
    importance: NDArray[np.float32] | None = None,
    statistics: bool = False,
) -> tuple[int, TensorStatistics | None]:
    """Encode `source` [blocks, 32] into `codes` [blocks, 16] and `scales` [blocks].

    `importance` [period, 32] weighs the squared errors of block i with row i mod period. Returns
    the index of the first block with a NaN or an infinity (or -1) and the statistics; after such
    a block nothing more is written.
    """
    total = TensorStatistics() if statistics else None
    work = _Workspace.of(min(len(source), CHUNK_BLOCKS))
    for start in range(0, len(source), CHUNK_BLOCKS):
        part = slice(start, min(start + CHUNK_BLOCKS, len(source)))
        bits = reduced_bits(source[part], dtype)
        work = work.first(len(bits))
        np.bitwise_and(bits.view(np.int16), _MAGNITUDE, out=work.magnitude)
        amax = _block_maximum(work)
        if amax.max() >= INFINITE:
            return start + int(np.argmax(amax >= INFINITE)), None
        byte = _scale_bytes(amax, options.rule)
        if options.rule is ScaleRule.SEARCH:
            weights = None
            if importance is not None:
                weights = importance[np.arange(part.start, part.stop) % len(importance)]
            byte = _search(float_values(source[part], dtype), byte, weights)
        _encode_chunk(bits.view(np.int16), byte, options, work, codes[part])
        scales[part] = byte
        low = np.flatnonzero(byte < EXACT_FROM)
        if len(low):
            values = float_values(source[part][low], dtype)
            codes[start + low] = _encode_exact(values, byte[low], options)
        if total is not None:
            total += _statistics(float_values(source[part], dtype), codes[part], byte)
    return -1, total


@dataclass(frozen=True)
class _Workspace:
    """Arrays int16 [blocks, 32] that are written again for every chunk."""

    magnitude: NDArray[np.int16]
    step: NDArray[np.int16]
    spare: NDArray[np.int16]

    @classmethod
    def of(cls, blocks: int) -> _Workspace:
        return cls(*(np.empty((blocks, BLOCK_SIZE), np.int16) for _ in range(3)))

    def first(self, blocks: int) -> _Workspace:
        """The same arrays, cut to the first blocks."""
        if blocks == len(self.step):
            return self
        return _Workspace(self.magnitude[:blocks], self.step[:blocks], self.spare[:blocks])


def _block_maximum(work: _Workspace) -> NDArray[np.int32]:
    """Largest magnitude bits of each block, [blocks]; flat loops are the fast ones in numpy."""
    pair = work.magnitude.view(np.uint32).reshape(-1)
    upper = work.step.view(np.uint32).reshape(-1)
    lower = work.spare.view(np.uint32).reshape(-1)
    np.right_shift(pair, np.uint32(16), out=upper)
    np.bitwise_and(pair, np.uint32(0xFFFF), out=lower)
    most = np.maximum(upper, lower, out=upper)
    while len(most) > len(work.magnitude):
        most = np.maximum(most[0::2], most[1::2])
    return most.astype(np.int32)


def _scale_bytes(amax: NDArray[np.int32], rule: ScaleRule) -> NDArray[np.int32]:
    """The rule of `mxfp4.spec.ScaleRule` on reduced bits; for SEARCH the middle candidate."""
    byte: NDArray[np.int32] = ((amax + (SCALE_BIAS[rule] >> 16)) >> 7) - 2
    return np.clip(byte, 0, MAX_SCALE_BYTE, out=byte)


def _encode_chunk(
    word: NDArray[np.int16],
    byte: NDArray[np.int32],
    options: CodecOptions,
    work: _Workspace,
    codes: NDArray[np.uint8],
) -> None:
    """Codes of blocks whose scale byte is at least EXACT_FROM; others are left meaningless.

    With r the distance of the magnitude bits from those of a quarter of the scale, the midpoints
    are r = 0, 192, 288, 352, 416, 480, 544: multiples of 32. `step` counts how many multiples of
    32 the value is beyond. Its code is step / 2 - 2 from step 10 on, and (step + 5) / 6 below,
    which is never the larger one above.
    """
    step, code = work.step, work.spare
    low = ((byte - 2) << 7) - (32 if options.ties is TieRule.AWAY else 31)
    np.subtract(work.magnitude, low.astype(np.int16)[:, None], out=step)
    if options.ties is TieRule.EVEN:
        # Of two codes beside a midpoint the upper one is even exactly when this bit is set.
        np.right_shift(work.magnitude, np.int16(6), out=code)
        code &= np.int16(1)
        step += code
    step >>= np.int16(5)
    np.clip(step, 0, 18, out=step)
    np.multiply(step, np.int16(11), out=code)
    code += np.int16(55)
    code >>= np.int16(6)
    step >>= np.int16(1)
    step -= np.int16(2)
    np.maximum(code, step, out=code)
    code |= _sign_bits(word, work.magnitude, code, options.zero_sign, out=step)
    pair = code.view(np.uint32)
    shifted = np.right_shift(pair, np.uint32(12), out=step.view(np.uint32))
    pair |= shifted
    np.copyto(codes, pair, casting="unsafe")


def _sign_bits(
    word: NDArray[np.int16],
    magnitude: NDArray[np.int16],
    code: NDArray[np.int16],
    zero_sign: ZeroSign,
    out: NDArray[np.int16],
) -> NDArray[np.int16]:
    """Bit 3 of every code, as int16 0 or 8."""
    np.right_shift(word, np.int16(12), out=out)
    out &= np.int16(E2M1_SIGN)
    if zero_sign is ZeroSign.UNDERFLOW:
        negative_zero = word == np.int16(-0x8000)
        if negative_zero.any():
            out[negative_zero] = 0
    elif zero_sign is ZeroSign.DROP:
        out *= code != 0
    elif zero_sign is ZeroSign.SET:
        out[magnitude == 0] = E2M1_SIGN
    return out


def _encode_exact(
    values: NDArray[np.float32], byte: NDArray[np.int32], options: CodecOptions
) -> NDArray[np.uint8]:
    """Codes [blocks, 16] for any scale byte, by comparison of scaled values with the midpoints."""
    scaled = _scaled_magnitudes(values, byte)
    code = np.zeros(values.shape, np.int16)
    for lower, midpoint in enumerate(E2M1_MIDPOINTS):
        up_at_tie = options.ties is TieRule.AWAY or (options.ties is TieRule.EVEN and lower % 2)
        code += scaled >= midpoint if up_at_tie else scaled > midpoint
    magnitude = (values != 0).astype(np.int16)
    word = np.where(np.signbit(values), np.int16(-0x8000), np.int16(0)) + magnitude
    code |= _sign_bits(word, magnitude, code, options.zero_sign, out=np.empty_like(code))
    return (code[:, 0::2] | (code[:, 1::2] << 4)).astype(np.uint8)


def _scaled_magnitudes(values: NDArray[np.float32], byte: NDArray[np.int32]) -> NDArray[np.float32]:
    """|x| / scale in float32. Exact, save that what is far below every midpoint may lose bits."""
    inverse = np.ldexp(np.float32(1), E8M0_BIAS - byte)
    scaled: NDArray[np.float32] = np.abs(values) * inverse[:, None]
    return scaled


def _nearest(scaled: NDArray[np.float32], unit: float) -> NDArray[np.float32]:
    """The nearest of the element values times `unit`, a power of two; ties either way."""
    low = np.rint(scaled * np.float32(2 / unit)) * np.float32(unit / 2)
    middle = np.rint(scaled * np.float32(1 / unit)) * np.float32(unit)
    high = np.rint(scaled * np.float32(0.5 / unit)) * np.float32(unit * 2)
    nearest = np.where(scaled < 2 * unit, low, np.where(scaled < 4 * unit, middle, high))
    limited: NDArray[np.float32] = np.minimum(nearest, np.float32(E2M1_VALUES[-1] * unit))
    return limited


def _search(
    values: NDArray[np.float32], middle: NDArray[np.int32], weights: NDArray[np.float32] | None
) -> NDArray[np.int32]:
    """Scale bytes with the least squared error among middle - 1, middle and middle + 1.

    Compared are differences of errors, element by element: with p and q the nearest values of two
    candidates, (v - p)^2 - (v - q)^2 = (q - p) (2v - p - q), zero where both round alike. Without
    weights every term and every sum is exact in float64, so the choice is exact too.
    """
    scaled = _scaled_magnitudes(values, middle)
    base = _nearest(scaled, 1.0)
    gain_up = _error_change(scaled, base, _nearest(scaled, 2.0), weights)
    gain_down = _error_change(scaled, base, _nearest(scaled, 0.5), weights)
    gain_up[middle == MAX_SCALE_BYTE] = np.inf
    gain_down[middle == 0] = np.inf
    byte = middle + ((gain_up < 0) & (gain_up <= gain_down))
    byte -= (gain_down < 0) & (gain_down < gain_up)
    return byte


def _error_change(
    scaled: NDArray[np.float32],
    base: NDArray[np.float32],
    other: NDArray[np.float32],
    weights: NDArray[np.float32] | None,
) -> NDArray[np.float64]:
    """Squared error with `other` minus that with `base`, summed over each block."""
    v, p, q = (a.astype(np.float64) for a in (scaled, other, base))
    change = (q - p) * (2 * v - p - q)
    if weights is not None:
        change *= weights
    return _tree_sum(change)


def _tree_sum(terms: NDArray[Any]) -> NDArray[Any]:
    """Sum over a block in the order every backend keeps: neighbours first, then halves."""
    terms = terms[:, 0::2] + terms[:, 1::2]
    while terms.shape[1] > 1:
        middle = terms.shape[1] // 2
        terms = terms[:, :middle] + terms[:, middle:]
    return terms[:, 0]


def _statistics(
    values: NDArray[np.float32], codes: NDArray[np.uint8], byte: NDArray[np.int32]
) -> TensorStatistics:
    """Statistics of a chunk; see `mxfp4.statistics` for the integer sums."""
    scaled = _scaled_magnitudes(values, byte)
    code = np.stack([codes & 7, (codes >> 4) & 7], -1).reshape(scaled.shape)
    element = _VALUES[code]
    zero_blocks = int((np.abs(values).max(axis=1) == 0).sum())
    worst = np.abs(scaled - element).max(axis=1).astype(np.float64)
    units = (scaled * np.float32(1 << UNIT_BITS)).astype(np.int64)
    units = np.maximum(units, values != 0)
    kept = np.where(byte[:, None] == 0, units, units >> SIGNAL_CUT << SIGNAL_CUT)
    errors = units - (element * np.float32(1 << UNIT_BITS)).astype(np.int64)
    return TensorStatistics(
        elements=values.size,
        zero_blocks=zero_blocks,
        clipped=int((scaled > E2M1_VALUES[-1]).sum()),
        flushed=int(((code == 0) & (values != 0)).sum()),
        max_abs=float(np.abs(values).max()),
        max_abs_error=float(np.ldexp(worst, byte - E8M0_BIAS).max()),
        scale_histogram=tuple(np.bincount(byte, minlength=256).tolist()),
        signal=_square_sums(kept, byte),
        error=_square_sums(errors, byte),
    )


def _square_sums(values: NDArray[np.int64], byte: NDArray[np.int32]) -> tuple[int, ...]:
    sums = np.zeros(256, np.int64)
    np.add.at(sums, byte, (values * values).sum(axis=1))
    return tuple(sums.tolist())


def decode_blocks(
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    out: NDArray[np.generic],
    dtype: str,
) -> None:
    """Decode `codes` [blocks, 16] and `scales` [blocks] into `out` [blocks, 32].

    `out` is uint16 for `dtype` "BF16" and float32 for "F32". Byte 255 gives NaN for every element;
    253 and 254 overflow to infinity where IEEE does.
    """
    for start in range(0, len(codes), CHUNK_BLOCKS):
        part = slice(start, start + CHUNK_BLOCKS)
        byte = scales[part]
        if dtype == "F32":
            _decode_floats(codes[part], byte, out[part].view(np.float32))
            continue
        words = out[part].view(np.uint16)
        _decode_words(codes[part], byte, words)
        rare = np.flatnonzero((byte < NORMAL_FROM) | (byte > MAX_SCALE_BYTE))
        if len(rare):
            values = np.empty((len(rare), BLOCK_SIZE), np.float32)
            _decode_floats(codes[part][rare], byte[rare], values)
            words[rare] = values.view(np.uint32) >> np.uint32(16)


def _decode_floats(
    codes: NDArray[np.uint8], byte: NDArray[np.uint8], values: NDArray[np.float32]
) -> None:
    np.take(_FLOAT_PAIRS, codes, out=values.view(np.float64), mode="clip")
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.ldexp(np.float32(1), byte.astype(np.int32) - E8M0_BIAS)
        scale[byte == E8M0_NAN] = np.nan
        values *= scale[:, None]


def _decode_words(
    codes: NDArray[np.uint8], byte: NDArray[np.uint8], words: NDArray[np.uint16]
) -> None:
    """BF16 words where every element but zero is normal: the exponent is added to those."""
    exponent = ((byte.astype(np.uint32) - E8M0_BIAS) << np.uint32(7)) & np.uint32(0xFFFF)
    pair = np.take(_NOT_ZERO_PAIRS, codes, mode="clip")
    pair &= (exponent | (exponent << np.uint32(16)))[:, None]
    np.add(pair.view(np.uint16), _WORD_PAIRS[codes].view(np.uint16), out=words)
