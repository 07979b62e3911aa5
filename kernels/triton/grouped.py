"""Products of a mixture of experts: rows grouped by expert, and the whole routed layer.

Shapes decide every launch, values never do: grids are upper bounds, tiles beyond the rows end at
once, and nothing waits for the device. So the calls can be captured in graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from mxfp4.errors import DtypeError, ShapeError
from mxfp4.kernels.activations import NO_ACTIVATION, Activation, ActivationOptions
from mxfp4.kernels.triton import configs
from mxfp4.kernels.triton.bits import CHUNK
from mxfp4.kernels.triton.configs import TileConfig
from mxfp4.kernels.triton.device import INTERPRET, launch
from mxfp4.kernels.triton.grouped_kernel import grouped_kernel
from mxfp4.kernels.triton.layout import PackedWeight
from mxfp4.kernels.triton.product import check_product, choose
from mxfp4.kernels.triton.routing_kernel import combine_kernel, route_kernel, tile_kernel

_ROUTE_BLOCK = 1024
_TILE_BLOCK = 16
_COMBINE_COLUMNS = 1024


ACTIVATIONS = (Activation.NONE, Activation.SWIGLU, Activation.SWIGLU_OAI)
"""By their number in device code."""


@dataclass(frozen=True)
class Routing:
    """Pairs (token, choice) in the order of experts.

    `order` int32 [T * k]: the pair at each sorted place; `slot` int32 [T * k]: the place of each
    pair; `ends` int32 [E]: where the places of each expert end. Entries of ids that are no expert's
    are not written.
    """

    order: torch.Tensor
    slot: torch.Tensor
    ends: torch.Tensor


def grouped_matmul(
    x: torch.Tensor,
    w: PackedWeight,
    ends: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """Rows of x [T, K] times the weight of their expert: w [E, N, K], bias [E, N], y [T, N].

    Expert e has the rows from `ends[e - 1]` (0 for the first) to `ends[e]`; `ends` is int32 [E] on
    the device. Rows of y beyond the last end are not written.
    """
    _check_bank(x, w, bias)
    if ends.dtype != torch.int32 or tuple(ends.shape) != w.shape[:1] or ends.device != w.device:
        raise ShapeError(
            f"ends must be int32 [{w.shape[0]}] on {w.device}, seen {ends.dtype} {list(ends.shape)}"
            f" on {ends.device}"
        )
    config = config or _config(x.shape[0], w)
    return _launch(x, w, bias, ends.contiguous(), x.shape[0], None, 1, NO_ACTIVATION, config)


def fused_experts(
    x: torch.Tensor,
    w_in: PackedWeight,
    w_out: PackedWeight,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias_in: torch.Tensor | None = None,
    bias_out: torch.Tensor | None = None,
    activation: ActivationOptions | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """The routed experts of one layer for x [T, H], y [T, H].

    w_in [E, 2 I, H] has its rows in the order gate, up, gate, up, ... (see `layout.interleave`) and
    bias_in [E, 2 I] likewise; w_out is [E, H, I], bias_out [E, H]. Token t goes to the experts
    ids[t, j], int32 or int64 [T, k]; their results, rounded to the dtype of x, are added with
    weights[t, j], float32 or as x, in the order of j. Ids outside 0..E-1 add nothing, which is what
    an expert-parallel rank needs.
    """
    activation = activation or ActivationOptions()
    _check_bank(x, w_in, bias_in)
    hidden = x.new_empty(0, w_in.rows // 2)
    _check_bank(hidden, w_out, bias_out)
    if w_out.shape != (w_in.shape[0], x.shape[1], w_in.rows // 2) or w_in.rows % 2:
        raise ShapeError(
            f"w_in [E, 2 I, H] and w_out [E, H, I] are needed, seen {list(w_in.shape)} and "
            f"{list(w_out.shape)}"
        )
    if ids.shape != weights.shape or ids.ndim != 2 or ids.shape[0] != x.shape[0]:
        raise ShapeError(
            f"ids and weights must be [{x.shape[0]}, k], seen {list(ids.shape)} and "
            f"{list(weights.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64) or weights.dtype not in (torch.float32, x.dtype):
        raise DtypeError(
            f"ids must be integers and weights floats, seen {ids.dtype} and {weights.dtype}"
        )
    if not ids.numel():
        return torch.zeros_like(x)
    ids, weights = ids.to(torch.int32).contiguous(), weights.contiguous()
    entries, choices = ids.numel(), ids.shape[1]
    routing = route(ids, w_in.shape[0])
    config = config or _config(entries, w_in)
    hidden = _launch(
        x, w_in, bias_in, routing.ends, entries, routing.order, choices, activation, config
    )
    y = _launch(hidden, w_out, bias_out, routing.ends, entries, None, 1, NO_ACTIVATION, config)
    return _combine(y, routing, ids, weights, w_in.shape[0])


def route(ids: torch.Tensor, experts: int) -> Routing:
    """Sort int32 ids [T, k] by expert, stably, on the device."""
    order, slot = torch.empty_like(ids.view(-1)), torch.empty_like(ids.view(-1))
    ends = ids.new_empty(experts)
    launch(route_kernel, (experts,), ids, order, slot, ends, ids.numel(), BLOCK=_ROUTE_BLOCK)
    return Routing(order, slot, ends)


def tile_table(ends: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """int32 [3, tiles], see `routing_kernel.tile_kernel`, for at most `rows` rows in all."""
    experts = ends.numel()
    # Every expert with rows has at most one tile that is not full.
    tiles = rows // tokens + min(experts, rows)
    table = ends.new_empty(3, tiles)
    launch(
        tile_kernel,
        (triton.cdiv(tiles, _TILE_BLOCK),),
        ends,
        table,
        tiles,
        experts,
        TOKENS=tokens,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK=_TILE_BLOCK,
    )
    return table


def _config(rows: int, w: PackedWeight) -> TileConfig:
    """The tile for the rows that an expert sees when they are spread evenly."""
    return choose(w.device, w, configs.regime_of(-(-rows // w.shape[0])))


def _check_bank(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None) -> None:
    check_product(x, w, bias)
    if w.experts is None or x.ndim != 2:
        raise ShapeError(
            f"x [T, K] and a bank [E, N, K] are needed, seen {list(x.shape)} and {list(w.shape)}"
        )


def _launch(
    x: torch.Tensor,
    w: PackedWeight,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    rows: int,
    order: torch.Tensor | None,
    choices: int,
    activation: ActivationOptions,
    config: TileConfig,
) -> torch.Tensor:
    """The product of `rows` sorted rows; of x itself, or gathered from it by `order`."""
    kind = ACTIVATIONS.index(activation.kind)
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(rows, w.rows // 2 if kind else w.rows)
    if not rows:
        return out
    table = tile_table(ends, rows, config.tokens)
    tiles = table.shape[1]
    launch(
        grouped_kernel,
        (tiles, triton.cdiv(w.rows, config.rows)),
        x,
        ends if order is None else order,
        w.words,
        w.scales,
        w.factors,
        out if bias is None else bias,
        out,
        table,
        tiles,
        choices,
        w.rows,
        w.columns,
        w.scales.shape[1],
        x.stride(0),
        w.words.stride(0),
        w.words.stride(1),
        w.scales.stride(0),
        w.scales.stride(1),
        out.stride(0),
        activation.limit,
        activation.alpha,
        TOKENS=config.tokens,
        ROWS=config.rows,
        DEPTH=config.depth,
        GATHER=order is not None,
        ACTIVATION=kind,
        FOLDED=w.folded,
        SWAP=config.swap,
        EVEN_K=w.columns % CHUNK == 0,
        HAS_BIAS=bias is not None,
        DECODER=config.decoder,
        INTERP=INTERPRET,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def _combine(
    y: torch.Tensor, routing: Routing, ids: torch.Tensor, weights: torch.Tensor, experts: int
) -> torch.Tensor:
    """Weighted sums of the rows of each token."""
    tokens, choices = ids.shape
    out = y.new_empty(tokens, y.shape[1])
    columns = min(_COMBINE_COLUMNS, triton.next_power_of_2(y.shape[1]))
    launch(
        combine_kernel,
        (tokens, triton.cdiv(y.shape[1], columns)),
        y,
        ids,
        routing.slot,
        weights,
        out,
        experts,
        choices,
        y.shape[1],
        y.stride(0),
        out.stride(0),
        COLUMNS=columns,
        INTERP=INTERPRET,
    )
    return out
