"""Kernels run in Triton's interpreter here, so the environment is set before triton is imported."""

import os
import sys
import warnings
from dataclasses import replace

os.environ.setdefault("TRITON_INTERPRET", "1")
if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise RuntimeError(
        "triton was imported before tests/kernels/triton/conftest.py could choose the interpreter; "
        "run with TRITON_INTERPRET=1"
    )

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from mxfp4.codec import dequantize, quantize
from mxfp4.tensor import MXTensor

FLOOR_SHARE = 1.05
"""How far above the unavoidable rounding of the output an error may be."""


@pytest.fixture(autouse=True)
def deterministic_seed():
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def quiet_interpreter():
    # The interpreter casts by numpy, which reports the overflow and NaN that tests provoke.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(overflow|invalid value) encountered")
        # Triton 3.6 reads scalars from arrays in a way that numpy is about to forbid.
        warnings.filterwarnings("ignore", message="Conversion of an array with ndim > 0")
        yield


@pytest.fixture(scope="session")
def make_weight():
    """A quantized [.., N, K] whose block scales spread over `octaves` to each side of `middle`."""

    def make(*shape, octaves=3, middle=0, zero_blocks=True):
        blocks = shape[-1] // 32
        exponents = torch.randint(-octaves, octaves + 1, (*shape[:-1], blocks)) + middle
        w = torch.randn(*shape[:-1], blocks, 32) * torch.exp2(exponents.double())[..., None]
        if zero_blocks and blocks > 1:
            w[..., 0, 1, :] = 0.0
        return quantize(w.float().flatten(-2))

    return make


@pytest.fixture(scope="session")
def all_codes():
    """A weight [16, 512] in which every code meets every one of the scale bytes given."""

    def make(first_byte, count=16):
        code = torch.arange(16, dtype=torch.uint8).repeat(32, 1).T.contiguous().repeat(1, count)
        packed = code[:, 0::2] | (code[:, 1::2] << 4)
        byte = torch.arange(first_byte, first_byte + count, dtype=torch.uint8).repeat(16, 1)
        return MXTensor(packed, byte, (16, 32 * count))

    return make


@pytest.fixture(scope="session")
def activations():
    """x [M, K] with outliers: normal, three times normal, and some of size 2^10."""

    def make(tokens, columns, dtype):
        x = torch.randn(tokens, columns)
        x[:, ::7] *= 3
        if dtype == torch.bfloat16:
            x[:, 5] *= 2.0**10
        return x.to(dtype)

    return make


@pytest.fixture(scope="session")
def exact():
    """y = x w^T + bias in float64, from the decoded weight."""

    def compute(x, w, bias=None):
        y = x.double() @ dequantize(w, dtype=torch.float32).double().mT
        return y if bias is None else y + bias.double()

    return compute


@pytest.fixture(scope="session")
def assert_at_floor():
    """Relative Frobenius error within 1.05 of what rounding the exact result to the dtype costs."""

    def check(y, wanted, floors=1.0):
        assert not y.isnan().any(), "elements were not written, or padding leaked in"
        floor = (wanted.to(y.dtype).double() - wanted).norm()
        error = (y.double() - wanted).norm()
        allowed = FLOOR_SHARE * floors * floor + 1e-7 * wanted.norm()
        assert error <= allowed, f"error {error:.3e}, floor {floor:.3e}"

    return check


@pytest.fixture(scope="session")
def poison():
    """The same packed weight inside buffers whose other bytes are 0xFF."""

    def surround(tensor):
        buffer = torch.full((tensor.numel() + 512,), -1, dtype=tensor.dtype)
        inner = buffer[256 : 256 + tensor.numel()].view(tensor.shape)
        inner.copy_(tensor)
        return inner

    def make(w):
        return replace(w, words=surround(w.words), scales=surround(w.scales))

    return make


@pytest.fixture
def poisoned_memory(monkeypatch):
    """`new_empty` filled with NaN, so that an element nobody writes shows."""
    original = torch.Tensor.new_empty

    def filled(self, *arguments, **keywords):
        found = original(self, *arguments, **keywords)
        return found.fill_(float("nan")) if found.is_floating_point() else found.fill_(-1)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
