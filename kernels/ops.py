"""The operators as PyTorch knows them, `torch.ops.mxfp4.*`: shapes, a gradient, and a CPU body.

They are opaque to compilers and safe to capture in graphs. A packed weight crosses the boundary of
an operator as its parts and is put together again behind it. On a GPU they launch the Triton
kernels; elsewhere they unpack the weight and compute in torch.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.library import custom_op

from mxfp4.codec import dequantize as decode_reference
from mxfp4.codec import encode_blocks
from mxfp4.elements import pack_codes
from mxfp4.kernels import reference
from mxfp4.kernels.activations import Activation, ActivationOptions
from mxfp4.kernels.gradients import ExpertProducts, experts_gradients, sum_by_expert
from mxfp4.kernels.triton.layout import LAYOUT_OF_DTYPE, PackedWeight, unpack
from mxfp4.spec import BLOCK_SIZE, E8M0_NAN, CodecOptions
from mxfp4.tensor import MXTensor

Facts: TypeAlias = tuple[int, int, bool, bool]
"""rows, columns, folded, expandable: what a packed weight is besides its tensors."""

_WEIGHT = "Tensor[] parts, int rows, int columns, bool folded, bool expandable"


def parts_of(w: PackedWeight) -> list[torch.Tensor]:
    """The tensors of a weight, in the order of the operators."""
    return [w.words, w.scales, w.shifts, w.factors]


def facts_of(w: PackedWeight) -> Facts:
    """The rest of a weight, in the order of the operators."""
    return w.rows, w.columns, w.folded, w.expandable


def join(
    parts: list[torch.Tensor], facts: Facts, dtype: torch.dtype, *, bank: bool
) -> PackedWeight:
    """The weight from its parts; its layout follows from the activation dtype."""
    words, scales, shifts, factors = parts
    rows, columns, folded, expandable = facts
    return PackedWeight(
        words,
        scales,
        shifts,
        factors,
        rows,
        columns,
        words.shape[0] if bank else None,
        LAYOUT_OF_DTYPE[dtype],
        folded,
        expandable,
    )


@custom_op(
    "mxfp4::linear",
    mutates_args=(),
    schema=f"(Tensor x, {_WEIGHT}, Tensor? bias, int scratch_bytes) -> Tensor",
)
def linear(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    rows: int,
    columns: int,
    folded: bool,
    expandable: bool,
    bias: torch.Tensor | None,
    scratch_bytes: int,
) -> torch.Tensor:
    """x [..., K] times a dense weight, see `mxfp4.kernels.triton.product.matmul`."""
    w = join(parts, (rows, columns, folded, expandable), x.dtype, bank=False)
    if x.is_cuda:
        from mxfp4.kernels.triton import product

        return product.matmul(x, w, bias=bias, scratch_bytes=scratch_bytes)
    return reference.matmul(x, unpack(w), bias=bias)


@linear.register_fake
def _(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    rows: int,
    columns: int,
    folded: bool,
    expandable: bool,
    bias: torch.Tensor | None,
    scratch_bytes: int,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@custom_op(
    "mxfp4::linear_input_grad", mutates_args=(), schema=f"(Tensor grad, {_WEIGHT}) -> Tensor"
)
def linear_input_grad(
    grad: torch.Tensor,
    parts: list[torch.Tensor],
    rows: int,
    columns: int,
    folded: bool,
    expandable: bool,
) -> torch.Tensor:
    """grad [..., N] times w [N, K]; the weight is dequantized as a whole for it."""
    w = join(parts, (rows, columns, folded, expandable), grad.dtype, bank=False)
    if grad.is_cuda and expandable:
        from mxfp4.kernels.triton import product

        values = grad.new_empty(rows, columns)
        product.expand(w, 0, rows, values)
        return grad @ values
    return (grad.float() @ decode_reference(unpack(w), dtype=torch.float32)).to(grad.dtype)


@linear_input_grad.register_fake
def _(
    grad: torch.Tensor,
    parts: list[torch.Tensor],
    rows: int,
    columns: int,
    folded: bool,
    expandable: bool,
) -> torch.Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _keep_weight(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: object
) -> None:
    _, parts, *facts = inputs[:6]
    bias = inputs[6]
    ctx.parts, ctx.facts = parts, facts  # type: ignore[attr-defined]
    ctx.bias_dtype = bias.dtype if isinstance(bias, torch.Tensor) else None  # type: ignore[attr-defined]


def _linear_backward(
    ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
) -> tuple[object, ...]:
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
        grad_x = linear_input_grad(grad.contiguous(), ctx.parts, *ctx.facts)  # type: ignore[attr-defined]
    if ctx.bias_dtype is not None and ctx.needs_input_grad[6]:  # type: ignore[attr-defined]
        grad_bias = grad.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype)  # type: ignore[attr-defined]
    return grad_x, [None] * 4, None, None, None, None, grad_bias, None


linear.register_autograd(_linear_backward, setup_context=_keep_weight)


@custom_op(
    "mxfp4::grouped",
    mutates_args=(),
    schema=f"(Tensor x, {_WEIGHT}, Tensor ends, Tensor? bias) -> Tensor",
)
def grouped(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    rows: int,
    columns: int,
    folded: bool,
    expandable: bool,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Rows of x [T, K] times the weights of their experts, see `triton.grouped.grouped_matmul`."""
    w = join(parts, (rows, columns, folded, expandable), x.dtype, bank=True)
    if x.is_cuda:
        from mxfp4.kernels.triton import grouped as on_device

        return on_device.grouped_matmul(x, w, ends, bias=bias)
    return reference.grouped_matmul(x, unpack(w), ends, bias=bias)


@grouped.register_fake
def _(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    rows: int,
    columns: int,
    folded: bool,
    expandable: bool,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], rows)


@custom_op(
    "mxfp4::grouped_input_grad",
    mutates_args=(),
    schema=f"(Tensor grad, {_WEIGHT}, Tensor ends) -> Tensor",
)
def grouped_input_grad(
    grad: torch.Tensor,
    parts: list[torch.Tensor],
    rows: int,
    columns: int,
    folded: bool,
    expandable: bool,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Rows of grad [T, N] times w [N, K] of their experts; zero beyond the last end.

    One weight after another is dequantized for it. Reads `ends` back, so it waits for the device
    and cannot be captured in a graph.
    """
    out = grad.new_zeros(grad.shape[0], columns)
    first = 0
    for expert, last in enumerate(ends.tolist()):
        if last > first:
            part = [tensor[expert : expert + 1] for tensor in parts]
            out[first:last] = linear_input_grad(
                grad[first:last], part, rows, columns, folded, expandable
            )
        first = last
    return out


@grouped_input_grad.register_fake
def _(
    grad: torch.Tensor,
    parts: list[torch.Tensor],
    rows: int,
    columns: int,
    folded: bool,
    expandable: bool,
    ends: torch.Tensor,
) -> torch.Tensor:
    return grad.new_empty(grad.shape[0], columns)


def _keep_grouped(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: object
) -> None:
    _, parts, *facts = inputs[:6]
    ctx.parts, ctx.facts, ctx.ends, ctx.bias = parts, facts, inputs[6], inputs[7]  # type: ignore[attr-defined]


def _grouped_backward(
    ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
) -> tuple[object, ...]:
    grad_x = grad_bias = None
    grad, ends = grad.contiguous(), ctx.ends  # type: ignore[attr-defined]
    if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
        grad_x = grouped_input_grad(grad, ctx.parts, *ctx.facts, ends)  # type: ignore[attr-defined]
    if ctx.bias is not None and ctx.needs_input_grad[7]:  # type: ignore[attr-defined]
        grad_bias = sum_by_expert(grad, ends, ctx.bias)  # type: ignore[attr-defined]
    return grad_x, [None] * 4, None, None, None, None, None, grad_bias


grouped.register_autograd(_grouped_backward, setup_context=_keep_grouped)


@custom_op(
    "mxfp4::experts",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor[] parts_in, Tensor[] parts_out, int hidden, int inner, bool[] flags, "
        "Tensor ids, Tensor weights, Tensor? bias_in, Tensor? bias_out, str activation, "
        "float limit, float alpha) -> Tensor"
    ),
)
def experts(
    x: torch.Tensor,
    parts_in: list[torch.Tensor],
    parts_out: list[torch.Tensor],
    hidden: int,
    inner: int,
    flags: list[bool],
    ids: torch.Tensor,
    weights: torch.Tensor,
    bias_in: torch.Tensor | None,
    bias_out: torch.Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
) -> torch.Tensor:
    """The routed experts of a layer, see `triton.grouped.fused_experts`.

    `flags` are folded and expandable of the first weight, then of the second.
    """
    w_in = join(parts_in, (2 * inner, hidden, flags[0], flags[1]), x.dtype, bank=True)
    w_out = join(parts_out, (hidden, inner, flags[2], flags[3]), x.dtype, bank=True)
    options = ActivationOptions(Activation(activation), limit, alpha)
    if x.is_cuda:
        from mxfp4.kernels.triton import grouped as on_device

        return on_device.fused_experts(
            x,
            w_in,
            w_out,
            ids,
            weights,
            bias_in=bias_in,
            bias_out=bias_out,
            activation=options,
        )
    return reference.fused_experts(
        x,
        unpack(w_in),
        unpack(w_out),
        ids,
        weights,
        bias_in=bias_in,
        bias_out=bias_out,
        activation=options,
    )


@experts.register_fake
def _(
    x: torch.Tensor,
    parts_in: list[torch.Tensor],
    parts_out: list[torch.Tensor],
    hidden: int,
    inner: int,
    flags: list[bool],
    ids: torch.Tensor,
    weights: torch.Tensor,
    bias_in: torch.Tensor | None,
    bias_out: torch.Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_experts(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: object
) -> None:
    ctx.inputs = inputs  # type: ignore[attr-defined]


def _experts_backward(
    ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
) -> tuple[object, ...]:
    x, parts_in, parts_out, hidden, inner, flags, *rest = ctx.inputs  # type: ignore[attr-defined]
    ids, weights, bias_in, bias_out, kind, limit, alpha = rest
    facts_in = (2 * inner, hidden, flags[0], flags[1])
    facts_out = (hidden, inner, flags[2], flags[3])
    products = ExpertProducts(
        lambda rows, ends, bias: grouped(rows, parts_in, *facts_in, ends, bias),
        lambda rows, ends, bias: grouped(rows, parts_out, *facts_out, ends, bias),
        lambda rows, ends: grouped_input_grad(rows, parts_in, *facts_in, ends),
        lambda rows, ends: grouped_input_grad(rows, parts_out, *facts_out, ends),
        parts_in[0].shape[0],
    )
    options = ActivationOptions(Activation(kind), limit, alpha)
    found = experts_gradients(grad, x, ids, weights, bias_in, bias_out, products, options)
    return (
        found.x,
        *([None] * 4, [None] * 4, None, None, None, None),
        *(found.weights, found.bias_in, found.bias_out),
        *(None, None, None),
    )


experts.register_autograd(_experts_backward, setup_context=_keep_experts)


@custom_op(
    "mxfp4::quantize",
    mutates_args=(),
    schema="(Tensor x, str rule, str ties, str zero_sign) -> (Tensor, Tensor)",
)
def quantize(
    x: torch.Tensor, rule: str, ties: str, zero_sign: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x [..., K]; scale byte 255 for blocks with NaN or infinity."""
    options = CodecOptions.named(rule=rule, ties=ties, zero_sign=zero_sign)
    if x.is_cuda:
        from mxfp4.kernels.triton import codec

        return codec.encode(x, options)
    blocks = x.float().reshape(*x.shape[:-1], -1, BLOCK_SIZE)
    bad = ~blocks.isfinite().all(-1)
    codes, byte = encode_blocks(blocks.masked_fill(bad.unsqueeze(-1), 0.0), options)
    return pack_codes(codes.flatten(-2)), byte.masked_fill(bad, E8M0_NAN).to(torch.uint8)


@quantize.register_fake
def _(x: torch.Tensor, rule: str, ties: str, zero_sign: str) -> tuple[torch.Tensor, torch.Tensor]:
    columns = x.shape[-1]
    codes = x.new_empty(*x.shape[:-1], columns // 2, dtype=torch.uint8)
    return codes, x.new_empty(*x.shape[:-1], columns // BLOCK_SIZE, dtype=torch.uint8)


@custom_op(
    "mxfp4::dequantize",
    mutates_args=(),
    schema="(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor",
)
def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., K] of codes [..., K/2] and scales [..., K/32]; NaN for scale byte 255."""
    if codes.is_cuda:
        from mxfp4.kernels.triton import codec

        return codec.decode(codes, scales, dtype)
    t = MXTensor(codes, scales, (*codes.shape[:-1], codes.shape[-1] * 2))
    return decode_reference(t, dtype=dtype, nan_scale="nan")


@dequantize.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty(*codes.shape[:-1], codes.shape[-1] * 2, dtype=dtype)
