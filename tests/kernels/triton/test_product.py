"""The dense product against float64, at the floor that rounding the output sets."""

from dataclasses import replace

import pytest
import torch

from mxfp4.errors import BackendUnavailableError, DtypeError, ShapeError
from mxfp4.kernels.triton import configs, device, product
from mxfp4.kernels.triton.configs import Regime, TileConfig
from mxfp4.kernels.triton.layout import pack
from mxfp4.kernels.triton.product import matmul

DTYPES = (torch.bfloat16, torch.float16)
SMALL = TileConfig(16, 32, 4, 1, decoder="plain")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [
        (1, 1, 32),
        (2, 31, 96),
        (3, 33, 160),
        (16, 258, 128),
        (5, 320, 32),
        (17, 31, 256),
        (1, 20, 2880),
    ],
)
def test_shapes(
    tokens, rows, columns, dtype, make_weight, activations, exact, assert_at_floor, poison,
    poisoned_memory,
):  # fmt: skip
    w, x = make_weight(rows, columns), activations(tokens, columns, dtype)
    bias = torch.randn(rows).to(dtype)
    y = matmul(x, poison(pack(w, dtype=dtype)), bias=bias)
    assert y.dtype == dtype
    assert_at_floor(y, exact(x, w, bias))


@pytest.mark.parametrize("columns", range(32, 513, 96))
def test_every_rest_of_k(columns, make_weight, activations, exact, assert_at_floor):
    w, x = make_weight(8, columns), activations(3, columns, torch.bfloat16)
    # NaN right behind the last row: a read beyond it would show.
    buffer = torch.full((4, columns), torch.nan, dtype=torch.bfloat16)
    buffer[:3] = x
    assert_at_floor(matmul(buffer[:3], pack(w), config=SMALL), exact(x, w))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_orders_of_the_operands(swap, dtype, make_weight, activations, exact, assert_at_floor):
    w, x = make_weight(40, 160), activations(9, 160, dtype)
    y = matmul(x, pack(w, dtype=dtype), config=replace(SMALL, swap=swap))
    assert_at_floor(y, exact(x, w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [16, 32])
@pytest.mark.parametrize(("tokens", "columns"), [(131, 96), (70, 160), (128, 32), (3, 256)])
def test_large_tiles_repeat_rows_instead_of_masking(
    tokens, columns, depth, dtype, make_weight, activations, exact, assert_at_floor, poisoned_memory
):
    w, x = make_weight(40, columns), activations(tokens, columns, dtype)
    # NaN behind the last row, and behind every row where the last chunk ends in the padding.
    buffer = torch.full((tokens + 130, columns + 128), torch.nan, dtype=dtype)
    buffer[:tokens, :columns] = x
    config = TileConfig(128, 64, 4, 1, decoder="plain", depth=depth)
    y = matmul(buffer[:tokens, :columns], pack(w, dtype=dtype), config=config)
    assert_at_floor(y, exact(x, w))


@pytest.mark.parametrize("tokens", [5, 17])
def test_depth_of_small_tiles(tokens, make_weight, activations, exact, assert_at_floor):
    w, x = make_weight(40, 352), activations(tokens, 352, torch.bfloat16)
    packed = pack(w)
    y = matmul(x, packed, config=replace(SMALL, depth=16))
    assert_at_floor(y, exact(x, w))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("dtype", "octaves"), [(torch.bfloat16, 85), (torch.float16, 40)])
def test_scales_too_wide_to_fold(swap, dtype, octaves, exact, make_weight, assert_at_floor):
    w = make_weight(8, 256, octaves=octaves, middle=-40)
    packed = pack(w, dtype=dtype)
    assert not packed.folded
    x = torch.randn(4, 256).to(dtype) * 2.0**-10
    assert_at_floor(matmul(x, packed, config=replace(SMALL, swap=swap)), exact(x, w))


@pytest.mark.parametrize(
    ("dtype", "bytes_"), [(torch.bfloat16, (0, 60, 120, 200, 237)), (torch.float16, (100, 118))]
)
def test_one_hot_activations_return_the_weight(dtype, bytes_, all_codes, exact):
    for first in bytes_:
        w = all_codes(first)
        x = torch.zeros(16, 512)
        columns = torch.randperm(512)[:16]
        x[torch.arange(16), columns] = 1
        y = matmul(x.to(dtype), pack(w, dtype=dtype), config=SMALL)
        assert torch.equal(y.double(), exact(x, w).to(dtype).double())


def test_split_k_sums_every_part_once_and_in_order(
    make_weight, activations, exact, assert_at_floor
):
    w, x = make_weight(33, 1152), activations(5, 1152, torch.bfloat16)
    config = replace(SMALL, programs_per_core=64)
    assert configs.split_of(config, 33, 9, 1) == 2
    packed = pack(w)
    y = matmul(x, packed, config=config)
    assert_at_floor(y, exact(x, w))
    assert torch.equal(y, matmul(x, packed, config=config))


def test_split_depends_on_the_weight_and_the_device_alone():
    config = TileConfig(16, 128, 4, 4, programs_per_core=4)
    assert configs.split_of(config, 28672, 64, 132) == 2
    assert configs.split_of(config, 4096, 56, 132) == 8
    assert configs.split_of(config, 128, 4, 132) == 1


def test_rows_do_not_depend_on_the_batch(make_weight, activations):
    packed = pack(make_weight(40, 160))
    x = activations(16, 160, torch.bfloat16)
    together = matmul(x, packed)
    for tokens in (1, 2, 7, 15):
        assert torch.equal(matmul(x[:tokens], packed), together[:tokens])
    assert torch.equal(matmul(x[11:12], packed), together[11:12])


@pytest.mark.parametrize(
    ("dtype", "octaves"), [(torch.bfloat16, 3), (torch.bfloat16, 85), (torch.float16, 3)]
)
def test_hybrid_goes_through_a_bounded_scratch(
    dtype, octaves, monkeypatch, make_weight, exact, assert_at_floor
):
    monkeypatch.setattr(product, "HYBRID_TOKENS", 20)
    w = make_weight(258, 96, octaves=octaves, middle=-40 if octaves > 3 else 0)
    x, bias = torch.randn(21, 96).to(dtype), torch.randn(258).to(dtype)
    sizes = []
    expand = product.expand
    monkeypatch.setattr(product, "expand", lambda *a: (sizes.append(a[3].nbytes), expand(*a))[1])
    limit = 130 * 96 * 2
    packed = pack(w, dtype=dtype)
    y = matmul(x, packed, bias=bias, scratch_bytes=limit)
    assert len(sizes) == 3
    assert max(sizes) <= limit
    # The vendor's product rounds its sum before or after the bias, as it likes.
    assert_at_floor(y, exact(x, w, bias), floors=1.5)
    assert_at_floor(matmul(x, packed, scratch_bytes=limit), exact(x, w))
    sizes.clear()
    matmul(x, packed, scratch_bytes=0, config=SMALL)
    assert not sizes


def test_hybrid_is_left_out_where_float16_cannot_hold_the_weight(monkeypatch, make_weight):
    monkeypatch.setattr(product, "HYBRID_TOKENS", 1)
    monkeypatch.setattr(product, "expand", None)
    packed = pack(make_weight(8, 64, middle=-30), dtype=torch.float16)
    assert packed.folded
    assert not packed.expandable
    assert matmul(torch.ones(1, 64).half(), packed).isfinite().all()


def test_views_and_leading_axes(make_weight, exact, assert_at_floor):
    w = make_weight(33, 64)
    packed = pack(w)
    x = torch.randn(2, 3, 128).to(torch.bfloat16)[..., 64:]
    assert_at_floor(matmul(x, packed), exact(x, w))
    transposed = torch.randn(64, 5).to(torch.bfloat16).T
    assert_at_floor(matmul(transposed, packed), exact(transposed, w))
    assert matmul(x[:0], packed).shape == (0, 3, 33)


def test_every_regime_has_a_tile_everywhere():
    for table in configs.TABLES.values():
        assert set(table) == set(Regime)
    assert [configs.regime_of(m) for m in (1, 16, 17, 64, 65, 129)] == [
        Regime.DECODE, Regime.DECODE, Regime.SMALL, Regime.MEDIUM, Regime.LARGE, Regime.PREFILL
    ]  # fmt: skip


def test_wrong_input_is_refused(make_weight):
    packed = pack(make_weight(8, 64))
    x = torch.randn(2, 64)
    with pytest.raises(DtypeError, match="packed for"):
        matmul(x, packed)
    with pytest.raises(ShapeError, match=r"\[\.\.\., 64\]"):
        matmul(x.bfloat16()[:, :32], packed)
    with pytest.raises(ShapeError, match="bias must be"):
        matmul(x.bfloat16(), packed, bias=torch.zeros(9))
    with pytest.raises(ShapeError, match="grouped_matmul"):
        matmul(x.bfloat16(), pack(make_weight(2, 8, 64)))


def test_releases_that_miscompile_are_refused():
    with pytest.raises(BackendUnavailableError, match="miscompiles"):
        device.check_release("sm_100", "3.6.0")
    device.check_release("sm_100", "3.9.0")
    device.check_release("sm_90", "3.6.0")
