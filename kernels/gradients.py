"""Gradients of the layer of experts with respect to everything but the weights in four bits.

Nothing of the forward pass is kept but its inputs: the two products of each pair (token, choice)
are computed again. All sums are float32; what lies between two products is rounded to the dtype of
x. So is the input of the activation, unlike in the forward pass: a value within that rounding of a
limit may be taken for one on the other side of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mxfp4.kernels.activations import Activation, ActivationOptions
from mxfp4.kernels.reference import activate

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Of sorted rows [R, K], ends [E] and a bias [E, N] with the weights of their experts: [R, N]."""

Transposed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of gradients [R, N] and ends [E] with the transposed weights: [R, K]."""


@dataclass(frozen=True)
class ExpertProducts:
    """The two products of a layer and their transposes, for `experts` experts."""

    first: Product
    second: Product
    first_transposed: Transposed
    second_transposed: Transposed
    experts: int


@dataclass(frozen=True)
class ExpertGradients:
    """Gradients of `fused_experts`: x [T, H], weights [T, k], and the biases [E, ..] if any."""

    x: torch.Tensor
    weights: torch.Tensor
    bias_in: torch.Tensor | None
    bias_out: torch.Tensor | None


def experts_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    bias_in: torch.Tensor | None,
    bias_out: torch.Tensor | None,
    products: ExpertProducts,
    activation: ActivationOptions,
) -> ExpertGradients:
    """From the gradient [T, H] of the result; arguments as in `triton.grouped.fused_experts`."""
    experts, choices = products.experts, ids.shape[1]
    flat = ids.flatten().long()
    expert = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = torch.argsort(expert, stable=True)
    expert = expert[order]
    # Pairs of no expert come last; the products leave their rows undefined.
    exists = (expert < experts).unsqueeze(1)
    ends = torch.searchsorted(expert, torch.arange(experts, device=x.device), right=True).int()
    token = order // choices
    weight = weights.flatten()[order].float().unsqueeze(1)

    before = products.first(x[token], ends, bias_in).where(exists, 0.0).float()
    inner = activate(before, activation).to(x.dtype)
    y = products.second(inner, ends, bias_out).where(exists, 0.0).float()

    grad_out = grad[token].float().where(exists, 0.0)
    grad_weight = torch.zeros_like(weight.flatten()).index_copy(0, order, (grad_out * y).sum(1))
    grad_y = (grad_out * weight).to(x.dtype)
    grad_inner = products.second_transposed(grad_y, ends).float()
    grad_before = _activation_gradient(grad_inner, before, activation).to(x.dtype)
    grad_rows = products.first_transposed(grad_before, ends).float()
    grad_x = torch.zeros_like(x, dtype=torch.float32).index_add(0, token, grad_rows)
    return ExpertGradients(
        grad_x.to(x.dtype),
        grad_weight.view(weights.shape).to(weights.dtype),
        None if bias_in is None else sum_by_expert(grad_before, ends, bias_in),
        None if bias_out is None else sum_by_expert(grad_y, ends, bias_out),
    )


def sum_by_expert(rows: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias [E, N]: sums of the rows of each expert; those beyond the last end
    belong to none."""
    experts = ends.numel()
    place = torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, place, right=True)
    sums = rows.new_zeros(experts + 1, rows.shape[1], dtype=torch.float32)
    return sums.index_add(0, expert, rows.float())[:experts].to(bias.dtype)


def _activation_gradient(
    grad: torch.Tensor, pairs: torch.Tensor, activation: ActivationOptions
) -> torch.Tensor:
    """The gradient [R, 2 I] of what `activate` made of `pairs`, from that [R, I] of its result.

    With s = sigmoid(alpha gate): d(gate s) = s (1 + alpha gate (1 - s)). Where a limit cuts off,
    the gradient is zero; at the limit it passes, as in torch.
    """
    gate, up = pairs[:, 0::2], pairs[:, 1::2]
    alpha, offset = 1.0, 0.0
    gate_passes = up_passes = torch.ones_like(gate, dtype=torch.bool)
    if activation.kind is Activation.SWIGLU_OAI:
        limit, alpha, offset = activation.limit, activation.alpha, 1.0
        gate_passes, up_passes = gate <= limit, up.abs() <= limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(alpha * gate)
    grad_gate = grad * (up + offset) * s * (1 + alpha * gate * (1 - s))
    grad_up = grad * gate * s
    both = torch.stack([grad_gate.where(gate_passes, 0.0), grad_up.where(up_passes, 0.0)], -1)
    return both.flatten(-2)
