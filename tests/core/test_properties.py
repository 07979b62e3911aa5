"""Properties that hold for any input, searched by hypothesis."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxfp4
from mxfp4.spec import MAX_SCALE_BYTE, ScaleRule, TieRule, ZeroSign

# Rules under which the largest element of a block always asks for the same scale again.
STABLE_RULES = [ScaleRule.EVEN, ScaleRule.FLOOR]
PLAIN_RULES = [rule for rule in ScaleRule if rule is not ScaleRule.SEARCH]

BITS = st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32)


def block(patterns: list[int]) -> torch.Tensor:
    """Any finite bfloat16 block."""
    bits = np.array(patterns, np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] &= 0xBFFF
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@settings(max_examples=300, deadline=None)
@given(BITS, st.sampled_from(STABLE_RULES), st.sampled_from(TieRule))
def test_what_was_quantized_quantizes_to_itself(
    patterns: list[int], rule: ScaleRule, ties: TieRule
) -> None:
    t = mxfp4.quantize(block(patterns), rule=rule, ties=ties, zero_sign="source")
    again = mxfp4.quantize(mxfp4.dequantize(t), rule=rule, ties=ties, zero_sign="source")
    assert mxfp4.dequantize(again).equal(mxfp4.dequantize(t))
    # A maximum of 3.5 scales that falls to 3 is 6 of the next lower scale the second time.
    if (rule, ties) != (ScaleRule.EVEN, TieRule.ZERO):
        assert again.codes.equal(t.codes)
        assert again.scales.equal(t.scales)


def test_a_maximum_on_a_tie_that_falls_is_stored_with_a_lower_scale_the_second_time() -> None:
    t = mxfp4.quantize(torch.full((32,), 3.5), rule="even", ties="zero")
    again = mxfp4.quantize(mxfp4.dequantize(t), rule="even", ties="zero")
    assert (t.codes[0].item(), t.scales.item()) == (0x55, 127)
    assert (again.codes[0].item(), again.scales.item()) == (0x77, 126)


@settings(max_examples=300, deadline=None)
@given(BITS, st.sampled_from(ScaleRule))
def test_the_default_loses_nothing_twice_but_the_sign_of_zero(
    patterns: list[int], rule: ScaleRule
) -> None:
    values = mxfp4.dequantize(mxfp4.quantize(block(patterns), rule=rule))
    if rule in STABLE_RULES:
        again = mxfp4.dequantize(mxfp4.quantize(values, rule=rule))
        assert (again == values).all()
    assert values.isfinite().all()


@settings(max_examples=300, deadline=None)
@given(BITS, st.sampled_from(ScaleRule), st.sampled_from(TieRule))
def test_monotone(patterns: list[int], rule: ScaleRule, ties: TieRule) -> None:
    x = block(patterns).sort().values
    values = mxfp4.dequantize(mxfp4.quantize(x, rule=rule, ties=ties))
    assert (values.diff() >= 0).all()


@settings(max_examples=300, deadline=None)
@given(BITS, st.sampled_from(ScaleRule), st.sampled_from(TieRule))
def test_sign_symmetric(patterns: list[int], rule: ScaleRule, ties: TieRule) -> None:
    x = block(patterns)
    plus = mxfp4.quantize(x, rule=rule, ties=ties, zero_sign="source")
    minus = mxfp4.quantize(-x, rule=rule, ties=ties, zero_sign="source")
    assert minus.scales.equal(plus.scales)
    assert minus.codes.equal(plus.codes ^ 0x88)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=32, max_size=32),
    st.integers(-90, 90),
    st.sampled_from(ScaleRule),
)
def test_a_power_of_two_moves_the_scale_byte(
    values: list[float], power: int, rule: ScaleRule
) -> None:
    x = torch.tensor(values)
    x[x.abs() < 2.0**-20] = 0
    t = mxfp4.quantize(x, rule=rule)
    shifted = mxfp4.quantize(torch.ldexp(x, torch.tensor(power)), rule=rule)
    if not x.any():
        assert shifted.scales.item() == t.scales.item() == 0
        return
    assert shifted.scales.item() == t.scales.item() + power
    assert shifted.codes.equal(t.codes)


@settings(max_examples=300, deadline=None)
@given(BITS, st.sampled_from(ScaleRule), st.sampled_from(TieRule), st.sampled_from(ZeroSign))
def test_backends_agree(
    patterns: list[int], rule: ScaleRule, ties: TieRule, zero_sign: ZeroSign
) -> None:
    x = block(patterns)
    seen = []
    for backend in mxfp4.backends():
        if backend.available:
            with mxfp4.use_backend(backend.name):
                t = mxfp4.quantize(x, rule=rule, ties=ties, zero_sign=zero_sign)
            seen.append((t.codes.tolist(), t.scales.tolist()))
    assert len(seen) >= 2
    assert all(one == seen[0] for one in seen)
    assert seen[0][1][0] <= MAX_SCALE_BYTE
