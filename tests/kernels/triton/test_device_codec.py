"""What the front of the codec does with tensors on other devices, tried on this one.

The kernels run in the interpreter; the front is told to treat tensors here like those of a GPU.
"""

import itertools
import logging

import pytest
import torch

from mxfp4 import codec as reference
from mxfp4.errors import NonFiniteError
from mxfp4.kernels import codec as front
from mxfp4.kernels import device_codec
from mxfp4.kernels.backends import use_backend
from mxfp4.kernels.triton import codec as kernels
from mxfp4.spec import ScaleRule, TieRule, ZeroSign
from mxfp4.tensor import MXTensor

CPU = torch.device("cpu")


@pytest.fixture
def like_a_gpu(monkeypatch):
    """The front sends every tensor down the path of devices; says which kernels ran."""
    ran = []
    for name in ("encode", "decode"):
        original = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, f=original, name=name: (ran.append(name), f(*a))[1]
        )
    monkeypatch.setattr(front, "_encode_array", front._encode_on_device)
    return ran


def assert_same(seen, wanted):
    assert torch.equal(seen.codes, wanted.codes)
    assert torch.equal(seen.scales, wanted.scales)
    assert (seen.shape, seen.axis) == (wanted.shape, wanted.axis)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rule", "ties", "zero_sign"),
    [
        *itertools.product(ScaleRule, (TieRule.EVEN,), (ZeroSign.UNDERFLOW,)),
        *itertools.product((ScaleRule.SEARCH,), TieRule, ZeroSign),
    ],
)
def test_kernels_give_the_bytes_of_the_reference(rule, ties, zero_sign, dtype, like_a_gpu):
    # Quarters up to 8 are ties of E2M1 in many blocks; small ones underflow, of both signs.
    x = torch.randint(-32, 33, (24, 96)) / 4 * torch.exp2(torch.randint(-9, 3, (24, 96)))
    x[:, ::11] *= 2.0**-20
    x[3], x[4, ::2] = 0.0, -0.0
    choices = {"rule": rule, "ties": ties, "zero_sign": zero_sign}
    seen, statistics = front.quantize_with_statistics(x.to(dtype), **choices)
    wanted, measured = reference.quantize_with_statistics(x.to(dtype), **choices)
    assert_same(seen, wanted)
    assert statistics == measured
    assert like_a_gpu == ["encode"]


def test_statistics_are_measured_in_parts(like_a_gpu, monkeypatch):
    x = torch.randn(7, 64)
    wanted = reference.quantize_with_statistics(x)[1]
    monkeypatch.setattr(front, "DEVICE_ELEMENTS", 128)
    assert front.quantize_with_statistics(x)[1] == wanted


def test_axes_are_kept(like_a_gpu):
    x = torch.randn(64, 3, 5).to(torch.bfloat16)
    seen = front.quantize(x, axis=0)
    assert_same(seen, reference.quantize(x, axis=0))
    back = front._decode_on_device(seen, torch.float32, "raise")
    assert torch.equal(back, reference.dequantize(seen, dtype=torch.float32))
    assert like_a_gpu == ["encode", "decode"]


def test_what_is_not_finite_is_named(like_a_gpu):
    x = torch.randn(3, 64, 5)
    x[2, 40, 1] = torch.inf
    with pytest.raises(NonFiniteError) as caught:
        front.quantize(x, axis=1)
    assert caught.value.index == (2, 40, 1)
    t = MXTensor(torch.zeros(1, 32).byte(), torch.tensor([[127, 255]]).byte(), (1, 64))
    with pytest.raises(NonFiniteError) as caught:
        front._decode_on_device(t, torch.bfloat16, "raise")
    assert caught.value.index == (0, 1)
    assert front._decode_on_device(t, torch.bfloat16, "nan").isnan().sum() == 32


def test_importance_takes_the_reference(like_a_gpu):
    x, importance = torch.randn(6, 64), torch.rand(64)
    seen = front.quantize(x, rule="search", importance=importance)
    assert_same(seen, reference.quantize(x, rule="search", importance=importance))
    assert not like_a_gpu
    chosen = device_codec.device_codec(CPU, weighted=True)
    assert (chosen.name, chosen.explanation) == (
        "reference",
        "the kernels take no importance weights",
    )


def test_the_reference_can_be_forced(like_a_gpu):
    x = torch.randn(2, 32)
    with use_backend("reference"):
        seen = front.quantize(x)
        assert device_codec.device_codec(CPU).explanation == "forced by use_backend"
    assert_same(seen, reference.quantize(x))
    assert not like_a_gpu
    assert device_codec.device_codec(CPU).name == "triton"


def test_a_device_without_kernels_is_said_once(like_a_gpu, caplog, monkeypatch):
    from mxfp4.kernels.triton import device

    monkeypatch.setattr(device, "supports", lambda _: False)
    device_codec._obstacle.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(front.quantize(torch.ones(2, 32)), reference.quantize(torch.ones(2, 32)))
    assert not like_a_gpu
    assert [r.message for r in caplog.records] == [
        "quantizing on cpu in torch, which is slower: there are no kernels for cpu"
    ]
    device_codec._obstacle.cache_clear()
