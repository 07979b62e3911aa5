"""Device code that sorts tokens by expert, cuts the sorted rows into tiles, and adds results up.

Nothing is counted with atomics, so every order is the order of the tokens and every run is alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4.kernels.triton.decode import narrow, widen


@triton.jit
def route_kernel(ids_ptr, order_ptr, slot_ptr, ends_ptr, entries, BLOCK: tl.constexpr):
    """One program an expert: a stable counting sort of `entries` pairs (token, choice) by expert.

    `ids` int32 [entries]; out come `order` (sorted place to entry), `slot` (entry to sorted place)
    and `ends` (end of each expert's places). Ids that are no expert's are left out.
    """
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    mine = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, entries, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + entry, mask=entry < entries, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
        mine += (ids == expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(ends_ptr + expert, place + tl.sum(mine, axis=0))
    for first in range(0, entries, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + entry, mask=entry < entries, other=-1)
        here = (ids == expert).to(tl.int32)
        places = place + tl.cumsum(here, axis=0) - here
        tl.store(order_ptr + places, entry, mask=here == 1)
        tl.store(slot_ptr + entry, places, mask=here == 1)
        place += tl.sum(here, axis=0)


@triton.jit
def tile_kernel(
    ends_ptr,
    tiles_ptr,
    tiles,
    experts,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tiles of at most TOKENS rows that never cross from one expert to the next.

    `tiles` int32 [3, tiles]: expert, first row, rows; 0 rows for the tiles that are not needed.
    EXPERTS is `experts` rounded up to a power of two.
    """
    expert = tl.arange(0, EXPERTS)
    exists = expert < experts
    ends = tl.load(ends_ptr + expert, mask=exists, other=0)
    starts = tl.load(ends_ptr + expert - 1, mask=exists & (expert > 0), other=0)
    needed = tl.where(exists, tl.cdiv(ends - starts, TOKENS), 0)
    through = tl.cumsum(needed, axis=0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    passed = (exists[None, :] & (through[None, :] <= tile[:, None])).to(tl.int32)
    owner = tl.sum(passed, axis=1)
    position = tile - tl.sum(passed * needed[None, :], axis=1)
    used = (tile < tiles) & (owner < experts)
    start = tl.load(ends_ptr + owner - 1, mask=used & (owner > 0), other=0)
    end = tl.load(ends_ptr + owner, mask=used, other=0)
    first = start + position * TOKENS
    rows = tl.where(used, tl.minimum(end - first, TOKENS), 0)
    tl.store(tiles_ptr + tile, owner, mask=tile < tiles)
    tl.store(tiles_ptr + tiles + tile, first, mask=tile < tiles)
    tl.store(tiles_ptr + 2 * tiles + tile, rows, mask=tile < tiles)


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    slot_ptr,
    weight_ptr,
    out_ptr,
    experts,
    choices,
    N,
    y_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    INTERP: tl.constexpr,
):
    """out[t] = sum over the choices j of token t, in order, of weight[t, j] * y[slot[t, j]]."""
    FLOAT: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(choices):
        entry = token * choices + choice
        expert = tl.load(ids_ptr + entry)
        if (expert >= 0) & (expert < experts):
            slot = tl.load(slot_ptr + entry).to(tl.int64)
            weight = widen(tl.load(weight_ptr + entry))
            acc += weight * widen(tl.load(y_ptr + slot * y_stride + n, mask=n < N, other=0.0))
    tl.store(out_ptr + token * out_stride + n, narrow(acc, FLOAT, INTERP), mask=n < N)
