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
from mxfp4.kernels.triton import product
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
        x = torch.randn(5, 64).bfloat16().requires_grad_(True)
        bias = torch.randn(3, 64).bfloat16().requires_grad_(True)
        return x, ops.parts_of(w_in), *ops.facts_of(w_in), ends, bias
    if name == "grouped_input_grad":
        _, w_in, _ = bank(make_weight)
        grad, ends = torch.randn(5, 64).bfloat16(), torch.tensor([2, 2, 4]).int()
        return grad, ops.parts_of(w_in), *ops.facts_of(w_in), ends
    if name == "experts":
        _, w_in, w_out = bank(make_weight)
        ids = torch.tensor([[0, 2], [1, -1]])
        x, weights = torch.randn(2, 64).bfloat16(), torch.rand(2, 2)
        x.requires_grad_(True)
        weights.requires_grad_(True)
        bias_in, bias_out = (torch.randn(3, 64).bfloat16().requires_grad_(True) for _ in range(2))
        parts = ops.parts_of(w_in), ops.parts_of(w_out)
        flags = [True] * 4
        return x, *parts, 64, 32, flags, ids, weights, bias_in, bias_out, "swiglu", 7.0, 1.702
    if name == "quantize":
        return x, "even", "even", "underflow"
    return dense[0].codes, dense[0].scales, torch.bfloat16


NAMES = (
    "linear", "linear_input_grad", "grouped", "grouped_input_grad", "experts", "quantize",
    "dequantize",
)  # fmt: skip


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


def relative(found, wanted):
    assert found.shape == wanted.shape
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_gradients_of_a_grouped_product(make_weight):
    w = make_weight(3, 33, 64)
    x = torch.randn(6, 64).bfloat16().requires_grad_(True)
    bias = torch.randn(3, 33).bfloat16().requires_grad_(True)
    ends, grad = torch.tensor([4, 4, 5]).int(), torch.randn(6, 33).bfloat16()
    mxfp4.grouped_matmul(x, pack(w), ends, bias=bias).backward(grad)
    assert x.grad is not None
    assert bias.grad is not None
    values = codec.dequantize(w, dtype=torch.float32).double()
    wanted = torch.cat([grad[:4].double() @ values[0], grad[4:5].double() @ values[2]])
    assert relative(x.grad[:5], wanted) < 2**-8
    assert not x.grad[5:].any(), "the last row has no expert"
    sums = torch.stack([grad[:4].sum(0), torch.zeros(33), grad[4]])
    torch.testing.assert_close(bias.grad.float(), sums.float(), rtol=2**-6, atol=2**-6)


def test_one_expert_of_a_bank_is_dequantized_for_its_gradient(make_weight):
    """What the gradient does on a GPU."""
    w = make_weight(3, 130, 160)
    parts = [tensor[1:2] for tensor in ops.parts_of(pack(w))]
    part = ops.join(parts, (130, 160, True, True), torch.bfloat16, bank=False)
    values = torch.full((130, 160), torch.nan, dtype=torch.bfloat16)
    product.expand(part, 0, 130, values)
    assert torch.equal(values, codec.dequantize(reference.expert_weight(w, 1)))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Activation.SWIGLU, Activation.SWIGLU_OAI])
def test_gradients_of_the_layer_of_experts(kind, dtype, biased, make_weight):
    experts, hidden, inner = 4, 64, 32
    gate, up = make_weight(experts, inner, hidden), make_weight(experts, inner, hidden)
    down = make_weight(experts, hidden, inner)
    w_in, w_out = (
        codec.dequantize(w, dtype=torch.float32).double() for w in (interleave(gate, up), down)
    )
    module = mxfp4.MXFP4Experts.from_mxtensors(gate, up, down, dtype=dtype)
    biases = {}
    if biased:
        biases["bias_in"] = torch.nn.Parameter(torch.randn(experts, 2 * inner).to(dtype))
        biases["bias_out"] = torch.nn.Parameter(torch.randn(experts, hidden).to(dtype))
        module.bias_in, module.bias_out = biases.values()
    x = (torch.randn(9, hidden) / 8).to(dtype).requires_grad_(True)
    ids = torch.randint(-1, experts, (9, 3))
    weights = torch.rand(9, 3, requires_grad=True)
    grad = torch.randn(9, hidden).to(dtype)
    pairs = torch.einsum("th,enh->etn", x.detach().double(), w_in)
    if biased:
        pairs = pairs + biases["bias_in"].detach().double()[:, None]
    options = module.activation = ActivationOptions(kind, limit=limit_in_a_gap(pairs))
    module(x, ids, weights).backward(grad)

    leaves = {"x": x, "weights": weights, **biases}
    exact = {name: leaf.detach().double().requires_grad_(True) for name, leaf in leaves.items()}
    layer_in_float64(exact, ids, w_in, w_out, options).backward(grad.double())
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert relative(leaf.grad, exact[name].grad) < 2**-6, name


def limit_in_a_gap(values):
    """A limit that cuts off many values and none by a hair, where rounding would decide."""
    sizes = values.abs().flatten().sort().values
    sizes = sizes[(sizes > 0.5) & (sizes < 2.0)]
    gaps = sizes[1:] / sizes[:-1]
    assert gaps.max() > 1 + 2**-7
    widest = int(gaps.argmax())
    return float(sizes[widest : widest + 2].mean())


def layer_in_float64(inputs, ids, w_in, w_out, options):
    """The routed layer token by token, for autograd."""
    rows = []
    for token, choices in enumerate(ids.tolist()):
        total = torch.zeros(w_out.shape[1], dtype=torch.float64)
        for choice, expert in enumerate(choices):
            if expert < 0:
                continue
            pairs = w_in[expert] @ inputs["x"][token]
            if "bias_in" in inputs:
                pairs = pairs + inputs["bias_in"][expert]
            y = w_out[expert] @ reference.activate(pairs, options)
            if "bias_out" in inputs:
                y = y + inputs["bias_out"][expert]
            total = total + inputs["weights"][token, choice] * y
        rows.append(total)
    return torch.stack(rows)


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
