"""`matmul` and `grouped_matmul`: products with MXFP4 weights, by whichever implementation can run.

A weight is an `MXTensor`, which is dequantized on every call, or a `PackedWeight` from
`mxfp4.pack`, for which there are kernels. Nothing is packed behind the caller's back.
"""

from __future__ import annotations

import torch

from mxfp4.errors import BackendUnavailableError, ShapeError
from mxfp4.kernels import ops, reference
from mxfp4.kernels.triton.layout import PackedWeight, unpack
from mxfp4.tensor import MXTensor

REFERENCE = "reference"
TRITON = "triton"
BACKENDS = (REFERENCE, TRITON)

SCRATCH_BYTES = 256 << 20
"""Default limit of the scratch for dequantized slabs of a weight in large products."""


def matmul(
    x: torch.Tensor,
    w: MXTensor | PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    backend: str | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> torch.Tensor:
    """y = x w^T + bias: x [..., K], w [N, K] with blocks along K, bias [N], y [..., N] as x.

    Sums are float32, rounded once. With a packed weight on a GPU the Triton kernels run, rows of up
    to 16 tokens do not depend on the rest of such a batch, and 2,048 tokens and more may use up to
    `scratch_bytes` of scratch. Differentiable in x and bias. `backend` forces "reference" or
    "triton". Raises `ShapeError`, `DtypeError` and `BackendUnavailableError`.

    >>> import mxfp4
    >>> w = mxfp4.pack(mxfp4.quantize(torch.ones(3, 32)))
    >>> mxfp4.matmul(torch.ones(2, 32, dtype=torch.bfloat16), w).tolist()
    [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """
    if _chosen(w, backend) == REFERENCE:
        return reference.matmul(x, _plain(w), bias=bias)
    packed = _packed(w)
    _check(x, packed, dense=True)
    if backend == TRITON and not x.is_cuda:
        from mxfp4.kernels.triton import product

        return product.matmul(x, packed, bias=bias, scratch_bytes=scratch_bytes)
    parts, facts = ops.parts_of(packed), ops.facts_of(packed)
    y: torch.Tensor = ops.linear(x, parts, *facts, bias, scratch_bytes)
    return y


def grouped_matmul(
    x: torch.Tensor,
    w: MXTensor | PackedWeight,
    ends: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Rows of x [T, K] times the weight of their expert: w [E, N, K], bias [E, N], y [T, N].

    Expert e has the rows from `ends[e - 1]` (0 for the first) to `ends[e]`, int32 [E] on the device
    of x. What is in rows of y beyond the last end is not defined. Differentiable in x and bias; the
    backward pass waits for the device. `backend` as in `matmul`.
    """
    if _chosen(w, backend) == REFERENCE:
        return reference.grouped_matmul(x, _plain(w), ends, bias=bias)
    packed = _packed(w)
    _check(x, packed, dense=False)
    if backend == TRITON and not x.is_cuda:
        from mxfp4.kernels.triton import grouped

        return grouped.grouped_matmul(x, packed, ends, bias=bias)
    parts, facts = ops.parts_of(packed), ops.facts_of(packed)
    y: torch.Tensor = ops.grouped(x, parts, *facts, ends, bias)
    return y


def _chosen(w: MXTensor | PackedWeight, backend: str | None) -> str:
    if backend is None:
        return REFERENCE if isinstance(w, MXTensor) else TRITON
    if backend not in BACKENDS:
        raise BackendUnavailableError(
            f"there is no backend {backend!r} for products",
            hint=f"known: {', '.join(BACKENDS)}",
        )
    return backend


def _plain(w: MXTensor | PackedWeight) -> MXTensor:
    return w if isinstance(w, MXTensor) else unpack(w)


def _packed(w: MXTensor | PackedWeight) -> PackedWeight:
    if isinstance(w, PackedWeight):
        return w
    raise BackendUnavailableError(
        "the Triton kernels need a packed weight", hint="pass mxfp4.pack(w, dtype=x.dtype)"
    )


def _check(x: torch.Tensor, w: PackedWeight, *, dense: bool) -> None:
    """What the operators take for granted: the dtype names the layout."""
    w.check_activations(x)
    if dense != (w.experts is None):
        wanted = "[N, K]" if dense else "[E, N, K]"
        raise ShapeError(f"this product takes a weight {wanted}, seen {list(w.shape)}")
