"""Device code of the product of expert-sorted rows with the weights of their experts.

The same K loop as the dense product. Rows of x can be gathered on the way in (GATHER), and pairs of
rows of the weight, gate and up, can meet in an activation on the way out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4.kernels.triton.decode import narrow, widen
from mxfp4.kernels.triton.product_kernel import sum_chunks

# In the order of `grouped.ACTIVATIONS`.
NO_ACTIVATION = tl.constexpr(0)
SWIGLU = tl.constexpr(1)
SWIGLU_OAI = tl.constexpr(2)


@triton.jit
def _activate(acc, limit, alpha, ACTIVATION: tl.constexpr):
    """[TOKENS, ROWS] of gate, up, gate, up, ... to [TOKENS, ROWS / 2]."""
    gate, up = tl.split(acc.reshape(acc.shape[0], acc.shape[1] // 2, 2))
    if ACTIVATION == SWIGLU_OAI:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate * tl.sigmoid(alpha * gate) * up
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def grouped_kernel(
    x_ptr,
    order_ptr,
    w_ptr,
    s_ptr,
    factor_ptr,
    bias_ptr,
    out_ptr,
    tiles_ptr,
    tiles,
    choices,
    N,
    K,
    chunks,
    x_stride,
    w_expert_stride,
    w_stride,
    s_expert_stride,
    s_stride,
    out_stride,
    limit,
    alpha,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FOLDED: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DECODER: tl.constexpr,
    INTERP: tl.constexpr,
):
    """One tile of y. Sorted row r is row r of x, or with GATHER row order[r] / choices of x."""
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    tile = tl.program_id(0)
    rows = tl.load(tiles_ptr + 2 * tiles + tile)
    if rows > 0:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        first = tl.load(tiles_ptr + tiles + tile)
        m = tl.arange(0, TOKENS)
        lane = tl.arange(0, DEPTH)
        # Rows that do not exist repeat the last one; their results are not stored.
        x_row = first + tl.minimum(m, rows - 1)
        if GATHER:
            x_row = tl.load(order_ptr + x_row) // choices
        x_ptrs = x_ptr + (x_row.to(tl.int64)[:, None] * x_stride + lane[None, :])
        w_row = tl.arange(0, ROWS).to(tl.int64)[:, None]
        w_base = w_ptr + expert * w_expert_stride
        w_base += (tl.program_id(1) * ROWS).to(tl.int64) * w_stride
        w_ptrs = w_base + (w_row * w_stride + lane[None, :])
        s_base = s_ptr + expert * s_expert_stride + tl.program_id(1) * ROWS
        s_ptrs = s_base + tl.arange(0, ROWS)
        acc = sum_chunks(
            x_ptrs,
            m[:, None],
            rows,
            w_ptrs,
            s_ptrs,
            s_stride,
            0,
            chunks,
            K,
            TOKENS,
            ROWS,
            DEPTH,
            FOLDED,
            SWAP,
            EVEN_K,
            DECODER,
            INTERP,
        )
        n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        acc = acc * tl.load(factor_ptr + expert)
        if HAS_BIAS:
            acc += widen(tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0))[None, :]
        if ACTIVATION == NO_ACTIVATION:
            column = n
            width = N
        else:
            acc = _activate(acc, limit, alpha, ACTIVATION)
            column = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            width = N // 2
        mask = (m[:, None] < rows) & (column[None, :] < width)
        out_ptrs = out_ptr + (first + m).to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(out_ptrs, narrow(acc, FLOAT, INTERP), mask=mask)
