"""Convert one output shard: the unit of work that every executor runs.

Idempotent and independent of all other units. Memory is a few slabs, their codes, and a spool for
scales, which in the file come after all codes of their matrix.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Protocol

import numpy as np

from mxfp4.converters.ahead import ahead
from mxfp4.converters.bands import Band, Quantizer, bands_of
from mxfp4.converters.checkpoint import Checkpoint
from mxfp4.converters.formats import OutputFormat, Payload
from mxfp4.converters.plan import OutputShard, Plan, Task, Treatment
from mxfp4.converters.reader import DEFAULT_SLAB_BYTES, ShardReader, SlabBuffer
from mxfp4.converters.sources.types import Bytes
from mxfp4.converters.state import OutputFolder, ShardRecord
from mxfp4.converters.writer import ShardWriter
from mxfp4.errors import InterruptedConversionError
from mxfp4.kernels.rows import TensorStatistics

__all__ = [
    "Outlet",
    "Quantizer",
    "SourceReaders",
    "Substitutes",
    "Work",
    "band_streams",
    "convert_shard",
    "peak_worker_bytes",
]

_PIECES_AHEAD = 2
SPOOL_BYTES = 8 << 20
"""Scales of one matrix that stay in memory; more of them go through a temporary file."""


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
    turns: threading.Semaphore = field(default_factory=threading.Semaphore)
    """Units that may read and write at a time; one that only waits for the disk has no turn."""
    substitutes: Substitutes | None = None
    also: tuple[tuple[Plan, OutputFolder], ...] = ()
    """Further outputs of the same read: plans with the same tasks in the same shards."""

    def quantizer_of(self, module: str) -> Quantizer:
        """The quantizer for one matrix, by its name as a module of its own."""
        found = None if self.substitutes is None else self.substitutes.quantizer(module)
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
    """Some bytes of a task's output: of a copied tensor, or a band of a module.

    `number` counts the tasks of the unit; `last` ends the task.
    """

    number: int
    source_bytes: int
    copied: memoryview | None = None
    band: Band | None = None
    last: bool = False


def convert_shard(unit: OutputShard, work: Work) -> ShardRecord:
    """Write one output shard (and the same one of further outputs); returns its record.

    One thread reads and encodes, the calling one hashes and writes. Raises `NonFiniteError` naming
    file, tensor and index, `SourceChangedError` when a source file is not the planned one, and
    `NoSpaceError`; in each case nothing of the shard remains.
    """
    with ExitStack() as stack:
        with work.turns:
            outlets = [
                stack.enter_context(Outlet(plan, folder, same_shard(plan, unit)))
                for plan, folder in ((work.plan, work.output), *work.also)
            ]
            _fill(outlets, unit, work)
        records = [outlet.commit() for outlet in outlets]
    return records[0]


def _fill(outlets: Sequence[Outlet], unit: OutputShard, work: Work) -> None:
    """Stream everything the shard holds from its sources into the outlets."""
    readers = SourceReaders(work.plan.checkpoint, work.slab_bytes, drop_cache=work.drop_cache)
    with readers as sources:
        with ahead(_pieces(unit, sources, work), _PIECES_AHEAD) as pieces:
            for piece in pieces:
                for outlet in outlets:
                    outlet.take(piece)
                work.advance(piece.source_bytes)
        sources.require_unchanged()


def same_shard(plan: Plan, unit: OutputShard) -> OutputShard:
    """The shard of a plan that goes by this name."""
    return next(shard for shard in plan.shards if shard.name == unit.name)


def peak_worker_bytes(slab_bytes: int = DEFAULT_SLAB_BYTES) -> int:
    """Upper bound of what a worker holds: slabs of BF16 with their codes, and the spool twice.

    The layout `fp8` holds a few bands of 128 rows more, the BF16 form of gpt-oss the packed codes
    of one expert.
    """
    return (_PIECES_AHEAD + 2) * (slab_bytes + slab_bytes // 3) + 2 * SPOOL_BYTES


def _pieces(unit: OutputShard, sources: SourceReaders, work: Work) -> Iterator[Piece]:
    """Everything the shard holds, in file order."""
    payload = work.plan.format.payload
    for number, task in enumerate(unit.tasks):
        if task.treatment is Treatment.KEEP:
            reader = sources.open(task.source.parts[task.part].shard)
            for data in work.content_of(task, reader):
                yield Piece(number, len(data), copied=data)
        else:
            for band in bands_of(task, sources, work.quantizer_of, payload):
                yield Piece(number, band.source_bytes, band=band)
        yield Piece(number, 0, last=True)


class Outlet:
    """One shard of one output in the making: bytes in, hashes and statistics out."""

    def __init__(self, plan: Plan, folder: OutputFolder, unit: OutputShard) -> None:
        self._plan, self._folder, self._unit = plan, folder, unit
        self._layout = plan.format
        self._stack = ExitStack()
        self._hashes: dict[str, str] = {}
        self._statistics: dict[str, object] = {}
        self._total = self._module = TensorStatistics()
        self._encoded = False
        self._lossy = 0

    def __enter__(self) -> Outlet:
        unit, folder = self._unit, self._folder
        announced = [info for task in unit.tasks for info in task.outputs(self._layout)]
        spool = tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder.state / "tmp"))
        self._spool = self._stack.enter_context(spool)
        self._writer = self._stack.enter_context(
            ShardWriter(
                folder.path / unit.name,
                announced,
                folder.temporary(unit.name),
                self._layout.metadata,
            )
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def take(self, piece: Piece) -> None:
        """Write what a piece holds; at the end of a task also what waited for it."""
        if piece.copied is not None:
            self._writer.write(piece.copied)
        if piece.band is not None:
            self._take_band(piece.band)
        if piece.last:
            self._end_task(self._unit.tasks[piece.number])

    def commit(self) -> ShardRecord:
        """Make the shard durable and note that it is done."""
        if self._encoded:
            total = self._total
            sums = {"sum_squares": total.sum_squares, "sum_squared_error": total.sum_squared_error}
            self._statistics[""] = {**total.to_json(), **sums}
        digest = self._writer.commit()
        record = ShardRecord(
            self._plan.id,
            self._unit.name,
            self._writer.size,
            digest,
            self._hashes,
            self._statistics,
        )
        self._folder.save_record(record)
        return record

    def _take_band(self, band: Band) -> None:
        for number, stream in enumerate(band_streams(band, self._layout)):
            if number:
                self._spool.write(_flat(stream))
            else:
                self._writer.write(_flat(stream))
        self._lossy += band.lossy_blocks
        if band.statistics is not None:
            self._module = self._module + band.statistics

    def _end_task(self, task: Task) -> None:
        outputs = task.outputs(self._layout)
        self._hashes[outputs[0].name] = self._writer.end_tensor()
        if len(outputs) > 1:
            _write_spool(self._spool, self._writer)
            self._hashes[outputs[1].name] = self._writer.end_tensor()
        if task.module is not None and task.treatment is Treatment.QUANTIZE:
            self._statistics[task.module] = module_statistics(self._module)
            self._total, self._encoded = self._total + self._module, True
        if task.module is not None and self._layout.payload is Payload.FP8:
            self._statistics[task.module] = {"lossy_blocks": self._lossy}
        self._module, self._lossy = TensorStatistics(), 0


def band_streams(band: Band, layout: OutputFormat) -> Sequence[Bytes]:
    """The bytes of a band for each tensor of a module."""
    if band.values is not None:
        return (band.values,) if band.scales is None else (band.values, band.scales)
    assert band.codes is not None and band.scales is not None  # noqa: PT018
    return layout.streams(band.codes, band.scales)


class SourceReaders:
    """The source shards of one unit, opened when first needed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        *,
        drop_cache: bool = False,
    ) -> None:
        self.slab_bytes = slab_bytes
        self._checkpoint = checkpoint
        self._stack = ExitStack()
        # One area for every piece that can be alive at a time; see `ahead`.
        self._buffer = SlabBuffer(slab_bytes, _PIECES_AHEAD + 2)
        self._scratch: SlabBuffer | None = None
        self._drop_cache = drop_cache
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

    def scratch(self) -> SlabBuffer:
        """Memory to read into for a moment, apart from what pieces still refer to."""
        if self._scratch is None:
            self._scratch = SlabBuffer(self.slab_bytes)
        return self._scratch

    def name(self, number: int) -> str:
        """The file name of a source shard."""
        return self._checkpoint.shards[number].name

    def require_unchanged(self) -> None:
        """Check every file that was read once more."""
        for reader in self._open.values():
            reader.require_unchanged()


def _write_spool(spool: IO[bytes], writer: ShardWriter) -> None:
    """Append the scales that waited for the end of their codes, and empty the spool."""
    spool.seek(0)
    while piece := spool.read(SPOOL_BYTES):
        writer.write(piece)
    spool.seek(0)
    spool.truncate()


def _flat(array: Bytes) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).data


def module_statistics(statistics: TensorStatistics) -> dict[str, object]:
    """What a record keeps of one module: everything but the histogram, which the total has."""
    summary = statistics.to_json()
    del summary["scale_histogram"]
    return summary
