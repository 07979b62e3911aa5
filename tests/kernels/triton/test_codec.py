"""The device codec gives the bytes of the reference, over all 16-bit sources and every tie."""

import itertools

import pytest
import torch

from mxfp4 import codec as reference
from mxfp4.errors import NonFiniteError
from mxfp4.kernels.triton import codec
from mxfp4.spec import CodecOptions, ScaleRule, TieRule, ZeroSign
from mxfp4.tensor import MXTensor

SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def assert_same_bytes(x, **choices):
    got, wanted = codec.quantize(x, **choices), reference.quantize(x, **choices)
    assert torch.equal(got.scales, wanted.scales)
    assert torch.equal(got.codes, wanted.codes)
    assert (got.shape, got.axis) == (wanted.shape, wanted.axis)


def tie_heavy(dtype):
    """Blocks whose elements lie on and right beside midpoints of every scale near 1."""
    quarter = torch.arange(-32, 32) / 4
    x = torch.cat([quarter, torch.nextafter(quarter, torch.tensor(9.0)), quarter * 0.5])
    rows = [torch.cat([x, x.roll(shift)]) for shift in range(0, 192, 29)]
    x = torch.stack(rows).reshape(-1, 32)
    exponents = torch.arange(len(x)).remainder(25) - 12
    return (x * torch.exp2(exponents.float())[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_source_value(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    neighbours = every[every.abs().double().argsort()]  # sizes alike in one block
    for x in (every, neighbours, every[torch.randperm(len(every))]):
        assert_same_bytes(x[: len(x) // 32 * 32].view(-1, 32))


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize(
    ("rule", "ties", "zero_sign"),
    [
        *itertools.product(ScaleRule, (TieRule.EVEN,), (ZeroSign.UNDERFLOW,)),
        *itertools.product((ScaleRule.EVEN,), TieRule, ZeroSign),
    ],
)
def test_every_choice_on_ties(rule, ties, zero_sign, dtype):
    assert_same_bytes(tie_heavy(dtype), rule=rule, ties=ties, zero_sign=zero_sign)


@pytest.mark.parametrize("rule", [ScaleRule.EVEN, ScaleRule.SEARCH])
def test_float32_over_the_whole_range(rule):
    exponents = torch.randint(-149, 127, (300, 1)).double()
    x = (torch.randn(300, 32).double() * torch.exp2(exponents)).float()
    x = torch.where(x.isfinite(), x, 1.0)
    x[7] = 0.0
    assert_same_bytes(x, rule=rule)


def test_other_axes_views_and_nothing():
    x = torch.randn(64, 6, 10)
    assert_same_bytes(x, axis=0)
    assert_same_bytes(x.to(torch.bfloat16).mT[..., :, :].transpose(0, 2), axis=2)
    assert_same_bytes(torch.empty(0, 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_blocks_are_marked_and_named(value):
    x = torch.randn(5, 96).to(torch.bfloat16)
    x[3, 40] = value
    with pytest.raises(NonFiniteError) as caught:
        codec.quantize(x)
    assert caught.value.index == (3, 40)
    _, scales = codec.encode(x, CodecOptions())
    assert (scales == 255).nonzero().tolist() == [[3, 1]]


@pytest.mark.parametrize("dtype", SOURCES)
def test_dequantize_every_byte_and_scale(dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    got = codec.decode(codes, scales, dtype)
    t = MXTensor(codes, scales, (256, 512))
    wanted = reference.dequantize(t, dtype=dtype, nan_scale="nan")
    assert torch.equal(got[255].isnan(), wanted[255].isnan())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(got[:255].view(bits), wanted[:255].view(bits))
    with pytest.raises(NonFiniteError):
        codec.dequantize(t)


def test_round_trip_keeps_codes():
    codes = torch.randint(0, 256, (40, 48), dtype=torch.uint8)
    scales = torch.randint(3, 250, (40, 3), dtype=torch.uint8)
    codes[:, ::16] |= 0x07  # a 6 in every block fixes its scale
    t = MXTensor(codes, scales, (40, 96))
    back = codec.quantize(
        codec.dequantize(t, dtype=torch.float32), rule=ScaleRule.FLOOR, zero_sign=ZeroSign.SOURCE
    )
    assert torch.equal(back.codes, codes)
    assert torch.equal(back.scales, scales)
