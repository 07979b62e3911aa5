"""Every implementation gives the bytes of the float64 encoder, for every rule and tie mode."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mxfp4.kernels.backends import BlockCodec
from mxfp4.spec import (
    E2M1_VALUES,
    E8M0_BIAS,
    MAX_SCALE_BYTE,
    CodecOptions,
    ScaleRule,
    TieRule,
    ZeroSign,
)
from mxfp4.testing import (
    assert_same_bits,
    block_zoo,
    float64_values,
    slow_codes,
    slow_encode,
    slow_scale_bytes,
)

DTYPES = ("BF16", "F16", "F32")
PLAIN_RULES = [rule for rule in ScaleRule if rule is not ScaleRule.SEARCH]

# Each rule with each tie mode; the signs of zero take turns, so that each meets most of them.
CHOICES = [
    CodecOptions(rule, ties, list(ZeroSign)[(i + k) % len(ZeroSign)])
    for i, rule in enumerate(PLAIN_RULES)
    for k, ties in enumerate(TieRule)
]


@cache
def zoo(dtype: str) -> NDArray[Any]:
    return block_zoo(dtype)


@cache
def expected(dtype: str, options: CodecOptions) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return slow_encode(zoo(dtype), dtype, options)


def encode(
    implementation: BlockCodec, bits: NDArray[np.generic], dtype: str, options: CodecOptions
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    codes = np.full((len(bits), 16), 0xA5, np.uint8)
    scales = np.full(len(bits), 0xA5, np.uint8)
    bad, _ = implementation.encode_blocks(bits, dtype, options, codes, scales)
    assert bad == -1
    return codes, scales


@pytest.mark.parametrize("options", CHOICES, ids=lambda o: f"{o.rule}-{o.ties}-{o.zero_sign}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales(implementation: BlockCodec, dtype: str, options: CodecOptions) -> None:
    # The reference takes seconds for the whole zoo, so it sees all of it under one choice only.
    sample = 5 if implementation.name == "reference" and options != CodecOptions() else 1
    bits = np.ascontiguousarray(zoo(dtype)[::sample])
    codes, scales = encode(implementation, bits, dtype, options)
    wanted_codes, wanted_scales = expected(dtype, options)
    assert_same_bits(scales, wanted_scales[::sample], "scales")
    assert_same_bits(codes, wanted_codes[::sample], "codes")
    assert scales.max() <= MAX_SCALE_BYTE


@pytest.mark.parametrize("zero_sign", ZeroSign)
def test_signs_of_zero(implementation: BlockCodec, zero_sign: ZeroSign) -> None:
    options = CodecOptions(zero_sign=zero_sign)
    bits = np.ascontiguousarray(zoo("BF16")[::3])
    codes, _ = encode(implementation, bits, "BF16", options)
    assert_same_bits(codes, slow_encode(bits, "BF16", options)[0])


def test_rounding_is_that_of_ml_dtypes() -> None:
    x = float64_values(zoo("BF16"), "BF16")
    byte = slow_scale_bytes(x, ScaleRule.EVEN)
    scaled = np.clip(np.ldexp(x, (E8M0_BIAS - byte)[:, None]), -6, 6)
    theirs = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    ours = slow_codes(x, byte, TieRule.EVEN, ZeroSign.SOURCE)
    assert_same_bits(ours, theirs)


def test_ten_million_floats_with_many_ties(implementation: BlockCodec) -> None:
    rng = np.random.default_rng(7)
    step = 3125
    for seed in range(100 if implementation.name.startswith("c-") else 10):
        # Upper halves from the zoo of ties; lower halves mostly next to zero, where ties are.
        upper = zoo("F32")[rng.integers(0, len(zoo("F32")), step)] & np.uint32(0xFFFF0000)
        lower = rng.choice(np.array([0, 0, 1, 0xFFFF, 0x8000, seed], np.uint32), upper.shape)
        bits = upper | lower
        options = CHOICES[seed % len(CHOICES)]
        codes, scales = encode(implementation, bits, "F32", options)
        wanted_codes, wanted_scales = slow_encode(bits, "F32", options)
        assert_same_bits(scales, wanted_scales, "scales")
        assert_same_bits(codes, wanted_codes, "codes")


@cache
def searched(dtype: str) -> NDArray[np.int64]:
    """Scale bytes of the least exact squared error among floor and its neighbours."""
    x = float64_values(zoo(dtype), dtype)
    middle = slow_scale_bytes(x, ScaleRule.FLOOR)
    errors = {step: _squared_error(x, middle, step) for step in (0, 1, -1)}
    byte = middle.copy()
    best = errors[0].copy()
    for step in (1, -1):
        allowed = (middle + step >= 0) & (middle + step <= MAX_SCALE_BYTE)
        better = allowed & (errors[step] < best)
        apart = np.abs(errors[step] - best)
        close = allowed & (apart > 0) & (apart <= 1e-12 * best)
        for i in np.flatnonzero(close):
            at = int(middle[i])
            exact = _exact_error(x[i], at + step), _exact_error(x[i], int(byte[i]))
            better[i] = exact[0] < exact[1]
        byte[better] = middle[better] + step
        best[better] = errors[step][better]
    return byte


def _squared_error(
    x: NDArray[np.float64], middle: NDArray[np.int64], step: int
) -> NDArray[np.float64]:
    """In units of the middle scale."""
    scaled = np.abs(np.ldexp(x, (E8M0_BIAS - middle)[:, None]))
    values = np.array(E2M1_VALUES) * 2.0**step
    nearest = np.abs(scaled[..., None] - values).min(axis=-1)
    errors: NDArray[np.float64] = np.sum(nearest**2, axis=-1)
    return errors


def _exact_error(x: NDArray[np.float64], byte: int) -> Fraction:
    scale = Fraction(2) ** (byte - E8M0_BIAS)
    values = [Fraction(value) * scale for value in E2M1_VALUES]
    return sum((min(abs(abs(Fraction(v)) - q) for q in values) ** 2 for v in x), Fraction(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_search_finds_the_least_error(implementation: BlockCodec, dtype: str) -> None:
    options = CodecOptions(rule=ScaleRule.SEARCH)
    codes, scales = encode(implementation, zoo(dtype), dtype, options)
    wanted = searched(dtype)
    assert_same_bits(scales, wanted.astype(np.uint8), "scales")
    x = float64_values(zoo(dtype), dtype)
    code = slow_codes(x, wanted, TieRule.EVEN, ZeroSign.UNDERFLOW)
    assert_same_bits(codes, code[:, 0::2] | (code[:, 1::2] << 4), "codes")


def test_search_uses_all_three_candidates() -> None:
    for dtype in DTYPES:
        x = float64_values(zoo(dtype), dtype)
        step = searched(dtype) - slow_scale_bytes(x, ScaleRule.FLOOR)
        assert {-1, 0, 1} == set(step.tolist()), dtype


def test_search_is_never_worse_than_even() -> None:
    x = float64_values(zoo("BF16"), "BF16")[::3]
    searched_byte, even_byte = searched("BF16")[::3], slow_scale_bytes(x, ScaleRule.EVEN)
    even = _squared_error(x, even_byte, 0)
    found = _squared_error(x, searched_byte, 0)
    scale = np.exp2(2.0 * (searched_byte - even_byte))
    assert (found * scale <= even * (1 + 1e-14)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_search_with_importance(implementation: BlockCodec, dtype: str) -> None:
    """Against sums in extended precision; blocks where those cannot tell are few."""
    rng = np.random.default_rng(3)
    bits = np.ascontiguousarray(zoo(dtype)[::8])
    period = 5
    weights = rng.choice(np.array([0, 0.01, 1, 3, 100], np.float32), (period, 32))
    weights *= rng.random(weights.shape, dtype=np.float32)
    codes, scales = np.empty((len(bits), 16), np.uint8), np.empty(len(bits), np.uint8)
    options = CodecOptions(rule=ScaleRule.SEARCH)
    implementation.encode_blocks(bits, dtype, options, codes, scales, importance=weights)
    x = float64_values(bits, dtype)
    middle = slow_scale_bytes(x, ScaleRule.FLOOR)
    scaled = np.abs(np.ldexp(x, (E8M0_BIAS - middle)[:, None]))
    weight = weights[np.arange(len(bits)) % period].astype(np.float64)
    errors = {}
    for step in (-1, 0, 1):
        distance = np.abs(scaled[..., None] - np.array(E2M1_VALUES) * 2.0**step).min(axis=-1)
        errors[step] = (weight * distance**2).sum(axis=-1)
    errors[-1][middle == 0] = np.inf
    errors[1][middle == MAX_SCALE_BYTE] = np.inf
    least = np.minimum.reduce(list(errors.values()))
    chosen = np.select([scales == middle + step for step in errors], list(errors.values()), np.nan)
    assert (chosen <= least * (1 + 1e-12) + 1e-300).all()
    near = [np.abs(error - least) <= 1e-9 * least for error in errors.values()]
    apart = np.sum(near, axis=0) == 1
    assert apart.mean() > 0.3
    best = np.select([errors[step] == least for step in errors], list(errors), 0)
    assert_same_bits(scales[apart].astype(np.int64), (middle + best)[apart], "scales")


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_implementations_agree_on_every_choice(dtype: str, implementation: BlockCodec) -> None:
    """All 72 combinations against the numpy codec, on a sample of the zoo."""
    from mxfp4.kernels import fallback

    bits = np.ascontiguousarray(zoo(dtype)[:: 331 if implementation.name == "reference" else 37])
    weights = np.linspace(0, 2, 96, dtype=np.float32).reshape(3, 32)
    for rule in ScaleRule:
        for ties in TieRule:
            for zero_sign in ZeroSign:
                options = CodecOptions(rule, ties, zero_sign)
                importance = weights if rule is ScaleRule.SEARCH and ties is TieRule.ZERO else None
                results = []
                for encode_blocks in (implementation.encode_blocks, fallback.encode_blocks):
                    codes, scales = np.empty((len(bits), 16), np.uint8), np.empty(len(bits), "u1")
                    _, found = encode_blocks(
                        bits,
                        dtype,
                        options,
                        codes,
                        scales,
                        importance=importance,
                        statistics=True,
                    )
                    results.append((codes, scales, found))
                assert_same_bits(results[0][1], results[1][1], f"{options} scales")
                assert_same_bits(results[0][0], results[1][0], f"{options} codes")
                assert results[0][2] == results[1][2], options
