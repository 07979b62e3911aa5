"""Device code of products through `tl.dot_scaled`: for devices that multiply scaled blocks.

The weight stays in checkpoint order. With X_FORMAT "bf16" or "fp16" x is a plain matrix and the
compiler converts the weight; with "e4m3" or "e2m1" both sides are blocks with scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4.kernels.triton.decode import narrow, widen

# Scale bytes of columns and rows that do not exist: one, because masked codes are zero.
_ONE = tl.constexpr(127)


@triton.jit
def native_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    x_scale_stride,
    w_stride,
    w_scale_stride,
    out_stride,
    X_FORMAT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    FAST: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERP: tl.constexpr,
):
    """One tile of y [M, N] = x w^T for w codes uint8 [N, K/2] and scales uint8 [N, K/32]."""
    FLOAT: tl.constexpr = out_ptr.dtype.element_ty
    X_PACK: tl.constexpr = 2 if X_FORMAT == "e2m1" else 1
    X_SCALED: tl.constexpr = X_FORMAT == "e2m1" or X_FORMAT == "e4m3"
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # Rows that do not exist repeat the last one; their results are not stored.
    x_row = tl.minimum(m, M - 1).to(tl.int64)[:, None]
    w_row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    xk = tl.arange(0, DEPTH // X_PACK)[None, :]
    wk = tl.arange(0, DEPTH // 2)[None, :]
    sk = tl.arange(0, DEPTH // 32)[None, :]
    x_ptrs = x_ptr + x_row * x_stride + xk
    w_ptrs = w_ptr + w_row * w_stride + wk
    x_scale_ptrs = x_scale_ptr + x_row * x_scale_stride + sk
    w_scale_ptrs = w_scale_ptr + w_row * w_scale_stride + sk
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    whole = K if EVEN_K else K // DEPTH * DEPTH
    for _ in range(0, whole, DEPTH):
        x_scale = tl.load(x_scale_ptrs) if X_SCALED else None
        acc = tl.dot_scaled(
            tl.load(x_ptrs),
            x_scale,
            X_FORMAT,
            tl.load(w_ptrs).T,
            tl.load(w_scale_ptrs),
            "e2m1",
            acc,
            fast_math=FAST,
        )
        x_ptrs += DEPTH // X_PACK
        w_ptrs += DEPTH // 2
        x_scale_ptrs += DEPTH // 32
        w_scale_ptrs += DEPTH // 32
    if not EVEN_K:
        left = K - whole
        x_zero = 0 if X_FORMAT == "e2m1" else 0.0
        x_left = tl.load(x_ptrs, mask=xk * X_PACK < left, other=x_zero)
        w_left = tl.load(w_ptrs, mask=wk * 2 < left, other=0)
        w_scale_left = tl.load(w_scale_ptrs, mask=sk * 32 < left, other=_ONE)
        if X_SCALED:
            x_scale_left = tl.load(x_scale_ptrs, mask=sk * 32 < left, other=_ONE)
        else:
            x_scale_left = None
        acc = tl.dot_scaled(
            x_left, x_scale_left, X_FORMAT, w_left.T, w_scale_left, "e2m1", acc, fast_math=FAST
        )
    if HAS_BIAS:
        acc += widen(tl.load(bias_ptr + n, mask=n < N, other=0.0))[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_ptrs, narrow(acc, FLOAT, INTERP), mask=(m[:, None] < M) & (n[None, :] < N))
