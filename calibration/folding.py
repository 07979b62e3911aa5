"""Move channel scales between layers where that changes nothing, so that rounding hurts less.

A norm whose gain is divided by s and linears whose columns are multiplied by s compute the same
(Lin et al., AWQ, arXiv 2306.00978). With s growing with the size of a channel's inputs, large
channels get the finer part of a block's grid. Two kinds of pairs are known here, and each use is
checked by running the layer before and after:

- a norm and all linears that read it. The new gain is rounded to the source dtype first and s is
  made from it, so that the file holds exactly what was calibrated;
- rows of one projection and columns of the next (up and down, v and o). Inside experts only powers
  of two are used: they move into the scale bytes of rows that are rounded already.
"""

from __future__ import annotations

import torch

from mxfp4.calibration.moments import output_error
from mxfp4.calibration.rounding import round_even
from mxfp4.spec import MAX_SCALE_BYTE

STRENGTHS = (0.0, 0.15, 0.3, 0.45, 0.6)
"""Exponents of a channel's input size that are tried; 0 means no folding."""


def channel_scales(
    weight: torch.Tensor, hessian: torch.Tensor, *, powers_of_two: bool
) -> torch.Tensor:
    """Scales [B, K] for the columns of `weight` [B, N, K] with the least error of plain rounding.

    `hessian` [B, K, K] are the moments of the inputs before scaling. A channel without input keeps
    the scale 1.
    """
    size = hessian.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    alive = size > 0
    logarithm = size.clamp(min=1e-20).log2().masked_fill(~alive, 0)
    middle = logarithm.sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp(min=1)
    spread = (logarithm - middle).masked_fill(~alive, 0)
    best = torch.ones_like(size)
    least = torch.full(size.shape[:1], torch.inf)
    for strength in STRENGTHS:
        exponent = strength * spread
        scale = torch.exp2(exponent.round() if powers_of_two else exponent)
        values = round_even(weight * scale.unsqueeze(1)).values() / scale.unsqueeze(1)
        error = output_error(weight, values, hessian)
        better = (error < least).unsqueeze(-1)
        best = torch.where(better, scale, best)
        least = torch.minimum(error, least)
    return best


def storable_gain(
    gain: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm gain over `scale` [K] as `dtype` can hold it, and the scale that this stands for.

    Channels whose gain is zero, or would become so, keep both gain and scale.
    """
    wanted = (gain / scale).to(dtype).to(gain.dtype)
    usable = (wanted != 0) & wanted.isfinite() & (gain != 0)
    folded = torch.where(usable, wanted, gain)
    return folded, torch.where(usable, gain / folded, torch.ones_like(gain))


def shift_rows(scales: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Scale bytes [N, K/32] with row n divided by 2^exponent[n]."""
    return (scales.int() - exponent.int().unsqueeze(-1)).to(torch.uint8)


def limit_shift(scales: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """`exponent` [N] set to zero for rows whose scale bytes could not be shifted by it."""
    moved = scales.int() - exponent.int().unsqueeze(-1)
    inside = ((moved >= 0) & (moved <= MAX_SCALE_BYTE)).all(-1)
    return torch.where(inside, exponent, torch.zeros_like(exponent))


def rows_of_columns(row_count: int, column_count: int, head_size: int | None) -> torch.Tensor:
    """For each input channel of the second projection, the row of the first that makes it; [K].

    With grouped-query attention several query heads read the same v head of `head_size` rows.
    """
    column = torch.arange(column_count)
    if head_size is None or row_count == column_count:
        return column
    repeat = column_count // row_count
    return column // head_size // repeat * head_size + column % head_size


def shared_mean(logarithm: torch.Tensor, rows: torch.Tensor, row_count: int) -> torch.Tensor:
    """One logarithm per row [N]: the mean over the channels [K] that it makes."""
    total = torch.zeros(row_count).index_add_(0, rows, logarithm)
    count = torch.zeros(row_count).index_add_(0, rows, torch.ones_like(logarithm))
    return total / count.clamp(min=1)
