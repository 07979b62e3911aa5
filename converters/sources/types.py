"""A source: one logical tensor, and the stored tensors that hold it together.

The companions of a weight (scales, blocks, global scales) may lie in other shards. The logical
shape counts elements, with the contraction axis last for everything that is stored in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mxfp4.converters.header import StoredTensor, TensorInfo

PLAIN = "plain"
"""Storage of a tensor that is what its header says: floats to quantize, or anything to copy."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Part(NamedTuple):
    """One stored tensor and the number of its shard."""

    shard: int
    stored: StoredTensor

    @property
    def info(self) -> TensorInfo:
        """Name, dtype and shape as stored."""
        return self.stored.info


class Source(NamedTuple):
    """A logical tensor: `info` has its canonical name (`X.weight`) and shape in elements.

    `parts` are the codes or values first, then scales. `block` are the rows and columns that one
    scale stands for. For a plain tensor `info` is the stored one.
    """

    storage: str
    info: TensorInfo
    parts: tuple[Part, ...]
    block: tuple[int, int] = (1, 1)

    @property
    def byte_count(self) -> int:
        """Bytes of all stored tensors of this source."""
        return sum([stored.info.byte_count for _, stored in self.parts])

    @property
    def plain(self) -> bool:
        """Whether this is one stored tensor, to be taken as it is."""
        return self.storage == PLAIN


@dataclass(frozen=True, slots=True)
class Rows:
    """Every `step`-th row of a tensor seen as [rows, K], all leading axes flattened."""

    first: int
    count: int
    step: int = 1

    def indices(self) -> npt.NDArray[np.int64]:
        """Their numbers."""
        return self.first + np.arange(self.count, dtype=np.int64) * self.step


class Fetch(Protocol):
    """Reads rows of a stored tensor seen as rows of `row_bytes` bytes; the result is new memory."""

    def __call__(self, part: Part, row_bytes: int, rows: Rows, /) -> Bytes:
        """Return uint8 [count, row_bytes]."""
        ...


@dataclass(frozen=True, slots=True)
class Storage:
    """How one kind of source becomes values.

    `values(source, fetch, rows)` gives float32 [count, K]; `packed` gives codes uint8
    [count, K/2] in neighbour order and scale bytes uint8 [count, K/32] and is None where the
    source does not hold MXFP4.
    """

    label: str
    values: Callable[[Source, Fetch, Rows], Floats]
    packed: Callable[[Source, Fetch, Rows], tuple[Bytes, Bytes]] | None = None


class Lookup(Protocol):
    """Finds a stored tensor by name."""

    def __call__(self, name: str, /) -> Part | None:
        """The tensor, or None."""
        ...


Recogniser = Callable[[Part, Lookup, Sequence[tuple[int, int]]], Source | None]
"""Given a stored tensor, a lookup and the block sizes that the config names: the source that it
heads, or None if it is of another kind. Raises a `CheckpointError` for a weight of this kind whose
companions do not fit."""
