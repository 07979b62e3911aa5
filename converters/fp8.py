"""FP8 E4M3 with one power of two per 128 x 128 block, and the count of blocks that lose something.

An MXFP4 element has two significant bits and E4M3 has four, so a block survives exactly unless
its values span more than about seventeen powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mxfp4.converters.formats.decoded import FP8_BLOCK
from mxfp4.converters.sources.scaled import E4M3_VALUES

_MAX = 448.0
_SMALLEST_NORMAL = 2.0**-6
_SUBNORMAL_STEPS = 2.0**9
_REBIAS = np.uint32(120 << 3)
"""Exponent bias 127 becomes 7."""


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """`values` uint8 [n, K]; `scales` float32 [ceil(n/128), ceil(K/128)]; inexact blocks."""

    values: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    lossy_blocks: int


def e4m3_bytes(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Nearest E4M3, ties to even, limited to 448; NaN becomes 0x7F."""
    magnitude = np.minimum(np.abs(values), np.float32(_MAX))
    bits = magnitude.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(
        20
    )
    with np.errstate(invalid="ignore"):
        small = np.rint(magnitude * np.float32(_SUBNORMAL_STEPS)).astype(np.uint32)
    codes = np.where(magnitude < _SMALLEST_NORMAL, small, rounded - _REBIAS).astype(np.uint8)
    codes = np.where(np.isnan(values), np.uint8(0x7F), codes)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def encode_fp8_blocks(values: npt.NDArray[np.float32]) -> Fp8Blocks:
    """Encode float32 [n, K]; every block gets the power of two that brings its maximum below 448.

    A block of zeros gets the scale 1.
    """
    rows, columns = values.shape
    grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    padded = np.zeros((grid[0] * FP8_BLOCK, grid[1] * FP8_BLOCK), np.float32)
    padded[:rows, :columns] = values
    blocks = padded.reshape(grid[0], FP8_BLOCK, grid[1], FP8_BLOCK)
    largest = np.abs(blocks).max(axis=(1, 3))
    fraction, exponent = np.frexp(largest)
    # largest = fraction * 2^exponent, fraction in [1/2, 1): 448 is 0.875 * 2^9.
    power = exponent - np.where(fraction > _MAX / 512, 8, 9)
    power = np.clip(np.where(largest > 0, power, 0), -126, 127)
    scales = np.ldexp(np.float32(1), power).astype(np.float32)
    spread = np.broadcast_to(scales[:, None, :, None], blocks.shape)
    encoded = e4m3_bytes((blocks / spread).astype(np.float32, copy=False))
    back = E4M3_VALUES[encoded] * spread
    lossy = int((back != blocks).any(axis=(1, 3)).sum())
    kept = encoded.reshape(padded.shape)[:rows, :columns]
    return Fp8Blocks(np.ascontiguousarray(kept), scales, lossy)
