"""How near calibrated codes are to their source, where no fresh encoding can be compared.

Calibration moves single elements by more than rounding would, but whole modules and blocks stay
near their source: a module's relative error is at most some multiple of that of plain rounding, and
no block is far from its own values. Scales that were moved between rows and columns (see folds) are
fitted away first, so that they do not count as errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mxfp4.kernels.rows import decode_rows
from mxfp4.spec import BLOCK_SIZE

MODULE_BOUND = 3.0
"""A module's relative error over that of plain rounding. Calibration was seen to give 1.2 to 2.4;
a matrix of another module gives about 12."""

_ALIKE, UNLIKE_BOUND = 0.3, 0.25
"""Above that error a module passes only if at most this share of its blocks has a cosine below
`_ALIKE` with the source: a fold may shrink channels that hardly any input reaches until their
weights vanish, but signs stay. Blocks of another module have cosines around zero."""

BLOCK_BOUND = 2.0
"""Error of a block over its own norm..."""
BLOCK_FLOOR = 2.0
"""... plus this much of the module's mean block norm, for blocks of small values move more.
Calibration was seen to give 1.9 and 0.9."""

_OFF = 0.3
"""Moved scales are looked for when most blocks of a row, or of a column of blocks, are off by more
than this share of their norm: single damaged blocks must not be fitted away."""

_EXACT = 1e-6
"""Weights that MXFP4 holds exactly have no error to be a multiple of."""

_FIT_ROUNDS = 4
_Values = NDArray[np.float32]


@dataclass
class Nearness:
    """Sums over the bands of one module; `far` are (row, block) of blocks far from their source."""

    signal: float = 0.0
    error: float = 0.0
    even_error: float = 0.0
    rows: int = 0
    blocks: int = 0
    unlike: int = 0
    rescaled: bool = False
    far: list[tuple[int, int]] = field(default_factory=list)

    @property
    def relative(self) -> float:
        """Relative L2 error of the stored codes."""
        return _ratio(self.error, self.signal)

    @property
    def relative_even(self) -> float:
        """Relative L2 error of plain rounding with the scale rule `even`."""
        return _ratio(self.even_error, self.signal)

    @property
    def fits(self) -> bool:
        """Whether calibration can explain the error."""
        near = self.relative <= MODULE_BOUND * self.relative_even + _EXACT
        return near or self.unlike <= UNLIKE_BOUND * self.blocks

    def add(
        self,
        source: _Values,
        even: tuple[NDArray[np.uint8], NDArray[np.uint8]],
        stored: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    ) -> None:
        """Judge rows [n, K] of a module: source values, fresh and stored codes with scales."""
        values = decode_rows(*stored, "F32").astype(np.float32, copy=False).reshape(source.shape)
        plain = decode_rows(*even, "F32").astype(np.float32, copy=False).reshape(source.shape)
        even_error, signal = _squares(plain - source), _squares(source)
        error = _squares(values - source)
        self.blocks += source.size // BLOCK_SIZE
        self.unlike += _unlike(source, values)
        if _scales_moved(source, values):
            fitted = unscaled(source, values)
            fitted_error = _squares(fitted - source)
            if fitted_error < error / 2:
                values, error, self.rescaled = fitted, fitted_error, True
        self.signal += signal
        self.error += error
        self.even_error += even_error
        self.far += [(self.rows + row, block) for row, block in far_blocks(source, values)]
        self.rows += len(source)


def far_blocks(source: _Values, values: _Values) -> list[tuple[int, int]]:
    """(row, block) of every block of 32 whose values are not near those of the source."""
    size, distance = _by_block(source, values)
    allowed = BLOCK_BOUND * size + BLOCK_FLOOR * np.sqrt((size**2).mean())
    return [(int(row), int(block)) for row, block in np.argwhere(distance > allowed)]


def unscaled(source: _Values, values: _Values) -> _Values:
    """`values` [n, K] with positive scales of rows and columns removed that best match `source`."""
    wanted, fitted = source.astype(np.float64), values.astype(np.float64)
    for _ in range(_FIT_ROUNDS):
        for axis in (0, 1):
            overlap = (wanted * fitted).sum(axis, keepdims=True)
            energy = (fitted**2).sum(axis, keepdims=True)
            usable = (overlap > 0) & (energy > 0)
            fitted *= np.where(usable, overlap / np.where(energy > 0, energy, 1), 1)
    return fitted.astype(np.float32)


def _unlike(source: _Values, values: _Values) -> int:
    """How many blocks do not point the way of the source's."""
    shape = (-1, BLOCK_SIZE)
    one, other = source.reshape(shape), values.reshape(shape)
    overlap = (one * other).sum(-1)
    size = np.sqrt((one**2).sum(-1) * (other**2).sum(-1))
    return int((overlap < _ALIKE * size).sum())


def _scales_moved(source: _Values, values: _Values) -> bool:
    size, distance = _by_block(source, values)
    off = distance > _OFF * size
    return bool(off.mean(0).max() > 0.5 or off.mean(1).max() > 0.5)


def _by_block(source: _Values, values: _Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Norm of every block of the source, and its distance to the values; [n, K/32] each."""
    blocks = source.reshape(len(source), -1, BLOCK_SIZE).astype(np.float64)
    error = values.reshape(blocks.shape) - blocks
    return np.sqrt((blocks**2).sum(-1)), np.sqrt((error**2).sum(-1))


def _squares(values: _Values) -> float:
    return float((values.astype(np.float64) ** 2).sum())


def _ratio(error: float, signal: float) -> float:
    return float(np.sqrt(error / signal)) if signal else float(error > 0)
