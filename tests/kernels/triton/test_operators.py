"""The operators in PyTorch's own checks, the modules on top of them, and the public functions."""

import pytest
import torch

import mxfp4
from mxfp4 import codec
from mxfp4.errors import (
    BackendUnavailableError,
    DtypeError,
    ShapeError,
    TensorNotFoundError,
    UnsupportedFormatError,
)
from mxfp4.kernels import ops, reference
from mxfp4.kernels.activations import Activation, ActivationOptions
from mxfp4.kernels.triton.grouped import fused_experts
from mxfp4.kernels.triton.layout import interleave, pack, unpack
from mxfp4.tensor import MXTensor

# Compilers of parts of torch warn about their own future when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def dense(make_weight):
    w = make_weight(33, 96)
    return w, mxfp4.pack(w)


def bank(make_weight, dtype=torch.bfloat16):
    gate, up, down = make_weight(3, 32, 64), make_weight(3, 32, 64), make_weight(3, 64, 32)
    return (gate, up, down), pack(interleave(gate, up), dtype=dtype), pack(down, dtype=dtype)


def arguments_of(name, dense, make_weight):
    packed = dense[1]
    x = torch.randn(5, 96).bfloat16()
    if name == "linear":
        x.requires_grad_(True)
        bias = torch.randn(33).bfloat16().requires_grad_(True)
        return x, ops.parts_of(packed), *ops.facts_of(packed), bias, 0
    if name == "linear_input_grad":
        return torch.randn(5, 33).bfloat16(), ops.parts_of(packed), *ops.facts_of(packed)
    if name == "grouped":
        _, w_in, _ = bank(make_weight)
        ends = torch.tensor([2, 2, 5]).int()
        x = torch.randn(5, 64).bfloat16()
        return x, ops.parts_of(w_in), *ops.facts_of(w_in), ends, None
    if name == "experts":
        _, w_in, w_out = bank(make_weight)
        ids = torch.tensor([[0, 2], [1, -1]])
        x, weights = torch.randn(2, 64).bfloat16(), torch.rand(2, 2)
        parts = ops.parts_of(w_in), ops.parts_of(w_out)
        flags = [True] * 4
        return x, *parts, 64, 32, flags, ids, weights, None, None, "swiglu", 7.0, 1.702
    if name == "quantize":
        return x, "even", "even", "underflow"
    return dense[0].codes, dense[0].scales, torch.bfloat16


NAMES = ("linear", "linear_input_grad", "grouped", "experts", "quantize", "dequantize")


@pytest.mark.parametrize("name", NAMES)
def test_operators_keep_the_rules_of_torch(name, dense, make_weight):
    found = torch.library.opcheck(getattr(ops, name), arguments_of(name, dense, make_weight))
    assert set(found.values()) == {"SUCCESS"}
    assert len(found) >= 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph_for_any_batch(backend, dense):
    _, packed = dense
    compiled = torch.compile(
        lambda x: torch.relu(mxfp4.matmul(x, packed)) * 2,
        backend=backend,
        fullgraph=True,
        dynamic=True,
    )
    for tokens in (5, 3):
        x = torch.randn(tokens, 96).bfloat16()
        assert torch.equal(compiled(x), torch.relu(mxfp4.matmul(x, packed)) * 2)


def test_gradients_of_x_and_bias(dense):
    w, packed = dense
    x = torch.randn(2, 3, 96).bfloat16().requires_grad_(True)
    bias = torch.randn(33).bfloat16().requires_grad_(True)
    grad = torch.randn(2, 3, 33).bfloat16()
    mxfp4.matmul(x, packed, bias=bias).backward(grad)
    assert x.grad is not None
    assert bias.grad is not None
    values = codec.dequantize(w, dtype=torch.float32).double()
    wanted = grad.double() @ values
    error = (x.grad.double() - wanted).norm() / wanted.norm()
    assert error < 2**-8
    torch.testing.assert_close(bias.grad.float(), grad.float().sum((0, 1)), rtol=2**-7, atol=2**-7)


def test_all_ways_to_the_product_agree(dense, exact, assert_at_floor):
    w, packed = dense
    x, bias = torch.randn(4, 96).bfloat16(), torch.randn(33).bfloat16()
    for weight, backend in ((w, None), (packed, None), (packed, "triton"), (packed, "reference")):
        y = mxfp4.matmul(x, weight, bias=bias, backend=backend)
        assert_at_floor(y, exact(x, w, bias))


def test_grouped_product_by_every_backend(make_weight):
    (gate, up, _), w_in, _ = bank(make_weight)
    x, ends = torch.randn(6, 64).bfloat16(), torch.tensor([4, 4, 6]).int()
    wanted = mxfp4.grouped_matmul(x, interleave(gate, up), ends)
    for backend in (None, "reference", "triton"):
        y = mxfp4.grouped_matmul(x, w_in, ends, backend=backend)
        torch.testing.assert_close(y, wanted, rtol=2**-7, atol=2**-7)


def test_products_refuse_what_they_cannot_do(dense, make_weight):
    w, packed = dense
    x = torch.randn(4, 96).bfloat16()
    with pytest.raises(BackendUnavailableError, match="packed weight"):
        mxfp4.matmul(x, w, backend="triton")
    with pytest.raises(BackendUnavailableError, match="no backend"):
        mxfp4.matmul(x, w, backend="fast")
    with pytest.raises(DtypeError, match="packed for"):
        mxfp4.matmul(x.half(), packed)
    with pytest.raises(ShapeError, match=r"\[N, K\]"):
        mxfp4.matmul(x, pack(make_weight(2, 8, 96)))


def test_linear_module(dense, exact, assert_at_floor):
    w, _ = dense
    bias = torch.randn(33)
    module = mxfp4.MXFP4Linear.from_mxtensor(w, bias)
    x = torch.randn(4, 96).bfloat16()
    y = module(x)
    assert_at_floor(y, exact(x, w, bias.bfloat16()))
    assert "in_features=96" in repr(module)
    assert torch.equal(module.to_mxtensor().codes, w.codes)
    # Casting a model must not touch the weight.
    assert torch.equal(module.half().bfloat16().to_mxtensor().scales, w.scales)
    other = mxfp4.MXFP4Linear.from_mxtensor(MXTensor(w.codes ^ 1, w.scales, w.shape), bias)
    other.load_state_dict(mxfp4.MXFP4Linear.from_mxtensor(w, bias).state_dict())
    assert torch.equal(other(x), y)


@pytest.mark.parametrize("kind", [Activation.SWIGLU, Activation.SWIGLU_OAI])
def test_experts_module_and_kernels_agree(kind, make_weight):
    (gate, up, down), w_in, w_out = bank(make_weight)
    options = ActivationOptions(kind)
    module = mxfp4.MXFP4Experts.from_mxtensors(gate, up, down, activation=options)
    x = torch.randn(7, 64).bfloat16()
    ids, weights = torch.randint(-1, 3, (7, 2)), torch.rand(7, 2)
    y = module(x, ids, weights)
    near = fused_experts(x, w_in, w_out, ids, weights, activation=options)
    assert (y - near).norm() / y.norm() < 2**-7
    plain = reference.fused_experts(x, interleave(gate, up), down, ids, weights, activation=options)
    assert torch.equal(y, plain)
    with pytest.raises(ShapeError, match="w_out"):
        mxfp4.MXFP4Experts(w_in, w_in)


def test_load_linear(builder, tmp_path, make_weight):
    w = make_weight(40, 64)
    folder = builder.write(
        tmp_path / "checkpoint",
        [
            {
                "model.up.weight_packed": ("U8", w.codes.numpy()),
                "model.up.bias": ("F32", torch.arange(40).float().numpy()),
                "model.norm.weight": ("BF16", builder.bf16([1.0])),
            },
            {"model.up.weight_scale": ("U8", w.scales.numpy())},
        ],
        {"model_type": "test"},
    )
    module = mxfp4.load_linear(folder, "model.up")
    assert torch.equal(module.to_mxtensor().codes, w.codes)
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(module(x), mxfp4.matmul(x, pack(w), bias=torch.arange(40).bfloat16()))
    with pytest.raises(TensorNotFoundError, match=r"model\.up"):
        mxfp4.load_linear(folder, "model.upp")
    with pytest.raises(UnsupportedFormatError, match="BF16"):
        mxfp4.load_linear(folder, "model.norm")


def test_packing_is_public(dense):
    w, packed = dense
    assert torch.equal(mxfp4.unpack(packed).codes, w.codes)
    assert unpack is mxfp4.unpack
    assert isinstance(packed, mxfp4.PackedWeight)
