"""Products with MXFP4 weights by dequantizing them in torch: the contract of the fast kernels.

Everything is computed in float32 and rounded once at the end. Runs on every device.
"""

from __future__ import annotations

import torch

from mxfp4.codec import dequantize
from mxfp4.errors import ShapeError
from mxfp4.kernels.activations import Activation, ActivationOptions
from mxfp4.tensor import MXTensor


def matmul(x: torch.Tensor, w: MXTensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x w^T + bias: x [..., K], w [N, K] with blocks along K, bias [N], y [..., N] as x.

    >>> from mxfp4.codec import quantize
    >>> matmul(torch.ones(2, 32), quantize(torch.ones(3, 32))).tolist()
    [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """
    if len(w.shape) != 2 or w.axis != 1 or x.shape[-1:] != w.shape[1:]:
        raise ShapeError(
            f"x [..., K] and w [N, K] with blocks along K are needed, seen x {list(x.shape)} and "
            f"w {list(w.shape)} with blocks along axis {w.axis}"
        )
    y = x.float() @ dequantize(w, dtype=torch.float32).T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def grouped_matmul(
    x: torch.Tensor, w: MXTensor, ends: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of x [T, K] times the weight of their expert: w [E, N, K], bias [E, N], y [T, N].

    Expert e has the rows from `ends[e - 1]` (0 for the first) to `ends[e]`; rows beyond the last
    end are zero in y. Reads `ends` back from the device.
    """
    if len(w.shape) != 3 or w.axis != 2 or x.ndim != 2 or x.shape[1] != w.shape[2]:
        raise ShapeError(
            f"x [T, K] and w [E, N, K] with blocks along K are needed, seen x {list(x.shape)} and "
            f"w {list(w.shape)} with blocks along axis {w.axis}"
        )
    y = x.new_zeros(x.shape[0], w.shape[1])
    first = 0
    for expert, last in enumerate(ends.tolist()):
        part = expert_weight(w, expert)
        y[first:last] = matmul(x[first:last], part, bias=None if bias is None else bias[expert])
        first = last
    return y


def expert_weight(w: MXTensor, expert: int) -> MXTensor:
    """The [N, K] weight of one expert of [E, N, K]."""
    return MXTensor(w.codes[expert], w.scales[expert], w.shape[1:])


def fused_experts(
    x: torch.Tensor,
    w_in: MXTensor,
    w_out: MXTensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias_in: torch.Tensor | None = None,
    bias_out: torch.Tensor | None = None,
    activation: ActivationOptions | None = None,
) -> torch.Tensor:
    """The routed experts of one layer for x [T, H]; arguments as in `triton.grouped.fused_experts`.

    Goes through the experts one by one and reads the routing back for each.
    """
    activation = activation or ActivationOptions()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(ids.shape[1]):
        for expert in range(w_in.shape[0]):
            tokens = (ids[:, choice] == expert).nonzero().flatten()
            if not len(tokens):
                continue
            first = None if bias_in is None else bias_in[expert].float()
            inner = matmul(x[tokens].float(), expert_weight(w_in, expert), bias=first)
            inner = activate(inner, activation).to(x.dtype)
            second = None if bias_out is None else bias_out[expert]
            y = matmul(inner, expert_weight(w_out, expert), bias=second)
            out[tokens] += weights[tokens, choice, None].float() * y.float()
    return out.to(x.dtype)


def activate(pairs: torch.Tensor, activation: ActivationOptions) -> torch.Tensor:
    """[.., 2 I] of gate, up, gate, up, ... to [.., I]."""
    if activation.kind is Activation.NONE:
        return pairs
    gate, up = pairs[..., 0::2], pairs[..., 1::2]
    if activation.kind is Activation.SWIGLU:
        return gate * torch.sigmoid(gate) * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
