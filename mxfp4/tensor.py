"""MXTensor: packed codes, shared scales, and the shape they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mxfp4.errors import DtypeError, ShapeError
from mxfp4.spec import BLOCK_SIZE


@dataclass(frozen=True, eq=False)
class MXTensor:
    """A tensor in MXFP4; checked once, when it is made.

    `shape` is the logical shape and `axis` the contraction axis, along which blocks run. It is
    stored last: with K the length of that axis, `codes` is uint8 [*other axes, K/2], two codes a
    byte with the even element in the low nibble, and `scales` is uint8 [*other axes, K/32].

    Raises `DtypeError` and `ShapeError` where these do not fit together.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, ...]
    axis: int = -1

    def __post_init__(self) -> None:
        """Check dtypes, shapes and devices, and make `axis` not negative."""
        shape = tuple(int(length) for length in self.shape)
        axis = block_axis(shape, self.axis)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axis", axis)
        other = shape[:axis] + shape[axis + 1 :]
        for name, part, wanted in (
            ("codes", self.codes, (*other, shape[axis] // 2)),
            ("scales", self.scales, (*other, shape[axis] // BLOCK_SIZE)),
        ):
            if part.dtype != torch.uint8:
                raise DtypeError(f"{name} must be uint8, seen {part.dtype}")
            if tuple(part.shape) != wanted:
                raise ShapeError(f"{name} must be {list(wanted)}, seen {list(part.shape)}")
        if self.codes.device != self.scales.device:
            raise ShapeError(f"codes on {self.codes.device}, scales on {self.scales.device}")

    @property
    def device(self) -> torch.device:
        """Where codes and scales are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return self.codes.nbytes + self.scales.nbytes

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def to(self, device: torch.device | str) -> MXTensor:
        """The same tensor on another device."""
        return MXTensor(self.codes.to(device), self.scales.to(device), self.shape, self.axis)

    def __repr__(self) -> str:
        """Shape and place; not the values."""
        return f"MXTensor(shape={list(self.shape)}, axis={self.axis}, device='{self.device}')"


def block_axis(shape: tuple[int, ...], axis: int) -> int:
    """`axis` as an index from the front, after checking that blocks of 32 fit along it."""
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"there is no axis {axis} in shape {list(shape)}")
    if shape[axis] % BLOCK_SIZE:
        raise ShapeError(
            f"axis {axis} has {shape[axis]:,} elements, not a multiple of {BLOCK_SIZE}",
            hint="keep this tensor in its source dtype or choose another axis",
        )
    return axis % len(shape)
