"""Device code of the dense product y[M, N] = x[M, K] w[N, K]^T, and the K loop all products share.

A tile is TOKENS x ROWS and advances by one chunk of 128 elements: one tile of words, one row of
scale words, four slices of x, one per plane. Words, scales and x are the only loads of the loop and
are all asynchronous; each plane is decoded in registers, multiplied by its scale (exact) and enters
a matrix product of depth 32, or two of depth 16 where registers are short (DEPTH). SWAP puts the
weight on the left of that product, where it needs no way through shared memory on Hopper and is
decoded once per tile on other devices.
"""

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

# Tiles of so many tokens repeat the last row of x instead of masking what is beyond it: predicates
# cost instructions and registers, and few rows of such a tile are missing. Smaller ones may have
# one row of sixteen, and are there to read little.
_UNMASKED_TOKENS = tl.constexpr(128)


@triton.jit
def _add_product(
    acc,
    x,
    w,
    s,
    FOLDED: tl.constexpr,
    SWAP: tl.constexpr,
    DECODER: tl.constexpr,
    INTERP: tl.constexpr,
):
    """acc + x (w * s)^T for one plane: x [TOKENS, DEPTH], w [ROWS, DEPTH], s [ROWS].

    Without FOLDED, `w` holds elements, and `s` (float32) multiplies the sum of the block instead.
    """
    if INTERP:
        x = widen(x)
        w = widen(w)
        s = widen(s)
    if FOLDED:
        if DECODER == "plain" and w.dtype == tl.bfloat16:
            # Devices without bfloat16 multiplication would emulate its rounding, although the
            # product is exact: the lower half of the float32 is zero.
            product = (widen(w) * widen(s)[:, None]).to(tl.uint32, bitcast=True)
            w = (product >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            w = w * s[:, None]
        if SWAP:
            acc = tl.dot(w, x.T, acc)
        else:
            acc = tl.dot(x, w.T, acc)
    elif SWAP:
        acc += tl.dot(w, x.T) * s[:, None]
    else:
        acc += tl.dot(x, w.T) * s[None, :]
    return acc


@triton.jit
def _load_plane(x_ptrs, m, limit, left, PLANE: tl.constexpr, WHOLE: tl.constexpr):
    """x [TOKENS, DEPTH] of one plane; zeros if its columns are not among the `left` ones."""
    if x_ptrs.shape[0] >= _UNMASKED_TOKENS:
        if WHOLE or PLANE == 0:
            x = tl.load(x_ptrs + 32 * PLANE)
        else:
            # Compared as a tile, because the interpreter has no scalar masks.
            there = tl.full(x_ptrs.shape, left, tl.int32) > 32 * PLANE
            x = tl.load(x_ptrs + 32 * PLANE, mask=there, other=0.0)
    else:
        if not WHOLE and PLANE > 0:
            # The condition is put into the limit because the interpreter cannot combine a tile and
            # a scalar by `&`.
            limit = tl.where(left > 32 * PLANE, limit, 0)
        x = tl.load(x_ptrs + 32 * PLANE, mask=m < limit, other=0.0)
    return x


@triton.jit
def _scales(s_ptrs, FLOAT: tl.constexpr, FOLDED: tl.constexpr):
    """The scales of the four planes of a chunk, [ROWS] each: of FLOAT if FOLDED, else float32."""
    s = tl.load(s_ptrs)
    if FOLDED:
        s0, s1, s2, s3 = folded_scales(s, FLOAT)
    else:
        s0 = power_of_two(s & 255)
        s1 = power_of_two((s >> 8) & 255)
        s2 = power_of_two((s >> 16) & 255)
        s3 = power_of_two((s >> 24) & 255)
    return s0, s1, s2, s3


@triton.jit
def _planes(
    w_ptrs,
    FLOAT: tl.constexpr,
    FOLDED: tl.constexpr,
    DECODER: tl.constexpr,
    INTERP: tl.constexpr,
):
    """The four planes of words [ROWS, DEPTH], see `_add_product`."""
    w0, w1, w2, w3 = decode_planes(tl.load(w_ptrs), FLOAT, DECODER)
    if not FOLDED:
        if INTERP:
            w0, w1, w2, w3 = widen(w0), widen(w1), widen(w2), widen(w3)
        w0 = unbias(w0, FLOAT)
        w1 = unbias(w1, FLOAT)
        w2 = unbias(w2, FLOAT)
        w3 = unbias(w3, FLOAT)
    return w0, w1, w2, w3


@triton.jit
def _add_chunk(
    acc,
    x_ptrs,
    m,
    limit,
    w_ptrs,
    s_ptrs,
    left,
    DEPTH: tl.constexpr,
    FOLDED: tl.constexpr,
    SWAP: tl.constexpr,
    WHOLE: tl.constexpr,
    DECODER: tl.constexpr,
    INTERP: tl.constexpr,
):
    """acc + one chunk, the first of the `left` columns of x; fewer than 128 unless WHOLE."""
    FLOAT: tl.constexpr = x_ptrs.dtype.element_ty
    s0, s1, s2, s3 = _scales(s_ptrs, FLOAT, FOLDED)
    for part in tl.static_range(32 // DEPTH):
        at = x_ptrs + part * DEPTH
        w0, w1, w2, w3 = _planes(w_ptrs + part * DEPTH, FLOAT, FOLDED, DECODER, INTERP)
        # In this order the assembler needs the fewest registers; found by trial, kept by the gate.
        x = _load_plane(at, m, limit, left, 2, WHOLE)
        acc = _add_product(acc, x, w2, s2, FOLDED, SWAP, DECODER, INTERP)
        x = _load_plane(at, m, limit, left, 3, WHOLE)
        acc = _add_product(acc, x, w3, s3, FOLDED, SWAP, DECODER, INTERP)
        x = _load_plane(at, m, limit, left, 0, WHOLE)
        acc = _add_product(acc, x, w0, s0, FOLDED, SWAP, DECODER, INTERP)
        x = _load_plane(at, m, limit, left, 1, WHOLE)
        acc = _add_product(acc, x, w1, s1, FOLDED, SWAP, DECODER, INTERP)
    return acc


@triton.jit
def sum_chunks(
    x_ptrs,
    m,
    limit,
    w_ptrs,
    s_ptrs,
    s_stride,
    first,
    last,
    K,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    FOLDED: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    DECODER: tl.constexpr,
    INTERP: tl.constexpr,
):
    """float32 [TOKENS, ROWS]: the product over chunks `first` to `last` (exclusive).

    The pointers stand at chunk `first` and at rows of x that exist; `m` int32 [TOKENS, 1] counts
    the rows, and those from `limit` on are repetitions that need not be read. Without EVEN_K the
    last chunk of all ends inside the padding of the weight, where x has no columns; small tiles
    take it out of the loop, large ones have no registers for a second body.
    """
    if SWAP:
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
    else:
        acc = tl.zeros((TOKENS, ROWS), tl.float32)
    IN_LOOP: tl.constexpr = EVEN_K or TOKENS >= _UNMASKED_TOKENS
    whole = last if IN_LOOP else tl.minimum(last, K // 128)
    left = K - first * 128
    for _ in range(first, whole):
        acc = _add_chunk(
            acc,
            x_ptrs,
            m,
            limit,
            w_ptrs,
            s_ptrs,
            left,
            DEPTH,
            FOLDED,
            SWAP,
            EVEN_K or not IN_LOOP,
            DECODER,
            INTERP,
        )
        x_ptrs += 128
        w_ptrs += 32
        s_ptrs += s_stride
        left -= 128
    if not IN_LOOP:
        if whole < last:
            acc = _add_chunk(
                acc,
                x_ptrs,
                m,
                limit,
                w_ptrs,
                s_ptrs,
                left,
                DEPTH,
                FOLDED,
                SWAP,
                False,
                DECODER,
                INTERP,
            )
    if SWAP:
        acc = acc.T
    return acc


@triton.jit
def _tile(tile, M, N, TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Tile coordinates (along M, along N): GROUP tiles along M share a weight tile in the cache."""
    tiles_m = tl.cdiv(M, TOKENS)
    tiles_n = tl.cdiv(N, ROWS)
    band = tile // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = tile - band * GROUP * tiles_n
    return band * GROUP + within % height, within // height


@triton.jit
def dense_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    factor_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrival_ptr,
    M,
    N,
    K,
    chunks,
    x_stride,
    w_stride,
    s_stride,
    out_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLDED: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DECODER: tl.constexpr,
    INTERP: tl.constexpr,
):
    """One tile of y. With SPLIT > 1 the last of its programs to arrive adds the partial sums.

    They are added in the order of K whoever arrives last, so the result is always the same.
    `partial` is float32 [SPLIT, M, N], `arrival` int32 [tiles], zero at the start.
    """
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tile_m, tile_n = _tile(tile, M, N, TOKENS, ROWS, GROUP)
    lane = tl.arange(0, DEPTH)
    per_split = tl.cdiv(chunks, SPLIT)
    first = split * per_split
    last = tl.minimum(first + per_split, chunks)

    # Rows that do not exist repeat the last one; their results are not stored. A base for the tile
    # and offsets within it leave fewer registers to the addresses.
    rows = M - tile_m * TOKENS
    x_row = tl.minimum(tl.arange(0, TOKENS), rows - 1).to(tl.int64)[:, None]
    w_row = tl.arange(0, ROWS).to(tl.int64)[:, None]
    x_base = x_ptr + (tile_m * TOKENS).to(tl.int64) * x_stride + first * 128
    w_base = w_ptr + (tile_n * ROWS).to(tl.int64) * w_stride + first * 32
    s_base = s_ptr + first.to(tl.int64) * s_stride + tile_n * ROWS
    x_ptrs = x_base + (x_row * x_stride + lane[None, :])
    w_ptrs = w_base + (w_row * w_stride + lane[None, :])
    s_ptrs = s_base + tl.arange(0, ROWS)
    acc = sum_chunks(
        x_ptrs,
        tl.arange(0, TOKENS)[:, None],
        rows,
        w_ptrs,
        s_ptrs,
        s_stride,
        first,
        last,
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
    m = tile_m * TOKENS + tl.arange(0, TOKENS)
    n = tile_n * ROWS + tl.arange(0, ROWS)
    row = m.to(tl.int64)[:, None]
    mask = (m[:, None] < M) & (n[None, :] < N)
    out_ptrs = out_ptr + row * out_stride + n[None, :]
    if SPLIT == 1:
        _finish(acc, out_ptrs, mask, factor_ptr, bias_ptr, n, N, FLOAT, HAS_BIAS, INTERP)
    else:
        partial_ptrs = partial_ptr + row * N + n[None, :]
        plane = M.to(tl.int64) * N
        tl.store(partial_ptrs + split * plane, acc, mask=mask)
        # All threads have stored before one of them announces it.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrival_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            acc = tl.zeros((TOKENS, ROWS), tl.float32)
            for i in range(SPLIT):
                acc += tl.load(partial_ptrs + i * plane, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(acc, out_ptrs, mask, factor_ptr, bias_ptr, n, N, FLOAT, HAS_BIAS, INTERP)


@triton.jit
def _finish(
    acc,
    out_ptrs,
    mask,
    factor_ptr,
    bias_ptr,
    n,
    N,
    FLOAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERP: tl.constexpr,
):
    """Apply the common factor and the bias, round and store."""
    acc = acc * tl.load(factor_ptr)
    if HAS_BIAS:
        acc += widen(tl.load(bias_ptr + n, mask=n < N, other=0.0))[None, :]
    tl.store(out_ptrs, narrow(acc, FLOAT, INTERP), mask=mask)
