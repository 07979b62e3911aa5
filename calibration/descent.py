"""Coordinate descent: move one element, or one scale, at a time while the output error falls.

GPTQ decides each column once, with the later ones still free. Going over all columns again with
the others fixed finds better elements for the exact quadratic tr((W - Q) H (W - Q)^T), and every
accepted move lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxfp4.calibration.rounding import Rounded, column_scales, move_scales, nearest_elements
from mxfp4.scales import decode_scales
from mxfp4.spec import BLOCK_SIZE


@dataclass
class _Block:
    """One block column of the stack while it is worked on.

    `values` and `slope` are [32, B, N]: the rounded weights and half the gradient of the error;
    `hessian` is [B, 32, 32].
    """

    values: torch.Tensor
    slope: torch.Tensor
    hessian: torch.Tensor

    def swept(self, scale: torch.Tensor) -> tuple[_Block, torch.Tensor]:
        """Each column set to its best element of the grid `scale` [B, N] in turn.

        Returns the new block and the change of the error, [B, N].
        """
        values, slope = self.values.clone(), self.slope.clone()
        change = torch.zeros_like(scale)
        for column in range(BLOCK_SIZE):
            curvature = self.hessian[:, column, column].unsqueeze(-1)
            wanted = values[column] - slope[column] / curvature
            value = nearest_elements(wanted / scale) * scale
            move = value - values[column]
            change += move * (2 * slope[column] + move * curvature)
            values[column] = value
            slope += move * self.hessian[:, column].T.unsqueeze(-1)
        return _Block(values, slope, self.hessian), change


def descend(
    weight: torch.Tensor,
    start: Rounded,
    hessian: torch.Tensor,
    *,
    sweeps: int,
    move_exponents: bool = True,
) -> Rounded:
    """Improve `start` for `weight` float32 [B, N, K] under `hessian` float32 [B, K, K].

    With `move_exponents`, each block also tries the next smaller and larger scale, and takes it
    where its elements then fit better.
    """
    values, scales = start.values(), start.scales.clone()
    slope = (values - weight) @ hessian
    for _ in range(sweeps):
        for block in range(scales.shape[-1]):
            window = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            found, byte = _improve(values, slope, hessian, scales, block, move_exponents)
            slope += (found - values[:, :, window]) @ hessian[:, window]
            values[:, :, window] = found
            scales[:, :, block] = byte
    return Rounded(values / column_scales(scales), scales)


def _improve(
    values: torch.Tensor,
    slope: torch.Tensor,
    hessian: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    move_exponents: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New values [B, N, 32] and scale bytes [B, N] of one block column."""
    window = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
    byte = scales[:, :, block]
    now = _Block(
        values[:, :, window].permute(2, 0, 1).contiguous(),
        slope[:, :, window].permute(2, 0, 1).contiguous(),
        hessian[:, window, window],
    )
    now, _ = now.swept(decode_scales(byte))
    best, gain = now.values, torch.zeros(byte.shape)
    for step in (-1, 1) if move_exponents else ():
        moved = move_scales(scales[:, :, block], step)
        other, change = now.swept(decode_scales(moved))
        better = change < gain
        best = torch.where(better, other.values, best)
        byte = torch.where(better, moved, byte)
        gain = torch.where(better, change, gain)
    return best.permute(1, 2, 0), byte
