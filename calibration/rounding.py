"""Weights on the E2M1 grid in the making: element values and scale bytes, before they are packed.

Methods work on a stack of matrices at once: [B, N, K] float32, B being one for a dense layer and
the number of experts for a bank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxfp4.elements import encode_elements, pack_codes
from mxfp4.kernels.codec import quantize
from mxfp4.scales import decode_scales
from mxfp4.spec import BLOCK_SIZE, E2M1_MAX, MAX_SCALE_BYTE, ScaleRule, ZeroSign
from mxfp4.tensor import MXTensor


def nearest_elements(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 values, ties to the even code, magnitudes above 6 to 6.

    The step between neighbours is 0.5 below 2, 1 below 4 and 2 above, and in each of these ranges
    a multiple of the step with an even quotient is an even code, so that rounding half to even is
    the tie rule. Faster than counting midpoints, which matters in loops over columns.

    >>> nearest_elements(torch.tensor([0.25, 0.75, -2.5, 3.5, 5.0, 9.0])).tolist()
    [0.0, 1.0, -2.0, 4.0, 4.0, 6.0]
    """
    clipped = scaled.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = clipped.abs()
    step = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
    return torch.round(clipped / step) * step


@dataclass(frozen=True)
class Rounded:
    """`elements` float32 [B, N, K] of E2M1 values, `scales` uint8 [B, N, K/32] of E8M0 bytes."""

    elements: torch.Tensor
    scales: torch.Tensor

    def values(self) -> torch.Tensor:
        """What a reader of the codes sees: float32 [B, N, K]."""
        return self.elements * column_scales(self.scales)

    def pack(self) -> MXTensor:
        """Codes and scales of all B matrices."""
        # A negative value that was rounded to zero keeps its sign, as the codec's rule says.
        codes = pack_codes(encode_elements(self.elements, zero_sign=ZeroSign.SOURCE))
        return MXTensor(codes, self.scales, tuple(self.elements.shape))

    def where(self, chosen: torch.Tensor, other: Rounded) -> Rounded:
        """These matrices where `chosen` (bool [B]) is true, those of `other` elsewhere."""
        pick = chosen.view(-1, 1, 1)
        return Rounded(
            torch.where(pick, self.elements, other.elements),
            torch.where(pick, self.scales, other.scales),
        )


def column_scales(scales: torch.Tensor) -> torch.Tensor:
    """The scale of every column, float32 [..., K], from bytes [..., K/32]."""
    return decode_scales(scales).repeat_interleave(BLOCK_SIZE, dim=-1)


def round_with(weight: torch.Tensor, scales: torch.Tensor) -> Rounded:
    """Round every element to the grid of given scales (uint8 [B, N, K/32])."""
    # Adding zero drops the sign of an exact negative zero, which is not kept.
    return Rounded(nearest_elements((weight + 0.0) / column_scales(scales)), scales)


def round_even(weight: torch.Tensor) -> Rounded:
    """What a conversion without calibration writes: the scale rule "even", nearest elements."""
    return round_with(weight, quantize(weight, rule=ScaleRule.EVEN).scales)


def search_scales(weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Scale bytes with the least squared error weighted by `importance` (float [B, K], >= 0).

    The choice among three neighbours contains what "even" would take, so no block ends worse by
    that measure. A matrix whose columns all have no importance counts them equally.
    """
    silent = importance.amax(-1, keepdim=True) <= 0
    weights = torch.where(silent, torch.ones_like(importance), importance)
    # Only ratios count; the largest becomes one so that squared activations cannot overflow.
    weights = weights / weights.amax(-1, keepdim=True)
    found = [
        quantize(matrix, rule=ScaleRule.SEARCH, importance=row).scales
        for matrix, row in zip(weight, weights, strict=True)
    ]
    return torch.stack(found)


def move_scales(scales: torch.Tensor, step: int) -> torch.Tensor:
    """Scale bytes multiplied by 2^step within their range."""
    return (scales.int() + step).clamp(0, MAX_SCALE_BYTE).to(torch.uint8)
