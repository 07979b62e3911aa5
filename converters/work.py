"""Convert one output shard: the unit of work that every executor runs.

Idempotent and independent of all other units. Memory is a few slabs, their codes, and a spool for
scales, which in the file come after all codes of their matrix.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt

from mxfp4.converters.ahead import ahead
from mxfp4.converters.plan import OutputShard, Plan, Task
from mxfp4.converters.reader import (
    DEFAULT_SLAB_BYTES,
    Bits,
    MatrixView,
    ShardReader,
    Slab,
    SlabBuffer,
)
from mxfp4.converters.state import OutputFolder, ShardRecord
from mxfp4.converters.writer import ShardWriter
from mxfp4.errors import InterruptedConversionError, NonFiniteError
from mxfp4.kernels.rows import EncodedRows, TensorStatistics

_PIECES_AHEAD = 2
SPOOL_BYTES = 8 << 20
"""Scales of one matrix that stay in memory; more of them go through a temporary file."""


class Quantizer(Protocol):
    """Encodes raw bits [n, K] of a safetensors dtype; pure, and safe to call from threads."""

    def __call__(self, source: Bits, dtype: str, /) -> EncodedRows:
        """Return codes uint8 [n, K/2], scales uint8 [n, K/32] and their statistics."""
        ...


class Substitutes(Protocol):
    """Codes and contents made elsewhere, taken in place of what codec and source would give."""

    @property
    def identity(self) -> str:
        """Hash of everything that decides the substituted bytes; part of the plan's id."""
        ...

    def quantizer(self, module: str) -> Quantizer | None:
        """A quantizer that is given the slabs of this module in order, or None."""
        ...

    def content(self, tensor: str) -> bytes | None:
        """The bytes to write for a kept tensor, as many as the source has, or None."""
        ...


@dataclass(frozen=True)
class Work:
    """What a worker needs besides the unit: where to write, how to encode, whom to tell."""

    plan: Plan
    output: OutputFolder
    quantizer: Quantizer
    slab_bytes: int = DEFAULT_SLAB_BYTES
    drop_cache: bool = False
    on_bytes: Callable[[int], None] = lambda count: None
    stop: threading.Event = field(default_factory=threading.Event)
    substitutes: Substitutes | None = None

    def quantizer_of(self, task: Task) -> Quantizer:
        """The quantizer for one task."""
        found = None
        if self.substitutes is not None and task.module is not None:
            found = self.substitutes.quantizer(task.module)
        return found or self.quantizer

    def content_of(self, task: Task, reader: ShardReader) -> Iterator[memoryview]:
        """The bytes of a kept tensor, in pieces."""
        name = task.stored.info.name
        content = None if self.substitutes is None else self.substitutes.content(name)
        return reader.pieces(task.stored) if content is None else iter([memoryview(content)])

    def advance(self, count: int) -> None:
        """Report source bytes done; raises `InterruptedConversionError` when asked to stop."""
        if self.stop.is_set():
            raise InterruptedConversionError(
                "stopped on request", hint="run the same command to continue"
            )
        self.on_bytes(count)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a task's output: of a copied tensor, or the codes and scales of a slab.

    `source_bytes` were read for it; `last` ends the task.
    """

    task: Task
    source_bytes: int
    copied: memoryview | None = None
    encoded: EncodedRows | None = None
    last: bool = False


def convert_shard(unit: OutputShard, work: Work) -> ShardRecord:
    """Write one output shard and its record; returns the record.

    One thread reads and encodes, the calling one hashes and writes. Raises `NonFiniteError` naming
    file, tensor and index, `SourceChangedError` when a source file is not the planned one, and
    `NoSpaceError`; in each case nothing of the shard remains.
    """
    layout = work.plan.format
    announced = [info for task in unit.tasks for info in task.outputs(layout)]
    target, temporary = work.output.path / unit.name, work.output.temporary(unit.name)
    with ExitStack() as stack:
        sources = stack.enter_context(SourceReaders(work))
        writer = stack.enter_context(ShardWriter(target, announced, temporary))
        pieces = stack.enter_context(ahead(_pieces(unit, sources, work), _PIECES_AHEAD))
        hashes, statistics = _write_pieces(pieces, writer, work)
        sources.require_unchanged()
        digest = writer.commit()
    record = ShardRecord(work.plan.id, unit.name, writer.size, digest, hashes, statistics)
    work.output.save_record(record)
    return record


def peak_worker_bytes(slab_bytes: int = DEFAULT_SLAB_BYTES) -> int:
    """Upper bound of what a worker holds: slabs of BF16 with their codes, and the spool twice."""
    return (_PIECES_AHEAD + 2) * (slab_bytes + slab_bytes // 3) + 2 * SPOOL_BYTES


def _pieces(unit: OutputShard, sources: SourceReaders, work: Work) -> Iterator[Piece]:
    """Everything the shard holds, in file order."""
    for task in unit.tasks:
        reader = sources.open(task.shard)
        if task.view is None:
            for data in work.content_of(task, reader):
                yield Piece(task, len(data), copied=data)
        else:
            file = work.plan.checkpoint.shards[task.shard].name
            quantizer = work.quantizer_of(task)
            for slab, encoded in encode_slabs(reader, task, task.view, quantizer, file):
                yield Piece(task, slab.bits.nbytes, encoded=encoded)
        yield Piece(task, 0, last=True)


def _write_pieces(
    pieces: Iterator[Piece], writer: ShardWriter, work: Work
) -> tuple[dict[str, str], dict[str, object]]:
    """Write and hash; returns the hash of every tensor and the statistics of every module."""
    hashes: dict[str, str] = {}
    statistics: dict[str, object] = {}
    total = module = TensorStatistics()
    folder = str(work.output.state / "tmp")
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=folder) as spool:
        for piece in pieces:
            if piece.copied is not None:
                writer.write(piece.copied)
            if piece.encoded is not None:
                writer.write(_flat(piece.encoded.codes))
                spool.write(_flat(piece.encoded.scales))
                if piece.encoded.statistics is not None:
                    module = module + piece.encoded.statistics
            work.advance(piece.source_bytes)
            if not piece.last:
                continue
            outputs = piece.task.outputs(work.plan.format)
            hashes[outputs[0].name] = writer.end_tensor()
            if piece.task.module is not None:
                _write_spool(spool, writer)
                hashes[outputs[1].name] = writer.end_tensor()
                statistics[piece.task.module] = module_statistics(module)
                total, module = total + module, TensorStatistics()
    if statistics:
        sums = {"sum_squares": total.sum_squares, "sum_squared_error": total.sum_squared_error}
        statistics[""] = {**total.to_json(), **sums}
    return hashes, statistics


class SourceReaders:
    """The source shards of one unit, opened when first needed."""

    def __init__(self, work: Work) -> None:
        self._checkpoint = work.plan.checkpoint
        self._stack = ExitStack()
        # One area for every piece that can be alive at a time; see `ahead`.
        self._buffer = SlabBuffer(work.slab_bytes, _PIECES_AHEAD + 2)
        self._drop_cache = work.drop_cache
        self._open: dict[int, ShardReader] = {}

    def __enter__(self) -> SourceReaders:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, number: int) -> ShardReader:
        """The reader of a source shard; refuses a file that changed since planning."""
        if number not in self._open:
            reader = ShardReader(
                self._checkpoint.shards[number], self._buffer, drop_cache=self._drop_cache
            )
            self._open[number] = self._stack.enter_context(reader)
        return self._open[number]

    def require_unchanged(self) -> None:
        """Check every file that was read once more."""
        for reader in self._open.values():
            reader.require_unchanged()


def encode_slabs(
    reader: ShardReader, task: Task, view: MatrixView, quantizer: Quantizer, file: str
) -> Iterator[tuple[Slab, EncodedRows]]:
    """Encode a matrix slab by slab; a NaN or infinity is reported with its place in the matrix."""
    dtype = task.stored.info.dtype
    for slab in reader.slabs(task.stored, view):
        try:
            yield slab, quantizer(slab.bits, dtype)
        except NonFiniteError as error:
            row, column = error.index
            flat = slab.first_element + row * slab.bits.shape[1] + column
            raise NonFiniteError(
                index=divmod(flat, view.column_count),
                file=file,
                tensor=_place(task),
                hint="repair the checkpoint, leave such tensors in their source dtype with "
                "--on-nonfinite keep, or name this one with --keep",
            ) from error


def _write_spool(spool: IO[bytes], writer: ShardWriter) -> None:
    """Append the scales that waited for the end of their codes, and empty the spool."""
    spool.seek(0)
    while piece := spool.read(SPOOL_BYTES):
        writer.write(piece)
    spool.seek(0)
    spool.truncate()


def _flat(array: npt.NDArray[np.uint8]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).data


def module_statistics(statistics: TensorStatistics) -> dict[str, object]:
    """What a record keeps of one module: everything but the histogram, which the total has."""
    summary = statistics.to_json()
    del summary["scale_histogram"]
    return summary


def _place(task: Task) -> str:
    name = task.stored.info.name
    own = task.module is None or name.startswith(task.module)
    return name if own else f"{name} (as {task.module})"
