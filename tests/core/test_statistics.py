"""Statistics against float64, and exact merging."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import mxfp4
from mxfp4.kernels.rows import CodecOptions, encode_rows
from mxfp4.spec import E8M0_BIAS, ScaleRule, TieRule, ZeroSign
from mxfp4.statistics import TensorStatistics
from mxfp4.testing import block_zoo, float64_values, slow_decode


def random(dtype: str) -> NDArray[Any]:
    x = np.random.default_rng(5).standard_normal((300, 64), dtype=np.float32)
    x *= np.exp2(np.arange(300, dtype=np.float32) % 5)[:, None]
    if dtype == "F32":
        return x.view(np.uint32)
    return (
        x.astype(np.float16).view(np.uint16)
        if dtype == "F16"
        else (x.view(np.uint32) >> 16).astype("u2")
    )


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_against_float64(dtype: str, rule: ScaleRule) -> None:
    for bits in (random(dtype), block_zoo(dtype)[::23]):
        bits = np.ascontiguousarray(bits)
        options = CodecOptions(rule, TieRule.EVEN, ZeroSign.SOURCE)
        done = encode_rows(bits, dtype, options, statistics=True)
        found = done.statistics
        assert found is not None
        x = float64_values(bits, dtype)
        error = x - slow_decode(done.codes, done.scales)
        scale = np.exp2(np.repeat(done.scales.astype(np.int64), 32, axis=1) - E8M0_BIAS)
        code = np.stack([done.codes & 7, done.codes >> 4 & 7], -1).reshape(x.shape)
        assert found.elements == x.size
        assert found.blocks == x.size // 32
        assert found.zero_blocks == (x.reshape(-1, 32) == 0).all(axis=1).sum()
        assert found.clipped == (np.abs(x) > 6 * scale).sum()
        assert found.flushed == ((code == 0) & (x != 0)).sum()
        assert found.max_abs == np.abs(x).max()
        assert found.max_abs_error == np.abs(error).max()
        assert found.scale_histogram == tuple(np.bincount(done.scales.reshape(-1), minlength=256))
        # Per scale byte, where nothing can hide behind larger blocks. Cutting changes a magnitude
        # by less than a unit, or less than four for the signal.
        for byte in np.unique(done.scales):
            rows = np.repeat(done.scales == byte, 32, axis=1)
            for sums, values, unit in ((found.signal, x, 2**-10), (found.error, error, 2**-12)):
                scaled = np.abs(values[rows] / scale[rows])
                wanted = float((scaled**2).sum())
                bound = float((2 * scaled * unit + unit**2).sum())
                assert abs(sums[byte] * 2.0**-24 - wanted) <= bound


def weights(kind: str) -> NDArray[np.uint16]:
    rng = np.random.default_rng(11)
    shape = (4096, 512)
    x = {
        "normal": lambda: rng.standard_normal(shape),
        "Laplace": lambda: rng.laplace(size=shape),
        "Student": lambda: rng.standard_t(4, size=shape),
        "uniform": lambda: rng.uniform(-1, 1, size=shape),
    }[kind]()
    bits = (0.02 * x).astype(np.float32).view(np.uint32)
    return (bits >> np.uint32(16)).astype(np.uint16)


def true_relative_l2(bits: NDArray[np.uint16]) -> tuple[float, float]:
    """Found, and computed in float64."""
    done = encode_rows(bits, "BF16", statistics=True)
    assert done.statistics is not None
    x = float64_values(bits, "BF16")
    error = x - slow_decode(done.codes, done.scales)
    return done.statistics.relative_l2, math.sqrt((error**2).sum() / (x**2).sum())


@pytest.mark.parametrize("kind", ["normal", "Laplace", "Student", "uniform"])
def test_cutting_does_not_matter_in_weights(kind: str) -> None:
    found, wanted = true_relative_l2(weights(kind))
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("share", np.exp2(np.arange(-16, 0)))
def test_cutting_is_bounded_where_one_value_dwarfs_its_block(share: float) -> None:
    x = np.random.default_rng(2).standard_normal((256, 32), dtype=np.float32) * np.float32(share)
    x[:, 3] = 4
    found, wanted = true_relative_l2((x.view(np.uint32) >> 16).astype(np.uint16))
    assert abs(found - wanted) < 2**-11


def test_ratios() -> None:
    bits = random("BF16")
    done = encode_rows(bits, "BF16", statistics=True)
    found = done.statistics
    assert found is not None
    x = float64_values(bits, "BF16")
    error = x - slow_decode(done.codes, done.scales)
    relative = math.sqrt((error**2).sum() / (x**2).sum())
    assert found.relative_l2 == pytest.approx(relative, rel=1e-6)
    assert found.sqnr_db == pytest.approx(-20 * math.log10(relative), rel=1e-6)
    assert found.sum_squares == pytest.approx((x**2).sum(), rel=1e-6)
    assert found.sum_squared_error == pytest.approx((error**2).sum(), rel=1e-6)
    assert found.clipped_share == found.clipped / x.size
    assert found.flushed_share == found.flushed / x.size
    assert 18.5 < found.sqnr_db < 19.5


def test_summary_is_json() -> None:
    _, found = mxfp4.quantize_with_statistics(torch.tensor([6.0] * 32 + [0.0] * 32))
    summary = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert summary["scale_histogram"] == {"0": 1, "127": 1}
    assert summary["sqnr_db"] is None
    assert summary["relative_l2"] == 0
    assert summary["zero_blocks"] == 1
    assert summary["max_abs"] == 6


def test_nothing_overflows_at_the_ends_of_the_range() -> None:
    for value in (3.3e38, 1e-40):
        x = torch.full((32,), value)
        x[1:9] /= 3
        _, found = mxfp4.quantize_with_statistics(x)
        assert 0 < found.relative_l2 <= 1
        assert math.isfinite(found.sqnr_db)


def test_merging_is_exact_and_does_not_depend_on_order() -> None:
    bits = np.ascontiguousarray(block_zoo("F32")[::11])
    whole = encode_rows(bits, "F32", statistics=True).statistics
    cuts = [0, 1, 7, 500, 501, 3000, len(bits)]
    parts = [encode_rows(bits[a:b], "F32", statistics=True).statistics for a, b in pairwise(cuts)]
    total = TensorStatistics()
    for i in (3, 0, 5, 1, 4, 2):
        part = parts[i]
        assert part is not None
        total += part
    assert total == whole
    assert total + TensorStatistics() == whole
