"""Rounding and scale search against the core codec and plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp4 import dequantize, quantize
from mxfp4.calibration.rounding import (
    nearest_elements,
    round_even,
    round_with,
    search_scales,
)
from mxfp4.elements import decode_elements, nearest_magnitudes
from mxfp4.spec import E2M1_MIDPOINTS, E2M1_VALUES, TieRule


def test_nearest_elements_are_the_codec_s():
    grid = torch.cat([torch.tensor(E2M1_VALUES), torch.tensor(E2M1_MIDPOINTS)])
    near = torch.cat([grid, torch.nextafter(grid, grid + 1), torch.nextafter(grid, grid - 1)])
    x = torch.cat([near, -near, torch.linspace(-9, 9, 7001), torch.tensor([1e30, -1e30])])
    codec = decode_elements(nearest_magnitudes(x.abs(), TieRule.EVEN))
    assert torch.equal(nearest_elements(x), torch.copysign(codec, x))


def test_even_is_what_a_conversion_writes():
    weight = torch.randn(2, 8, 96, generator=torch.Generator().manual_seed(0))
    packed, wanted = round_even(weight).pack(), quantize(weight)
    assert torch.equal(packed.codes, wanted.codes)
    assert torch.equal(packed.scales, wanted.scales)
    assert torch.equal(dequantize(packed, dtype=torch.float32), round_even(weight).values())


def weighted_error(weight, scales, importance):
    """Squared error of each block under given scale bytes, by a loop in float64."""
    rows, columns = weight.shape
    values = np.array(E2M1_VALUES)
    errors = np.zeros((rows, columns // 32))
    for row in range(rows):
        for column in range(columns):
            block = column // 32
            scale = 2.0 ** (int(scales[row, block]) - 127)
            distance = np.abs(abs(float(weight[row, column])) - values * scale).min()
            errors[row, block] += float(importance[column]) * distance**2
    return errors


@pytest.mark.parametrize("seed", range(3))
def test_search_never_loses_to_even_on_any_block_and_finds_the_best_of_three(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 128, generator=generator) * torch.logspace(-3, 1, 128)
    importance = torch.rand(128, generator=generator) ** 6
    found = search_scales(weight[None], importance[None])[0]
    error = weighted_error(weight, found, importance)
    even = weighted_error(weight, quantize(weight).scales, importance)
    assert (error <= even * (1 + 1e-6)).all()
    assert (error < even * 0.999).any()
    middle = quantize(weight, rule="floor").scales.int()
    for step in (-1, 0, 1):
        assert (error <= weighted_error(weight, middle + step, importance) * (1 + 1e-6)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-30, 1e30), st.sampled_from([0.0, 1.0, 1e20]))
def test_search_survives_any_importance(seed, size, importance):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, 2, 64, generator=generator) * size
    weights = torch.rand(1, 64, generator=generator) * importance
    scales = search_scales(weight, weights)
    assert round_with(weight, scales).values().isfinite().all()


def test_all_zero_importance_counts_columns_equally():
    weight = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1))
    zero, one = torch.zeros(1, 64), torch.ones(1, 64)
    assert torch.equal(search_scales(weight, zero), search_scales(weight, one))
