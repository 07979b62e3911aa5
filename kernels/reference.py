"""Products with MXFP4 weights by dequantizing them in torch: the contract of the fast kernels.

Everything is computed in float32 and rounded once at the end. Runs on every device.
"""

from __future__ import annotations

import torch

from mxfp4.codec import dequantize
from mxfp4.errors import ShapeError
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
