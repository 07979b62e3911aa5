"""GPTQ with fixed scales in activation order, for a stack of matrices at once.

Columns are rounded one after the other, those with the largest inputs first, and the columns still
to come take over the error as far as their inputs are correlated (Frantar et al., GPTQ, arXiv
2210.17323). Scales are chosen before the first column is rounded, so that the order of columns is
free although blocks stay contiguous in the file.
"""

from __future__ import annotations

import torch

from mxfp4.calibration.rounding import Rounded, column_scales, nearest_elements

_STEP = 64
"""Columns between two updates of all later columns; changes speed, and sums by rounding only."""


def gptq(weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor) -> Rounded:
    """Round `weight` float32 [B, N, K] with the given scales (uint8 [B, N, K/32]).

    `hessian` float32 [B, K, K] is positive definite (see `moments.damped`). The result minimises
    tr((W - Q) H (W - Q)^T) greedily, column by column.
    """
    order = hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    across = order.unsqueeze(1).expand(-1, weight.shape[1], -1)
    left = weight.gather(2, across)
    step = column_scales(scales).gather(2, across)
    factor = inverse_factor(_permuted(hessian, order))
    elements = torch.empty_like(left)
    columns = weight.shape[2]
    for start in range(0, columns, _STEP):
        stop = min(start + _STEP, columns)
        errors = _round_columns(
            left[:, :, start:stop].clone(),
            step[:, :, start:stop],
            factor[:, start:stop, start:stop],
            elements[:, :, start:stop],
        )
        left[:, :, stop:] -= errors @ factor[:, start:stop, stop:]
    return Rounded(torch.empty_like(elements).scatter_(2, across, elements), scales)


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor U of H^-1 = U^T U, float32 [B, K, K].

    Computed in float64: H of few tokens is close to singular.
    """
    lower = torch.linalg.cholesky(hessian.double())
    inverse = torch.cholesky_inverse(lower)
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _permuted(hessian: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    columns = hessian.shape[-1]
    rows = hessian.gather(1, order.unsqueeze(2).expand(-1, -1, columns))
    return rows.gather(2, order.unsqueeze(1).expand(-1, columns, -1))


def _round_columns(
    left: torch.Tensor, step: torch.Tensor, factor: torch.Tensor, elements: torch.Tensor
) -> torch.Tensor:
    """Round the columns of one step into `elements`; returns their scaled errors [B, N, n]."""
    # Columns first, so that each is one piece of memory.
    left, step = left.permute(2, 0, 1).contiguous(), step.permute(2, 0, 1).contiguous()
    errors = torch.empty_like(left)
    for column in range(left.shape[0]):
        element = nearest_elements(left[column] / step[column])
        elements[:, :, column] = element
        errors[column] = (left[column] - element * step[column]) / factor[:, column, column, None]
        later = factor[:, column, column + 1 :].T.unsqueeze(-1)
        left[column + 1 :] -= errors[column] * later
    return errors.permute(1, 2, 0)
