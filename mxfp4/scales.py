"""E8M0 shared scales: from the largest magnitude of a block to one byte, and back.

Byte b means 2^(b - 127). Byte 255 means NaN and is never written; 253 and 254 are never written
either, because their blocks can overflow float32 and bfloat16.
"""

from __future__ import annotations

import torch

from mxfp4.spec import E8M0_BIAS, E8M0_NAN, MAX_SCALE_BYTE, SCALE_BIAS, ScaleRule


def scale_bytes(amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """Scale bytes (int32, 0 to 252) of block maxima `amax` (float32, finite, not negative).

    For `ScaleRule.SEARCH` this is the middle of the three candidates. Formula: see `ScaleRule`.

    >>> scale_bytes(torch.tensor([0.0, 6.0, 6.99, 7.0]), ScaleRule.EVEN).tolist()
    [0, 127, 127, 128]
    """
    byte = ((amax.view(torch.int32) + SCALE_BIAS[rule]) >> 23) - 2
    return byte.clamp(0, MAX_SCALE_BYTE)


def inverse_scales(byte: torch.Tensor) -> torch.Tensor:
    """2^(127 - b) as float32, for bytes 0 to 252."""
    return torch.exp2((E8M0_BIAS - byte).double()).float()


def decode_scales(byte: torch.Tensor) -> torch.Tensor:
    """2^(b - 127) as float32 for uint8 bytes of any shape; NaN for byte 255.

    >>> decode_scales(torch.tensor([127, 130, 0], dtype=torch.uint8)).tolist()
    [1.0, 8.0, 5.877471754111438e-39]
    """
    scale = torch.exp2((byte.int() - E8M0_BIAS).double()).float()
    return scale.masked_fill(byte == E8M0_NAN, torch.nan)
