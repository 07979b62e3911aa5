"""Dense products with a packed weight: choose a tile, launch, or go through a bounded scratch."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from mxfp4.errors import ShapeError
from mxfp4.kernels.triton import configs
from mxfp4.kernels.triton.bits import CHUNK
from mxfp4.kernels.triton.configs import Regime, TileConfig
from mxfp4.kernels.triton.device import INTERPRET, describe, launch
from mxfp4.kernels.triton.expand_kernel import expand_kernel
from mxfp4.kernels.triton.layout import ROW_MULTIPLE, PackedWeight
from mxfp4.kernels.triton.product_kernel import dense_kernel
from mxfp4.kernels.tuning import tuned_config

HYBRID_TOKENS = 2048
"""From here on, dequantizing into scratch costs less than a fused product loses to the vendor's.
From a model of the costs (fused at 85 to 90 % of the vendor's speed), not yet from measurements."""

_EXPAND_ROWS = 64
_EXPAND_WARPS = 4


def matmul(
    x: torch.Tensor,
    w: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    scratch_bytes: int = 0,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """y = x w^T + bias: x [..., K], w [N, K], bias [N], y [..., N] in the dtype of x.

    Sums are float32. Rows of up to 16 tokens are the same bits in every such batch, and every
    result is the same bits on every run. From `HYBRID_TOKENS` tokens on, slabs of the weight of at
    most `scratch_bytes` are dequantized for the vendor's product; 0 forbids it. Never waits for
    the device. `config` overrides the tables. Raises `ShapeError` and `DtypeError`.
    """
    check_product(x, w, bias)
    if w.experts is not None:
        raise ShapeError(
            f"a dense product takes a weight [N, K], seen a bank {list(w.shape)}",
            hint="use grouped_matmul",
        )
    flat = x.reshape(-1, w.columns)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    tokens = flat.shape[0]
    out = flat.new_empty(tokens, w.rows)
    if not tokens:
        return out.view(*x.shape[:-1], w.rows)
    slab = 0
    if tokens >= HYBRID_TOKENS and w.expandable and config is None:
        slab = scratch_bytes // (w.columns * flat.element_size()) // ROW_MULTIPLE * ROW_MULTIPLE
    if slab:
        _through_scratch(flat, w, bias, out, slab)
    else:
        _fused(flat, w, bias, out, config or choose(flat.device, w, configs.regime_of(tokens)))
    return out.view(*x.shape[:-1], w.rows)


def choose(device: torch.device, w: PackedWeight, regime: Regime) -> TileConfig:
    """The tile for a regime: from the user's tuning if there is any, else from the tables."""
    facts = describe(device)
    config = tuned_config(device, w.shape, regime) if w.folded else None
    if config is None:
        table = configs.table_of(facts.architecture)
        config = configs.tile_of(table, regime, folded=w.folded)
    return replace(config, decoder="plain") if INTERPRET else config


def check_product(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None) -> None:
    """Raise unless x [..., K] and bias [(E,) N] fit the weight in shape, dtype and device."""
    w.check_activations(x)
    if x.device != w.device:
        raise ShapeError(f"x is on {x.device}, the weight on {w.device}")
    if bias is None:
        return
    if tuple(bias.shape) != w.shape[:-1]:
        raise ShapeError(f"bias must be {list(w.shape[:-1])}, seen {list(bias.shape)}")
    if bias.device != w.device or not bias.is_contiguous():
        raise ShapeError(f"bias must be contiguous on {w.device}")


def expand(w: PackedWeight, first: int, last: int, out: torch.Tensor) -> None:
    """Dequantize rows `first` to `last` (exclusive) of a dense weight, out is [last - first, K]."""
    chunks = w.scales.shape[1]
    grid = (triton.cdiv(last - first, _EXPAND_ROWS), chunks)
    launch(
        expand_kernel,
        grid,
        w.words,
        w.scales,
        w.factors,
        out,
        first,
        last,
        w.columns,
        w.words.stride(1),
        w.scales.stride(1),
        out.stride(0),
        ROWS=_EXPAND_ROWS,
        FOLDED=w.folded,
        DECODER="plain" if INTERPRET or torch.version.hip else "ptx",
        INTERP=INTERPRET,
        num_warps=_EXPAND_WARPS,
    )


def _fused(
    x: torch.Tensor,
    w: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: TileConfig,
) -> None:
    tokens, chunks = x.shape[0], w.scales.shape[1]
    split = configs.split_of(config, w.rows, chunks, describe(x.device).cores)
    tiles = triton.cdiv(tokens, config.tokens) * triton.cdiv(w.rows, config.rows)
    partial, arrivals = out, w.factors
    if split > 1:
        partial = x.new_empty(split, tokens, w.rows, dtype=torch.float32)
        arrivals = x.new_zeros(tiles, dtype=torch.int32)
    launch(
        dense_kernel,
        (tiles, split),
        x,
        w.words,
        w.scales,
        w.factors,
        out if bias is None else bias,
        out,
        partial,
        arrivals,
        tokens,
        w.rows,
        w.columns,
        chunks,
        x.stride(0),
        w.words.stride(1),
        w.scales.stride(1),
        out.stride(0),
        TOKENS=config.tokens,
        ROWS=config.rows,
        DEPTH=config.depth,
        GROUP=config.group,
        SPLIT=split,
        FOLDED=w.folded,
        SWAP=config.swap,
        EVEN_K=w.columns % CHUNK == 0,
        HAS_BIAS=bias is not None,
        DECODER=config.decoder,
        INTERP=INTERPRET,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _through_scratch(
    x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor, slab: int
) -> None:
    """The product by slabs of at most `slab` rows of the weight, dequantized one after another."""
    scratch = x.new_empty(min(slab, w.rows), w.columns)
    for first in range(0, w.rows, slab):
        last = min(first + slab, w.rows)
        part = scratch[: last - first]
        expand(w, first, last, part)
        if bias is None:
            torch.mm(x, part.T, out=out[:, first:last])
        else:
            torch.addmm(bias[first:last].to(x.dtype), x, part.T, out=out[:, first:last])
