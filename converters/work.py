"""Convert one output shard: the unit of work that every executor runs.

Idempotent and independent of all other units. Memory is one slab buffer, the codes of one slab
and a spool for scales, which in the file come after all codes of their matrix.
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

from mxfp4.converters.checkpoint import Checkpoint
from mxfp4.converters.formats import OutputFormat
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

SPOOL_BYTES = 8 << 20
"""Scales of one matrix that stay in memory; more of them go through a temporary file."""


class Quantizer(Protocol):
    """Encodes raw bits [n, K] of a safetensors dtype; pure, and safe to call from threads."""

    def __call__(self, source: Bits, dtype: str, /) -> EncodedRows:
        """Return codes uint8 [n, K/2], scales uint8 [n, K/32] and their statistics."""
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

    def advance(self, count: int) -> None:
        """Report source bytes done; raises `InterruptedConversionError` when asked to stop."""
        if self.stop.is_set():
            raise InterruptedConversionError(
                "stopped on request", hint="run the same command to continue"
            )
        self.on_bytes(count)


def convert_shard(unit: OutputShard, work: Work) -> ShardRecord:
    """Write one output shard and its record; returns the record.

    Raises `NonFiniteError` naming file, tensor and index, `SourceChangedError` when a source
    file is not the planned one, and `NoSpaceError`; in each case nothing of the shard remains.
    """
    layout = work.plan.format
    announced = [info for task in unit.tasks for info in task.outputs(layout)]
    hashes: dict[str, str] = {}
    statistics: dict[str, object] = {}
    total: TensorStatistics | None = None
    target = work.output.path / unit.name
    with ExitStack() as stack:
        sources = SourceReaders(work.plan.checkpoint, work, stack)
        writer = stack.enter_context(
            ShardWriter(target, announced, work.output.temporary(unit.name))
        )
        for task in unit.tasks:
            reader = sources.open(task.shard)
            if task.view is None or task.module is None:
                _copy(task, reader, writer, work)
                hashes[task.stored.info.name] = writer.end_tensor()
                continue
            found = _quantize(task, task.view, reader, writer, work, layout, hashes)
            statistics[task.module] = module_statistics(found)
            total = found if total is None else total + found
        sources.require_unchanged()
        digest = writer.commit()
    if total is not None:
        sums = {"sum_squares": total.sum_squares, "sum_squared_error": total.sum_squared_error}
        statistics[""] = {**total.to_json(), **sums}
    record = ShardRecord(work.plan.id, unit.name, writer.size, digest, hashes, statistics)
    work.output.save_record(record)
    return record


class SourceReaders:
    """The source shards of one unit, opened when first needed."""

    def __init__(self, checkpoint: Checkpoint, work: Work, stack: ExitStack) -> None:
        self._checkpoint = checkpoint
        self._stack = stack
        self._buffer = SlabBuffer(work.slab_bytes)
        self._drop_cache = work.drop_cache
        self._open: dict[int, ShardReader] = {}

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


def _copy(task: Task, reader: ShardReader, writer: ShardWriter, work: Work) -> None:
    for piece in reader.pieces(task.stored):
        writer.write(piece)
        work.advance(len(piece))


def _quantize(
    task: Task,
    view: MatrixView,
    reader: ShardReader,
    writer: ShardWriter,
    work: Work,
    layout: OutputFormat,
    hashes: dict[str, str],
) -> TensorStatistics:
    codes_info, scales_info = task.outputs(layout)
    total = TensorStatistics()
    file = work.plan.checkpoint.shards[task.shard].name
    folder = str(work.output.state / "tmp")
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=folder) as spool:
        for slab, encoded in encode_slabs(reader, task, view, work.quantizer, file):
            writer.write(_flat(encoded.codes))
            spool.write(_flat(encoded.scales))
            if encoded.statistics is not None:
                total = total + encoded.statistics
            work.advance(slab.bits.nbytes)
        hashes[codes_info.name] = writer.end_tensor()
        _write_spool(spool, writer)
        hashes[scales_info.name] = writer.end_tensor()
    return total


def _write_spool(spool: IO[bytes], writer: ShardWriter) -> None:
    spool.seek(0)
    while piece := spool.read(SPOOL_BYTES):
        writer.write(piece)


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
