"""Routing, grouped products and the fused expert layer against float64."""

from dataclasses import replace

import pytest
import torch

from mxfp4.codec import quantize
from mxfp4.errors import DtypeError, ShapeError
from mxfp4.kernels import reference
from mxfp4.kernels.activations import Activation, ActivationOptions
from mxfp4.kernels.triton import grouped
from mxfp4.kernels.triton.configs import TileConfig
from mxfp4.kernels.triton.grouped import fused_experts, grouped_matmul
from mxfp4.kernels.triton.layout import interleave, pack

DTYPES = (torch.bfloat16, torch.float16)
SMALL = TileConfig(16, 32, 4, 1, decoder="plain")


def test_routing_is_a_stable_sort():
    ids = torch.randint(-1, 6, (700, 3), dtype=torch.int32)  # 6 experts 0..5, -1 is no expert
    routing = grouped.route(ids, 5)
    flat = ids.flatten()
    wanted = torch.argsort(torch.where((flat >= 0) & (flat < 5), flat, 99), stable=True)
    kept = int(((flat >= 0) & (flat < 5)).sum())
    counts = torch.bincount(flat[(flat >= 0) & (flat < 5)], minlength=5)
    assert torch.equal(routing.ends, counts.cumsum(0).int())
    assert torch.equal(routing.order[:kept], wanted[:kept].int())
    assert torch.equal(routing.slot[routing.order[:kept].long()], torch.arange(kept).int())


@pytest.mark.parametrize("counts", [[0, 0, 0], [5, 0, 17], [0, 64, 0], [16, 16, 16], [1, 1, 1]])
def test_tiles_cover_every_row_once_and_keep_to_one_expert(counts):
    ends = torch.tensor(counts).cumsum(0).int()
    table = grouped.tile_table(ends, 64, 16)
    assert table.shape == (3, 64 // 16 + 3)
    covered = [
        (expert, row)
        for expert, first, rows in table.T.tolist()
        for row in range(first, first + rows)
    ]
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert covered == list(zip(owners, range(sum(counts)), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "rows", "columns"),
    [([3, 0, 18, 1], 33, 96), ([0, 20, 0, 0], 31, 160), ([1, 1, 1, 1], 258, 32)],
)
def test_grouped_product(
    counts, rows, columns, dtype, make_weight, activations, exact, assert_at_floor, poison,
    poisoned_memory,
):  # fmt: skip
    w, x = make_weight(4, rows, columns), activations(sum(counts), columns, dtype)
    bias = torch.randn(4, rows).to(dtype)
    ends = torch.tensor(counts).cumsum(0).int()
    y = grouped_matmul(x, poison(pack(w, dtype=dtype)), ends, bias=bias)
    parts = zip(x.split(counts), range(4), bias, strict=True)
    wanted = [exact(part, reference.expert_weight(w, e), b) for part, e, b in parts]
    assert_at_floor(y, torch.cat(wanted))
    assert torch.equal(y, grouped_matmul(x, pack(w, dtype=dtype), ends, bias=bias))
    near = reference.grouped_matmul(x, w, ends, bias=bias)
    torch.testing.assert_close(y, near, rtol=2**-7, atol=2**-7 * near.abs().max().item())


@pytest.mark.parametrize("depth", [16, 32])
def test_grouped_product_in_large_tiles(
    depth, make_weight, activations, exact, assert_at_floor, poisoned_memory
):
    counts, columns = [0, 129, 3], 160
    w, x = make_weight(3, 40, columns), activations(132, columns, torch.bfloat16)
    buffer = torch.full((140, columns + 128), torch.nan, dtype=torch.bfloat16)
    buffer[:132, :columns] = x
    ends = torch.tensor(counts).cumsum(0).int()
    config = TileConfig(128, 64, 4, 1, decoder="plain", depth=depth)
    y = grouped_matmul(buffer[:132, :columns], pack(w), ends, config=config)
    parts = zip(x.split(counts), range(3), strict=True)
    wanted = [exact(part, reference.expert_weight(w, e)) for part, e in parts]
    assert_at_floor(y, torch.cat(wanted))


class Layer:
    """A small routed layer and its exact result."""

    def __init__(self, dtype, experts=5, hidden=64, inner=96):
        self.gate, self.up = (quantize(torch.randn(experts, inner, hidden) / 8) for _ in range(2))
        self.down = quantize(torch.randn(experts, hidden, inner) / 8)
        self.bias_in = torch.randn(experts, 2 * inner).to(dtype)
        self.bias_out = torch.randn(experts, hidden).to(dtype)
        self.w_in = pack(interleave(self.gate, self.up), dtype=dtype)
        self.w_out = pack(self.down, dtype=dtype)
        self.dtype = dtype

    def __call__(self, x, ids, weights, activation, **options):
        biases = {"bias_in": self.bias_in, "bias_out": self.bias_out}
        return fused_experts(
            x, self.w_in, self.w_out, ids, weights, activation=activation, **biases, **options
        )

    def exact(self, x, ids, weights, activation, value):
        out = torch.zeros_like(x, dtype=torch.float64)
        for token, choice in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
            e = int(ids[token, choice])
            if not 0 <= e < len(self.bias_in):
                continue
            gate = value(x[token], reference.expert_weight(self.gate, e), self.bias_in[e, 0::2])
            up = value(x[token], reference.expert_weight(self.up, e), self.bias_in[e, 1::2])
            if activation.kind is Activation.SWIGLU_OAI:
                gate = gate.clamp(max=activation.limit)
                up = up.clamp(-activation.limit, activation.limit) + 1
                inner = gate * torch.sigmoid(activation.alpha * gate) * up
            else:
                inner = gate * torch.sigmoid(gate) * up
            inner = inner.to(self.dtype)
            y = value(inner, reference.expert_weight(self.down, e), self.bias_out[e])
            out[token] += weights[token, choice].double() * y.to(self.dtype).double()
        return out


@pytest.fixture
def layer():
    return Layer


def routed(tokens, choices, experts):
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)])
    return ids, torch.softmax(torch.randn(tokens, choices), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Activation.SWIGLU, Activation.SWIGLU_OAI])
@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (9, 2), (20, 5)])
def test_fused_layer(tokens, choices, kind, dtype, layer, exact, assert_at_floor, poisoned_memory):
    layer = layer(dtype)
    x = torch.randn(tokens, 64).to(dtype)
    ids, weights = routed(tokens, choices, 5)
    activation = ActivationOptions(kind, limit=1.5)
    y = layer(x, ids, weights, activation)
    # Sums in another order may round the two intermediate results to a neighbour.
    assert_at_floor(y, layer.exact(x, ids, weights, activation, exact), floors=1.5)
    assert torch.equal(y, layer(x, ids, weights, activation))


def test_all_tokens_on_one_expert_strangers_and_repeats(layer, exact, assert_at_floor):
    layer = layer(torch.bfloat16)
    x = torch.randn(19, 64).to(torch.bfloat16)
    ids = torch.tensor([[3, -1, 3]]).repeat(19, 1)
    ids[4] = torch.tensor([7, 5, -1])  # no expert of this rank: nothing is added
    weights = torch.rand(19, 3)
    swiglu = ActivationOptions()
    y = layer(x, ids, weights, swiglu, config=SMALL)
    assert_at_floor(y, layer.exact(x, ids, weights, swiglu, exact), floors=1.5)
    assert not y[4].any()


def test_permuting_tokens_permutes_results(layer):
    layer = layer(torch.bfloat16)
    x = torch.randn(18, 64).to(torch.bfloat16)
    ids, weights = routed(18, 2, 5)
    y = layer(x, ids, weights, ActivationOptions())
    order = torch.randperm(18)
    assert torch.equal(layer(x[order], ids[order], weights[order], ActivationOptions()), y[order])


def test_no_tokens_and_no_choices(layer):
    layer = layer(torch.bfloat16)
    swiglu = ActivationOptions()
    empty = torch.empty(0, 64).to(torch.bfloat16)
    assert layer(empty, torch.empty(0, 2).long(), torch.empty(0, 2), swiglu).shape == (0, 64)
    x = torch.randn(3, 64).to(torch.bfloat16)
    assert not layer(x, torch.empty(3, 0).long(), torch.empty(3, 0), swiglu).any()


def test_wrong_input_is_refused(layer, make_weight):
    layer, swiglu = layer(torch.bfloat16), ActivationOptions()
    x = torch.randn(3, 64).to(torch.bfloat16)
    ids, weights = routed(3, 2, 5)
    with pytest.raises(ShapeError, match="ids and weights"):
        layer(x, ids[:2], weights, swiglu)
    with pytest.raises(DtypeError, match="integers"):
        layer(x, ids.float(), weights, swiglu)
    with pytest.raises(ShapeError, match="w_out"):
        fused_experts(x, layer.w_in, replace(layer.w_out, experts=4), ids, weights)
    with pytest.raises(ShapeError, match="ends must be int32"):
        grouped_matmul(x, layer.w_in, torch.tensor([1, 2, 3, 3, 3]))
    with pytest.raises(ShapeError, match="bank"):
        grouped_matmul(x, pack(make_weight(8, 64)), torch.tensor([3]).int())
