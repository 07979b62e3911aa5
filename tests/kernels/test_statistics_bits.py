"""Every implementation counts and sums the same integers as an oracle in float64 and Python."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mxfp4.kernels.backends import BlockCodec
from mxfp4.spec import E2M1_VALUES, E8M0_BIAS, CodecOptions, ScaleRule, TieRule, ZeroSign
from mxfp4.statistics import TensorStatistics
from mxfp4.testing import block_zoo, float64_values, slow_codes, slow_encode, slow_scale_bytes

PLAIN_RULES = [rule for rule in ScaleRule if rule is not ScaleRule.SEARCH]
CHOICES = [
    CodecOptions(rule, ties, list(ZeroSign)[(i + k) % len(ZeroSign)])
    for i, rule in enumerate(PLAIN_RULES)
    for k, ties in enumerate(TieRule)
]


def wanted(bits: NDArray[Any], dtype: str, options: CodecOptions) -> TensorStatistics:
    """By the definitions in `mxfp4.statistics`; float64 holds every number here exactly."""
    x = float64_values(bits, dtype)
    byte = slow_scale_bytes(x, options.rule)
    code = slow_codes(x, byte, options.ties, options.zero_sign) & 7
    element = np.array(E2M1_VALUES)[code]
    scaled = np.ldexp(np.abs(x), (E8M0_BIAS - byte)[:, None])
    units = np.maximum(np.floor(scaled * 2**12), x != 0).astype(np.int64)
    errors = units - (element * 2**12).astype(np.int64)
    cut = np.where(byte[:, None] == 0, units, units // 4 * 4)
    sums = np.zeros((2, 256), np.int64)
    np.add.at(sums[0], byte, (cut * cut).sum(axis=1))
    np.add.at(sums[1], byte, (errors * errors).sum(axis=1))
    return TensorStatistics(
        elements=x.size,
        zero_blocks=int((x == 0).all(axis=1).sum()),
        clipped=int((scaled > 6).sum()),
        flushed=int(((code == 0) & (x != 0)).sum()),
        max_abs=float(np.abs(x).max()),
        max_abs_error=float(np.ldexp(np.abs(scaled - element).max(1), byte - E8M0_BIAS).max()),
        scale_histogram=tuple(np.bincount(byte, minlength=256).tolist()),
        signal=tuple(sums[0].tolist()),
        error=tuple(sums[1].tolist()),
    )


def check(
    implementation: BlockCodec, bits: NDArray[Any], dtype: str, options: CodecOptions
) -> TensorStatistics:
    """Statistics as wanted, and the same codes and scales as without them."""
    codes, scales = np.full((len(bits), 16), 0xA5, np.uint8), np.full(len(bits), 0xA5, np.uint8)
    bad, found = implementation.encode_blocks(bits, dtype, options, codes, scales, statistics=True)
    assert bad == -1
    assert found is not None
    assert found == wanted(bits, dtype, options)
    wanted_codes, wanted_scales = slow_encode(bits, dtype, options)
    assert (scales == wanted_scales).all()
    assert (codes == wanted_codes).all()
    return found


@cache
def zoo(dtype: str) -> NDArray[Any]:
    return block_zoo(dtype)


def sample(implementation: BlockCodec, dtype: str, step: int) -> NDArray[Any]:
    """Fewer for the implementations that take long."""
    slower = {"reference": 16, "numpy": 4}.get(implementation.name, 1)
    return np.ascontiguousarray(zoo(dtype)[:: step * slower])


@pytest.mark.parametrize("options", CHOICES, ids=lambda o: f"{o.rule}-{o.ties}-{o.zero_sign}")
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_zoo(implementation: BlockCodec, dtype: str, options: CodecOptions) -> None:
    check(implementation, sample(implementation, dtype, 13), dtype, options)


def test_every_value_at_every_distance_from_its_scale(implementation: BlockCodec) -> None:
    """All 65,536 BF16 patterns, finite ones alone or below a maximum, with the default options."""
    check(implementation, sample(implementation, "BF16", 2), "BF16", CodecOptions())


def bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


@pytest.mark.parametrize("zero_sign", ZeroSign)
@pytest.mark.parametrize("share", [0.002, 0.1, 1])
def test_zeros_of_both_signs(implementation: BlockCodec, zero_sign: ZeroSign, share: float) -> None:
    rng = np.random.default_rng(1)
    bits = bf16(rng.standard_normal((1500, 32)))
    rare = rng.random(bits.shape) < share
    bits[rare] = rng.choice(np.array([0, 0x8000, 1, 0x8001, 0x7F, 0x807F], np.uint16), rare.sum())
    check(implementation, bits, "BF16", CodecOptions(zero_sign=zero_sign))


@pytest.mark.parametrize("rule", PLAIN_RULES)
@pytest.mark.parametrize("spread", [0, 3, 9, 40, 250])
def test_scales_near_and_far(implementation: BlockCodec, rule: ScaleRule, spread: int) -> None:
    """Scale bytes that stay, drift from one end of the range to the other, or jump."""
    rng = np.random.default_rng(spread)
    blocks = 2000
    drift = np.linspace(-120, 120, blocks) if spread < 250 else np.zeros(blocks)
    exponent = np.clip(drift + rng.integers(-spread, spread + 1, blocks) / 2, -125, 124)
    x = np.ldexp(rng.standard_normal((blocks, 32)) / 2, exponent.astype(np.int64)[:, None])
    check(implementation, bf16(x), "BF16", CodecOptions(rule=rule))


@pytest.mark.parametrize("rule", PLAIN_RULES)
@pytest.mark.parametrize("value", [7.9375, 6.96875, 5.0, 0.2490234375])
def test_no_sum_overflows(implementation: BlockCodec, rule: ScaleRule, value: float) -> None:
    """Long runs of blocks with the largest squares; one block says what all of them add up to."""
    block = np.full((1, 32), value)
    block[0, 5] = 6.96875 if value < 6 else value
    options = CodecOptions(rule=rule)
    count = 300 if implementation.name in ("reference", "numpy") else 70000
    one = wanted(bf16(block), "BF16", options)
    bits = np.ascontiguousarray(np.broadcast_to(bf16(block), (count, 32)))
    codes, scales = np.empty((count, 16), np.uint8), np.empty(count, np.uint8)
    _, found = implementation.encode_blocks(bits, "BF16", options, codes, scales, statistics=True)
    assert found is not None
    assert found.signal == tuple(count * total for total in one.signal)
    assert found.error == tuple(count * total for total in one.error)
    assert (found.clipped, found.flushed) == (count * one.clipped, count * one.flushed)
    assert found.max_abs_error == one.max_abs_error


def test_largest_error_in_the_last_block(implementation: BlockCodec) -> None:
    """Of values that are elements, after which one block errs, each time by more."""
    rng = np.random.default_rng(4)
    values = np.array([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    for place, off in ((899, 0.03125), (3, 0.25), (640, 0.96875), (448, 1.0)):
        x = rng.choice(values, (900, 32))
        x[:, 0] = 6
        x[place, 7] = 6 - off
        found = check(implementation, bf16(x), "BF16", CodecOptions())
        assert found.max_abs_error == min(off, 2 - off)


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7F81, 0xFFFF])
def test_first_block_that_is_not_finite(implementation: BlockCodec, pattern: int) -> None:
    bits = bf16(np.random.default_rng(6).standard_normal((200, 32)))
    for first in (0, 5, 8, 63, 64, 129, 191, 192, 199):
        source = bits.copy()
        source[first, 9] = pattern
        source[min(first + 7, 199)] = pattern
        codes, scales = np.empty((200, 16), np.uint8), np.empty(200, np.uint8)
        bad, found = implementation.encode_blocks(
            source, "BF16", CodecOptions(), codes, scales, statistics=True
        )
        assert (bad, found) == (first, None)


def test_search_is_measured_too(implementation: BlockCodec) -> None:
    """With weights that make some values larger than 8 scales."""
    bits = sample(implementation, "BF16", 57)
    weights = np.ones((1, 32), np.float32)
    weights[0, ::2] = 1e-6
    codes, scales = np.empty((len(bits), 16), np.uint8), np.empty(len(bits), np.uint8)
    _, found = implementation.encode_blocks(
        bits,
        "BF16",
        CodecOptions(rule=ScaleRule.SEARCH),
        codes,
        scales,
        importance=weights,
        statistics=True,
    )
    assert found is not None
    x = float64_values(bits, "BF16")
    byte = scales.astype(np.int64)
    scaled = np.ldexp(np.abs(x), (E8M0_BIAS - byte)[:, None])
    assert scaled.max() > 8
    code = np.stack([codes & 7, codes >> 4 & 7], -1).reshape(x.shape)
    units = np.maximum(np.floor(scaled * 2**12), x != 0).astype(np.int64)
    errors = units - (np.array(E2M1_VALUES)[code] * 2**12).astype(np.int64)
    sums = np.zeros(256, np.int64)
    np.add.at(sums, byte, (errors * errors).sum(axis=1))
    assert found.error == tuple(sums.tolist())
    assert found.clipped == (scaled > 6).sum()
