"""Blocks that are hard to encode, an encoder to compare with, and comparison to the last bit.

For the tests of this library and of whatever reads or writes MXFP4 elsewhere. Works on numpy arrays
of raw bits; torch is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mxfp4.spec import (
    BLOCK_SIZE,
    E2M1_MIDPOINTS,
    E2M1_SIGN,
    E2M1_VALUES,
    E8M0_BIAS,
    E8M0_NAN,
    MAX_SCALE_BYTE,
    CodecOptions,
    ScaleRule,
    TieRule,
    ZeroSign,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INFINITE_EXPONENT = 255


def assert_same_bits(
    seen: NDArray[np.generic], wanted: NDArray[np.generic], what: str = ""
) -> None:
    """Raise AssertionError with the first difference unless both arrays have the same bytes."""
    assert seen.shape == wanted.shape, f"{what} shape {seen.shape}, wanted {wanted.shape}"
    assert seen.dtype == wanted.dtype, f"{what} dtype {seen.dtype}, wanted {wanted.dtype}"
    unsigned = np.dtype(f"u{seen.dtype.itemsize}")
    left, right = np.ascontiguousarray(seen), np.ascontiguousarray(wanted)
    differs = left.view(unsigned) != right.view(unsigned)
    count = int(differs.sum())
    if count:
        first = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(
            f"{what} {count:,} of {seen.size:,} differ, first at {list(first)}: "
            f"{seen[first]!r}, wanted {wanted[first]!r}"
        )


def all_codes() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Every pair of codes under every scale byte: codes [256, 256] and scales [256, 16]."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 2 * 256 // BLOCK_SIZE, axis=1)
    return codes, scales


def block_zoo(dtype: str = "BF16", seed: int = 0) -> NDArray[Any]:
    """Finite blocks [blocks, 32] of raw bits of "BF16", "F16" or "F32" that find most mistakes.

    Every 16-bit pattern alone in a block, and below block maxima at every exponent distance with
    mantissas around each threshold; random bits; subnormals; ties and their neighbours; zeros of
    both signs; blocks whose best scale is a neighbour of the usual one.
    """
    rng = np.random.default_rng(seed)
    if dtype == "F32":
        return np.concatenate(
            [
                (block_zoo("BF16", seed)[::7].astype(np.uint32) << np.uint32(16)),
                _finite(rng.integers(0, 1 << 32, (10000, BLOCK_SIZE), dtype=np.uint32), 23),
                _ties(rng, 40000).view(np.uint32),
                _normal(rng, 10000).view(np.uint32),
            ]
        )
    mantissa_bits = 7 if dtype == "BF16" else 10
    parts = [
        _alone(mantissa_bits),
        _below_maxima(mantissa_bits),
        _finite(rng.integers(0, 1 << 16, (10000, BLOCK_SIZE), dtype=np.uint16), mantissa_bits),
        _subnormal(rng),
        _zeros(),
    ]
    floats = np.concatenate([_ties(rng, 20000, limit=14), _normal(rng, 10000), _halved(rng)])
    if dtype == "F16":
        parts.append(floats.astype(np.float16).view(np.uint16))
    else:
        parts.append((floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
    return np.concatenate([_finite(part, mantissa_bits) for part in parts])


def _finite(bits: NDArray[Any], mantissa_bits: int) -> NDArray[Any]:
    """The same bits with the exponent of NaN and infinity made the one below."""
    size = bits.dtype.type
    exponents = (1 << (8 * bits.dtype.itemsize - 1)) - (1 << mantissa_bits)
    wild = (bits & size(exponents)) == size(exponents)
    return np.where(wild, bits ^ size(1 << mantissa_bits), bits)


def _alone(mantissa_bits: int) -> NDArray[np.uint16]:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    blocks = np.zeros((len(patterns), BLOCK_SIZE), np.uint16)
    blocks[np.arange(len(patterns)), np.arange(len(patterns)) % BLOCK_SIZE] = patterns
    return blocks


def _below_maxima(mantissa_bits: int) -> NDArray[np.uint16]:
    """31 neighbouring patterns beside one block maximum, for every exponent distance."""
    unit = 1 << mantissa_bits
    top = (1 << (15 - mantissa_bits)) - 2
    near = [unit * eighth // 8 + step for eighth in (0, 2, 4, 6, 8) for step in (-1, 0, 1)]
    mantissas = [m for m in near if 0 <= m < unit]
    parts = []
    for distance in [*range(13), *range(13, top, 16)]:
        exponents = np.arange(distance, top + 1)
        for mantissa in mantissas[:: 1 if distance < 6 else 4 if distance < 13 else 16]:
            amax = exponents * unit + mantissa
            values = (exponents - distance)[:, None] * unit + np.arange(unit)[None, :]
            values = np.minimum(values, amax[:, None])
            pad = -unit % (BLOCK_SIZE - 1)
            values = np.pad(values, ((0, 0), (0, pad)), mode="edge")
            values = values.reshape(len(exponents), -1, BLOCK_SIZE - 1)
            block = np.empty((*values.shape[:2], BLOCK_SIZE), np.uint16)
            block[..., 0] = amax[:, None]
            block[..., 1:] = values
            # Signs alternate, the other way round in every second block.
            sign = (np.arange(BLOCK_SIZE) + np.arange(block.shape[1])[:, None]) % 2
            parts.append((block | (sign << 15).astype(np.uint16)).reshape(-1, BLOCK_SIZE))
    return np.concatenate(parts)


def _subnormal(rng: np.random.Generator) -> NDArray[np.uint16]:
    magnitude = rng.integers(0, 1024, (8000, BLOCK_SIZE), dtype=np.uint16)
    magnitude >>= rng.integers(0, 10, (8000, 1), dtype=np.uint16)
    sign = rng.integers(0, 2, magnitude.shape, dtype=np.uint16) << np.uint16(15)
    return magnitude | sign


def _zeros() -> NDArray[np.uint16]:
    blocks = np.zeros((67, BLOCK_SIZE), np.uint16)
    blocks[1::3] = 0x8000
    blocks[2::3, ::2] = 0x8000
    blocks[3::4, 5] = 1
    return blocks


def _ties(rng: np.random.Generator, blocks: int, limit: int = 120) -> NDArray[np.float32]:
    """Midpoints, elements and what lies next to them, with maxima that keep the scale in place."""
    points = np.array([*E2M1_MIDPOINTS, *E2M1_VALUES, 7.0, 1.75, 3.5], np.float32)
    values = rng.choice(points, (blocks, BLOCK_SIZE))
    values[:, 0] = rng.choice(
        np.array([4, 5, 6, 6.5, 6.9921875, 7, 7.9, 3.5, 3.4921875], np.float32)
    )
    step = rng.integers(-1, 2, values.shape)
    towards = np.where(step < 0, np.float32(0), np.float32(np.inf))
    values = np.where(step == 0, values, np.nextafter(values, towards))
    values *= rng.choice(np.array([-1, 1], np.float32), values.shape)
    exponent = rng.integers(-limit, limit - 1, (blocks, 1)).astype(np.int32)
    result: NDArray[np.float32] = np.ldexp(values, exponent).astype(np.float32)
    return result


def _normal(rng: np.random.Generator, blocks: int) -> NDArray[np.float32]:
    values = rng.standard_normal((blocks, BLOCK_SIZE), dtype=np.float32)
    exponent = rng.integers(-12, 12, (blocks, 1)).astype(np.int32)
    result: NDArray[np.float32] = np.ldexp(values, exponent).astype(np.float32)
    return result


def _halved(rng: np.random.Generator) -> NDArray[np.float32]:
    """A maximum near 4 and many values near 1/4 and 3/4: best with half the scale, or nearly so."""
    values = rng.choice(np.array([0.25, 0.75, 0.23, 0.78, 0.5], np.float32), (4000, BLOCK_SIZE))
    values[:, 7] = rng.choice(np.array([4, 4.03125, 4.25, 4.4375, 4.46875, 4.5], np.float32), 4000)
    exponent = rng.integers(-10, 10, (4000, 1)).astype(np.int32)
    result: NDArray[np.float32] = np.ldexp(values, exponent).astype(np.float32)
    return result


def float64_values(bits: NDArray[np.generic], dtype: str) -> NDArray[np.float64]:
    """The values of raw bits, taken apart into sign, exponent and mantissa."""
    mantissa_bits, bias = {"BF16": (7, 127), "F16": (10, 15), "F32": (23, 127)}[dtype]
    width = 8 * bits.dtype.itemsize
    integer = bits.view(f"u{bits.dtype.itemsize}").astype(np.int64)
    mantissa = integer & ((1 << mantissa_bits) - 1)
    exponent = (integer & ((1 << (width - 1)) - 1)) >> mantissa_bits
    mantissa += (exponent > 0) << mantissa_bits
    values = np.ldexp(mantissa.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    signed: NDArray[np.float64] = np.where(integer >> (width - 1), -values, values)
    return signed


def slow_scale_bytes(x: NDArray[np.float64], rule: ScaleRule) -> NDArray[np.int64]:
    """Scale bytes of finite blocks [..., 32] from the real-number definitions; not for SEARCH."""
    amax = np.abs(x).max(axis=-1)
    fraction, exponent = np.frexp(np.where(amax == 0, 1.0, amax))
    floor = exponent.astype(np.int64) - 1 - 2
    relative = fraction * 2  # amax / 2^floor(log2 amax), in [1, 2)
    up = {
        ScaleRule.EVEN: relative >= 1.75,
        ScaleRule.FLOOR: relative < 0,
        ScaleRule.RCEIL: relative > 1.5,
        ScaleRule.CEIL: relative > 1.0,
        ScaleRule.RFLOOR: relative >= 1.5,
    }[rule]
    byte = floor + up + E8M0_BIAS - (rule is ScaleRule.RFLOOR)
    return np.clip(np.where(amax == 0, 0, byte), 0, MAX_SCALE_BYTE)


def slow_codes(
    x: NDArray[np.float64], byte: NDArray[np.int64], ties: TieRule, zero_sign: ZeroSign
) -> NDArray[np.uint8]:
    """Codes [..., 32], not packed, under given scale bytes [...], by distance in float64."""
    scaled = np.abs(np.ldexp(x, (E8M0_BIAS - byte)[..., None]))
    code = np.zeros(x.shape, np.uint8)
    for upper in range(1, len(E2M1_VALUES)):
        below = scaled - E2M1_VALUES[upper - 1]
        above = E2M1_VALUES[upper] - scaled
        up_at_tie = {TieRule.EVEN: upper % 2 == 0, TieRule.ZERO: False, TieRule.AWAY: True}[ties]
        code[(above <= below) if up_at_tie else (above < below)] = upper
    negative = {
        ZeroSign.UNDERFLOW: x < 0,
        ZeroSign.SOURCE: np.signbit(x),
        ZeroSign.DROP: (x < 0) & (code != 0),
        ZeroSign.SET: (x < 0) | (x == 0),
    }[zero_sign]
    code[negative] |= E2M1_SIGN
    return code


def slow_encode(
    bits: NDArray[np.generic], dtype: str, options: CodecOptions
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Packed codes [blocks, 16] and scale bytes [blocks] by an encoder written for comparison."""
    x = float64_values(bits, dtype)
    byte = slow_scale_bytes(x, options.rule)
    code = slow_codes(x, byte, options.ties, options.zero_sign)
    packed: NDArray[np.uint8] = code[:, 0::2] | (code[:, 1::2] << np.uint8(4))
    return packed, byte.astype(np.uint8)


def slow_decode(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Values [..., K] of packed codes [..., K/2] and scales [..., K/32], exact in float64."""
    element = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    code = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    exponent = np.repeat(scales.astype(np.int64) - E8M0_BIAS, BLOCK_SIZE, axis=-1)
    values: NDArray[np.float64] = np.ldexp(element[code], exponent)
    values[np.repeat(scales == E8M0_NAN, BLOCK_SIZE, axis=-1)] = np.nan
    return values
