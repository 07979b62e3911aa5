"""Bounded reads: any matrix inside a stored tensor, in slabs, through one reused buffer.

A `MatrixView` describes where the rows and columns of an [N, K] matrix lie in a stored tensor, so
that plain matrices, single experts of a stacked bank, gate and up halves, interleaved rows and
transposed storage are all read the same way. Memory is the buffer, whatever the tensor's size.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mxfp4.converters.checkpoint import SourceShard
from mxfp4.converters.header import StoredTensor
from mxfp4.errors import SourceChangedError
from mxfp4.spec import BLOCK_SIZE

DEFAULT_SLAB_BYTES = 2 << 20
"""Source bytes a worker holds at a time: small enough to stay in a core's cache."""

_BITS: dict[str, Any] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}

Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class MatrixView(NamedTuple):
    """An [N, K] matrix inside a stored tensor; `offset` and strides count elements."""

    row_count: int
    column_count: int
    offset: int
    row_stride: int
    column_stride: int

    @classmethod
    def plain(cls, rows: int, columns: int) -> MatrixView:
        """A whole row-major [N, K] tensor."""
        return cls(rows, columns, 0, columns, 1)

    @property
    def contiguous(self) -> bool:
        """Whether the matrix is one run of elements in row-major order."""
        return self.column_stride == 1 and (
            self.row_stride == self.column_count or self.row_count <= 1
        )


@dataclass(frozen=True, slots=True)
class Slab:
    """Some whole blocks of a matrix: raw bits [n, 32 m], and the place of the first element.

    The array may be a view into the reader's buffer and is valid until that area is used again.
    """

    bits: Bits
    first_element: int


class ShardReader:
    """One open source shard.

    Raises `SourceChangedError` when the file ends early or is no longer the planned one.
    `drop_cache` asks the kernel to forget pages once they were read, so that a checkpoint much
    larger than memory does not push everything else out.
    """

    def __init__(self, shard: SourceShard, buffer: SlabBuffer, *, drop_cache: bool = False) -> None:
        shard.require_unchanged()
        self._shard = shard
        self._buffer = buffer
        self._drop_cache = drop_cache
        self._fd = os.open(shard.path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            # The kernel then reads further ahead. Asking it for stretches (WILLNEED) fills the
            # cache page by page, which takes three times as long as reading.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def require_unchanged(self) -> None:
        """Check the file again; called when all of its reads are done."""
        self._shard.require_unchanged()

    def pieces(self, tensor: StoredTensor) -> Iterator[memoryview]:
        """The raw bytes of a tensor, in order, in pieces of at most the buffer's size."""
        end = tensor.offset + tensor.info.byte_count
        step = self._buffer.size
        for start in range(tensor.offset, end, step):
            view = self._buffer.take(min(step, end - start))
            self._read(start, view, tensor)
            yield view

    def slabs(
        self, tensor: StoredTensor, view: MatrixView, buffer: SlabBuffer | None = None
    ) -> Iterator[Slab]:
        """The elements of a matrix in row-major order, in slabs of whole blocks.

        BF16 and F16 come as uint16 bits, F32 as uint32 bits; `buffer` replaces the reader's own.
        """
        buffer = buffer or self._buffer
        if view.row_count == 0 or view.column_count == 0:
            return iter(())
        if view.contiguous:
            return self._contiguous(tensor, view, buffer)
        read = self._rows if view.column_stride == 1 else self._columns
        return read(tensor, view, buffer)

    def rows(
        self, tensor: StoredTensor, row_bytes: int, first: int, count: int, step: int = 1
    ) -> npt.NDArray[np.uint8]:
        """Rows of a tensor seen as rows of `row_bytes` bytes, as new memory [count, row_bytes].

        With a `step` the span between the first and the last row is read.
        """
        span = ((count - 1) * step + 1) * row_bytes if count else 0
        raw = np.empty(span, np.uint8)
        self._read(tensor.offset + first * row_bytes, raw.data, tensor)
        if step == 1 or not count:
            return raw.reshape(count, row_bytes)
        picked = np.lib.stride_tricks.as_strided(
            raw, (count, row_bytes), (step * row_bytes, 1), writeable=False
        )
        return np.ascontiguousarray(picked)

    def _contiguous(
        self, tensor: StoredTensor, view: MatrixView, buffer: SlabBuffer
    ) -> Iterator[Slab]:
        dtype = np.dtype(_BITS[tensor.info.dtype])
        start = tensor.offset + view.offset * dtype.itemsize
        count = view.row_count * view.column_count
        step = max(buffer.size // (dtype.itemsize * BLOCK_SIZE), 1) * BLOCK_SIZE
        for first in range(0, count, step):
            size = min(step, count - first)
            raw = buffer.take(size * dtype.itemsize)
            self._read(start + first * dtype.itemsize, raw, tensor)
            yield Slab(np.frombuffer(raw, dtype).reshape(1, size), first)

    def _rows(self, tensor: StoredTensor, view: MatrixView, buffer: SlabBuffer) -> Iterator[Slab]:
        """Every `row_stride`-th row: read the span between first and last, keep the wanted rows."""
        dtype = np.dtype(_BITS[tensor.info.dtype])
        step = max(buffer.size // (view.row_stride * dtype.itemsize), 1)
        for row in range(0, view.row_count, step):
            rows = min(step, view.row_count - row)
            span = (rows - 1) * view.row_stride + view.column_count
            raw = buffer.take(span * dtype.itemsize)
            start = view.offset + row * view.row_stride
            self._read(tensor.offset + start * dtype.itemsize, raw, tensor)
            elements = np.frombuffer(raw, dtype)
            picked = np.lib.stride_tricks.as_strided(
                elements,
                (rows, view.column_count),
                (view.row_stride * dtype.itemsize, dtype.itemsize),
                writeable=False,
            )
            yield Slab(np.ascontiguousarray(picked), row * view.column_count)

    def _columns(
        self, tensor: StoredTensor, view: MatrixView, buffer: SlabBuffer
    ) -> Iterator[Slab]:
        """Transposed storage: a run of output rows is a run of columns of every stored row."""
        dtype = np.dtype(_BITS[tensor.info.dtype])
        step = max(buffer.size // (view.column_count * dtype.itemsize), 1)
        for row in range(0, view.row_count, step):
            rows = min(step, view.row_count - row)
            width = ((rows - 1) * view.row_stride + 1) * dtype.itemsize
            raw = buffer.take(view.column_count * width)
            start = tensor.offset + (view.offset + row * view.row_stride) * dtype.itemsize
            for column in range(view.column_count):
                self._read(
                    start + column * view.column_stride * dtype.itemsize,
                    raw[column * width : (column + 1) * width],
                    tensor,
                )
            stored = np.frombuffer(raw, dtype).reshape(view.column_count, -1)
            picked = stored[:, :: view.row_stride].T
            yield Slab(np.ascontiguousarray(picked), row * view.column_count)

    def _read(self, start: int, target: memoryview, tensor: StoredTensor) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._fd, [target[done:]], start + done)
            if count == 0:
                raise SourceChangedError(
                    "the file ended in the middle of this tensor; it was cut after planning",
                    file=self._shard.name,
                    tensor=tensor.info.name,
                    hint="download this shard again, then run the same command",
                )
            done += count
        if self._drop_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, start, done, os.POSIX_FADV_DONTNEED)


class SlabBuffer:
    """Page-aligned memory that one worker reads into, `count` areas of `size` bytes in turn.

    What `take` returns stays intact for the next `count - 1` calls. An area grows only when a
    single row is longer than it.
    """

    def __init__(self, size: int = DEFAULT_SLAB_BYTES, count: int = 1) -> None:
        self.size = size
        self._areas = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
        self._next = 0

    def take(self, byte_count: int) -> memoryview:
        """The first `byte_count` bytes of the next area."""
        number, self._next = self._next, (self._next + 1) % len(self._areas)
        if byte_count > len(self._areas[number]):
            self._areas[number] = memoryview(mmap.mmap(-1, byte_count))
        return self._areas[number][:byte_count]
