"""Device code that turns packed words back into floats: for the hybrid product and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4.kernels.triton.decode import (
    decode_planes,
    folded_scales,
    narrow,
    power_of_two,
    unbias,
    widen,
)


@triton.jit
def _store_plane(
    w, s, factor, out_ptrs, mask, FOLDED: tl.constexpr, FLOAT: tl.constexpr, INTERP: tl.constexpr
):
    """Scale one plane [ROWS, 32] in float32, where it is exact, round once and store."""
    value = widen(w)
    if FOLDED:
        value = value * widen(s)[:, None] * factor
    else:
        value = unbias(value, FLOAT) * s[:, None]
    tl.store(out_ptrs, narrow(value, FLOAT, INTERP), mask=mask)


@triton.jit
def expand_kernel(
    w_ptr,
    s_ptr,
    factor_ptr,
    out_ptr,
    first_row,
    last_row,
    K,
    w_stride,
    s_stride,
    out_stride,
    ROWS: tl.constexpr,
    FOLDED: tl.constexpr,
    DECODER: tl.constexpr,
    INTERP: tl.constexpr,
):
    """One chunk of ROWS rows of a dense weight into out [last_row - first_row, K]."""
    FLOAT: tl.constexpr = out_ptr.dtype.element_ty
    chunk = tl.program_id(1)
    out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = first_row + out_row
    exists = n < last_row
    lane = tl.arange(0, 32)
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * w_stride + (chunk * 32 + lane)[None, :]
    w = tl.load(w_ptrs, mask=exists[:, None], other=0)
    s = tl.load(s_ptr + chunk.to(tl.int64) * s_stride + n, mask=exists, other=0)
    factor = tl.load(factor_ptr)
    w0, w1, w2, w3 = decode_planes(w, FLOAT, DECODER)
    if FOLDED:
        s0, s1, s2, s3 = folded_scales(s, FLOAT)
    else:
        s0 = power_of_two(s & 255)
        s1 = power_of_two((s >> 8) & 255)
        s2 = power_of_two((s >> 16) & 255)
        s3 = power_of_two((s >> 24) & 255)
    k = chunk * 128 + lane[None, :]
    out_ptrs = out_ptr + out_row.to(tl.int64)[:, None] * out_stride + k
    mask = exists[:, None]
    _store_plane(w0, s0, factor, out_ptrs, mask & (k < K), FOLDED, FLOAT, INTERP)
    _store_plane(w1, s1, factor, out_ptrs + 32, mask & (k + 32 < K), FOLDED, FLOAT, INTERP)
    _store_plane(w2, s2, factor, out_ptrs + 64, mask & (k + 64 < K), FOLDED, FLOAT, INTERP)
    _store_plane(w3, s3, factor, out_ptrs + 96, mask & (k + 96 < K), FOLDED, FLOAT, INTERP)
