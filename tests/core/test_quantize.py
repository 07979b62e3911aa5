"""Tensors in and out: shapes, axes, dtypes, errors; the public functions against the reference."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

import mxfp4
from mxfp4 import codec as reference
from mxfp4.errors import DtypeError, NonFiniteError, RecipeError, ShapeError
from mxfp4.kernels import codec as front
from mxfp4.tensor import MXTensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [((32,), 0), ((3, 64), -1), ((64, 3), 0), ((2, 96, 5), 1), ((2, 3, 4, 32), 3)]
EMPTY = [((0, 32), 1), ((3, 0), 1), ((0, 0), 0), ((32, 0), 0), ((2, 0, 64), -1)]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_same(left: MXTensor, right: MXTensor) -> None:
    assert left.codes.equal(right.codes)
    assert left.scales.equal(right.scales)
    assert (left.shape, left.axis) == (right.shape, right.axis)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES + EMPTY)
def test_shapes_and_axes(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    x = random(shape, dtype)
    fast, found = mxfp4.quantize_with_statistics(x, axis=axis)
    slow, wanted = reference.quantize_with_statistics(x, axis=axis)
    assert_same(fast, slow)
    assert found == wanted
    assert_same(mxfp4.quantize(x, axis=axis), slow)
    assert fast.nbytes * 32 == x.numel() * 17
    for out in DTYPES:
        values = mxfp4.dequantize(fast, dtype=out)
        assert values.shape == x.shape
        assert values.equal(reference.dequantize(slow, dtype=out))


def test_blocks_run_along_the_axis() -> None:
    x = random((2, 64, 5))
    along = mxfp4.quantize(x, axis=1)
    moved = mxfp4.quantize(x.movedim(1, -1).contiguous())
    assert along.codes.equal(moved.codes)
    assert mxfp4.dequantize(along).equal(mxfp4.dequantize(moved).movedim(-1, 1))


def test_views_give_the_bytes_of_their_copies() -> None:
    x = random((64, 128))
    for view in (x.T, x[::2], x[:, 32:96], x[:, ::4], x.expand(3, 64, 128)):
        assert_same(mxfp4.quantize(view), mxfp4.quantize(view.clone().contiguous()))


def test_large_tensors_are_shared_among_threads_without_a_trace() -> None:
    x = random((4099, 4096), torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        many, found = mxfp4.quantize_with_statistics(x)
        torch.set_num_threads(1)
        one, wanted = mxfp4.quantize_with_statistics(x)
    finally:
        torch.set_num_threads(before)
    assert_same(many, one)
    assert found == wanted
    assert mxfp4.dequantize(many).equal(mxfp4.dequantize(one))


@pytest.mark.parametrize("rule", ["even", "search"])
def test_chunks_on_other_devices(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of other devices without kernels, run on this one."""
    x = random((7, 96))
    wanted, statistics = front.quantize_with_statistics(x, rule=rule)
    monkeypatch.setattr(front, "_encode_array", front._encode_in_chunks)
    monkeypatch.setattr(front, "DEVICE_ELEMENTS", 200)
    seen, found = front.quantize_with_statistics(x, rule=rule)
    assert_same(seen, wanted)
    assert found == statistics
    x[5, 77] = torch.inf
    with pytest.raises(NonFiniteError) as caught:
        front.quantize(x)
    assert caught.value.index == (5, 77)


@pytest.mark.parametrize("quantize", [mxfp4.quantize, reference.quantize])
def test_non_finite_values_are_named_in_the_tensor_itself(quantize) -> None:  # type: ignore[no-untyped-def]
    x = random((3, 64, 5))
    x[2, 1, 0] = torch.nan
    x[0, 63, 4] = -torch.inf
    for axis, view in ((1, x), (-1, x.movedim(1, -1))):
        with pytest.raises(NonFiniteError) as caught:
            quantize(view, axis=axis)
        first = (~view.isfinite()).nonzero()[0]
        assert caught.value.index == tuple(first.tolist())
        assert caught.value.count == 2


@pytest.mark.parametrize("quantize", [mxfp4.quantize, reference.quantize])
def test_wrong_input(quantize) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShapeError, match="axis -1 has 2,900 elements, not a multiple of 32"):
        quantize(torch.zeros(4, 2900))
    with pytest.raises(ShapeError, match="no axis 2"):
        quantize(torch.zeros(4, 32), axis=2)
    with pytest.raises(ShapeError, match="no axis"):
        quantize(torch.tensor(1.0))
    with pytest.raises(DtypeError, match="float64"):
        quantize(torch.zeros(32, dtype=torch.float64))
    with pytest.raises(RecipeError, match="scale rule 'evne'"):
        quantize(torch.zeros(32), rule="evne")
    with pytest.raises(RecipeError, match="tie rule"):
        quantize(torch.zeros(32), ties="up")
    with pytest.raises(RecipeError, match="do nothing under the rule 'even'"):
        quantize(torch.zeros(32), importance=torch.ones(32))
    with pytest.raises(ShapeError, match=r"importance must be \[32\]"):
        quantize(torch.zeros(2, 32), rule="search", importance=torch.ones(2, 32))
    with pytest.raises(RecipeError, match="not negative"):
        quantize(torch.zeros(32), rule="search", importance=-torch.ones(32))


def test_importance_moves_the_scale() -> None:
    x = torch.full((1, 32), 0.25)
    x[0, 3] = 7.9
    all_alike = mxfp4.quantize(x, rule="search")
    importance = torch.ones(32)
    importance[3] = 0
    without = mxfp4.quantize(x, rule="search", importance=importance)
    assert all_alike.scales.item() == 128
    assert without.scales.item() == 126
    assert_same(without, reference.quantize(x, rule="search", importance=importance))


def test_dequantize_refuses_nan_scales_unless_asked() -> None:
    codes, scales = torch.zeros(2, 16, dtype=torch.uint8), torch.full((2, 1), 127).to(torch.uint8)
    scales[1, 0] = 255
    t = MXTensor(codes, scales, (2, 32))
    for dequantize in (mxfp4.dequantize, reference.dequantize):
        with pytest.raises(NonFiniteError, match=r"block \[1, 0\]"):
            dequantize(t)
        values = dequantize(t, nan_scale="nan")
        assert values[1].isnan().all()
        assert (values[0] == 0).all()
        with pytest.raises(DtypeError):
            dequantize(t, dtype=torch.int8)


def test_gradients_stay_behind() -> None:
    x = random((2, 32)).requires_grad_()
    assert not mxfp4.dequantize(mxfp4.quantize(x)).requires_grad


def test_mxtensor_checks_its_parts() -> None:
    codes, scales = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    t = MXTensor(codes, scales, (2, 32))
    assert (t.axis, t.numel(), t.nbytes) == (1, 64, 34)
    assert repr(t) == "MXTensor(shape=[2, 32], axis=1, device='cpu')"
    assert t.to("cpu").shape == (2, 32)
    assert pickle.loads(pickle.dumps(t)).codes.equal(codes)
    with pytest.raises(ShapeError, match=r"scales must be \[2, 2\], seen \[2, 1\]"):
        MXTensor(torch.zeros(2, 32, dtype=torch.uint8), scales, (2, 64))
    with pytest.raises(DtypeError, match="codes must be uint8"):
        MXTensor(codes.int(), scales, (2, 32))
    with pytest.raises(AttributeError):
        t.axis = 0  # type: ignore[misc]


def test_import_costs_no_torch() -> None:
    script = (
        "import sys, mxfp4; mxfp4.BLOCK_SIZE, mxfp4.ScaleRule, mxfp4.backends;"
        "assert 'torch' not in sys.modules;"
        "assert all(hasattr(mxfp4, name) for name in mxfp4.__all__)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
