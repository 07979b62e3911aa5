"""Compare an output with its source, by making every output tensor again, band by band."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mxfp4.converters.bands import Band, Quantizer, bands_of
from mxfp4.converters.checkpoint import Checkpoint, open_checkpoint, read_json_object
from mxfp4.converters.convert import default_quantizer
from mxfp4.converters.findings import Verification
from mxfp4.converters.formats import OutputFormat, Payload
from mxfp4.converters.header import StoredTensor, TensorInfo
from mxfp4.converters.nearness import Nearness
from mxfp4.converters.plan import OutputOptions, OutputShard, Plan, Task, Treatment
from mxfp4.converters.planning import make_plan
from mxfp4.converters.reader import Bits, ShardReader, SlabBuffer
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.work import SourceReaders, band_streams
from mxfp4.errors import CorruptCheckpointError, NonFiniteError
from mxfp4.kernels.fallback import float_values
from mxfp4.kernels.rows import EncodedRows
from mxfp4.spec import BLOCK_SIZE
from mxfp4.statistics import TensorStatistics

CALIBRATION_REPORT = "mxfp4_calibration.json"
"""What calibration writes beside a checkpoint."""


def check_against(
    source: str | Path,
    output: Checkpoint,
    described: Mapping[str, Any],
    layout: OutputFormat,
    result: Verification,
    on_bytes: Callable[[int], None],
) -> None:
    """Compare everything that the source would become with what the output has in its place."""
    original = open_checkpoint(source, allow_missing_config=True)
    if "recipe" in described:
        recipe = replace(Recipe.from_mapping(described["recipe"]), level=Level(described["level"]))
    else:
        recipe = Recipe(level=Level.ALL)
        result.notes.append(f"no recipe on record: compared with a fresh {recipe.rule} encoding")
    # The plan says how each tensor would be cut; what the output really did with it (kept, after
    # all, because of a NaN, say) is read off the output's own tensors.
    plan = make_plan(original, recipe, OutputOptions(format=layout.name))
    if described.get("codes"):
        plan = replace(plan, codes=str(described["codes"]))
        result.notes.append(
            "codes were chosen by calibration: their nearness to the source was checked, and by "
            "file hashes that they are as written; which codes are best cannot be told"
        )
    comparer = Comparer(plan, output, default_quantizer(recipe), result, on_bytes)
    if plan.codes:
        comparer.changed = changed_on_purpose(output.folder, result)
    for shard in plan.shards:
        comparer.compare_shard(shard)
    for tensor in output.tensors():
        if tensor.name not in comparer.accounted:
            result.add(tensor.name, "no source tensor accounts for this tensor")


def changed_on_purpose(output: Path, result: Verification) -> frozenset[str]:
    """Kept tensors that the calibration report of an output says were changed; notes them."""
    path = output / CALIBRATION_REPORT
    if not path.is_file():
        return frozenset()
    try:
        names = frozenset(read_json_object(path)["summary"]["changed_tensors"])
    except (CorruptCheckpointError, KeyError, TypeError) as error:
        result.add(CALIBRATION_REPORT, f"this is no calibration report ({error})")
        return frozenset()
    if names:
        result.notes.append(
            f"{len(names):,} kept tensors were changed by calibration on purpose: only their "
            "shapes were compared"
        )
    return names


class Comparer:
    """Compares tasks with output tensors, band by band."""

    def __init__(
        self,
        plan: Plan,
        output: Checkpoint,
        quantizer: Quantizer,
        result: Verification,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.accounted: set[str] = set()
        self.changed: frozenset[str] = frozenset()
        """Kept tensors that may differ from the source."""
        self._plan = plan
        self._layout = plan.format
        self._quantizer = quantizer
        self._result = result
        self._on_bytes = on_bytes
        self._output_shards = output.shards
        self._where: dict[str, tuple[int, StoredTensor]] = {
            stored.info.name: (number, stored) for number, stored in output.located()
        }
        self._output_buffer = SlabBuffer()

    def compare_shard(self, shard: OutputShard) -> None:
        """Check all tasks of a planned shard."""
        with SourceReaders(self._plan.checkpoint) as self._readers:
            for task in shard.tasks:
                self._compare(task)

    def _compare(self, task: Task) -> None:
        """Check one task and note the output tensors that it accounts for."""
        if task.treatment is Treatment.KEEP:
            self._compare_kept(task, task.outputs(self._layout)[0])
            return
        outputs = task.outputs(self._layout)
        missing = [info for info in outputs if info.name not in self._where]
        if not missing:
            self.accounted.update(info.name for info in outputs)
            if all(m.source.parts[0].info == outputs[0] for m in task.matrices):
                self._as_it_was(task)
            else:
                self._compare_module(task, outputs)
            return
        if len(missing) == len(outputs) and self._as_it_was(task):
            return
        name = task.stored.info.name
        if len(task.matrices) == 1 and task.view is not None and task.source.info.name != name:
            name = task.source.info.name
        if len(task.source.info.shape) > 2 or len(task.matrices) > 1:
            self._result.add(name, f"its part {task.module} is missing from the output")
        else:
            self._result.add(name, "this source tensor is missing from the output")

    def _as_it_was(self, task: Task) -> bool:
        """Whether the output holds the source tensors under their own names; compares them."""
        parts = {part.info.name: part for m in task.matrices for part in m.source.parts}
        if any(name not in self._where for name in parts):
            return False
        for m in task.matrices:
            for number, part in enumerate(m.source.parts):
                if part.info.name not in self.accounted:
                    copied = Task(Treatment.KEEP, m.source, part=number)
                    self._compare_kept(copied, part.info)
        return True

    def _compare_kept(self, task: Task, wanted: TensorInfo) -> None:
        part = task.source.parts[task.part]
        if wanted.name not in self._where:
            self._result.add(part.info.name, "this source tensor is missing from the output")
            return
        self.accounted.add(wanted.name)
        number, stored = self._where[wanted.name]
        self._result.count("kept tensors")
        if stored.info != wanted:
            self._result.add(
                wanted.name,
                f"{stored.info.dtype} {list(stored.info.shape)} in the output, "
                f"{wanted.dtype} {list(wanted.shape)} in the source",
            )
            return
        source = self._readers.open(part.shard)
        with ShardReader(self._output_shards[number], self._output_buffer) as output:
            pairs = zip(source.pieces(part.stored), output.pieces(stored), strict=True)
            same = True
            for before, after in pairs:
                same = same and before == after
                self._on_bytes(len(before))
        if not same and wanted.name not in self.changed:
            self._result.add(wanted.name, "kept, but its bytes differ from the source")

    def _compare_module(self, task: Task, expected: tuple[TensorInfo, ...]) -> None:
        assert task.module is not None
        self._result.count(_COUNTED[task.treatment])
        stored = [self._where[info.name] for info in expected]
        for (_, found), wanted in zip(stored, expected, strict=True):
            if found.info != wanted:
                self._result.add(wanted.name, f"shape {list(found.info.shape)} is not the source's")
                return
        calibrated = task.treatment is Treatment.QUANTIZE and bool(self._plan.codes)
        try:
            if calibrated:
                self._check_nearness(task, stored)
                return
            differing, statistics = self._write_again(task, stored)
        except NonFiniteError as error:
            self._result.add(task.module, f"quantized, but its source {error.message}")
            return
        if task.treatment is Treatment.QUANTIZE:
            self._result.statistics += statistics
            self._result.modules.append((task.module, statistics.relative_l2))
        if differing:
            self._result.add(
                task.module, f"{differing:,} bytes differ from a fresh encoding of the source"
            )

    def _check_nearness(self, task: Task, stored: list[tuple[int, StoredTensor]]) -> None:
        """Decode calibrated codes and compare them with the source."""
        assert task.module is not None
        near, listening = Nearness(), _Listening(self._quantizer)
        columns = task.matrices[0].view.column_count
        with ExitStack() as stack:
            cursors = [
                stack.enter_context(_Cursor(self._output_shards[number], tensor))
                for number, tensor in stored
            ]
            for band in bands_of(task, self._readers, lambda module: listening, Payload.MXFP4):
                assert band.codes is not None
                assert band.scales is not None
                fresh = [np.asarray(s) for s in band_streams(band, self._layout)]
                source = listening.values(task.lanes, columns)
                found = [
                    cursor.take(array.nbytes) for cursor, array in zip(cursors, fresh, strict=True)
                ]
                pair = as_rows(found, fresh, band, source.shape)
                if pair is None:
                    self._result.note_once(
                        f"codes in the layout {self._layout.name} were not compared with the source"
                    )
                    return
                even = (band.codes.reshape(pair[0].shape), band.scales.reshape(pair[1].shape))
                near.add(source, even, pair)
                self._on_bytes(band.source_bytes)
        self._judge(task.module, near)

    def _judge(self, module: str, near: Nearness) -> None:
        self._result.modules.append((module, near.relative))
        self._result.count("modules near their source")
        if near.rescaled:
            self._result.count("of these with moved scales")
        if not near.fits:
            self._result.add(
                module,
                f"relative error {near.relative:.3f} against the source, {near.relative_even:.3f} "
                "without calibration: these are not codes of this module",
            )
        elif near.far:
            row, block = near.far[0]
            self._result.add(
                module,
                f"{len(near.far):,} blocks are far from the source, the first in row {row}, "
                f"columns {block * BLOCK_SIZE} to {(block + 1) * BLOCK_SIZE - 1}",
            )

    def _write_again(
        self, task: Task, stored: list[tuple[int, StoredTensor]]
    ) -> tuple[int, TensorStatistics]:
        differing, statistics = 0, TensorStatistics()
        payload = self._layout.payload
        with ExitStack() as stack:
            cursors = [
                stack.enter_context(_Cursor(self._output_shards[number], tensor))
                for number, tensor in stored
            ]
            for band in bands_of(task, self._readers, lambda module: self._quantizer, payload):
                streams = band_streams(band, self._layout)
                for cursor, fresh in zip(cursors, streams, strict=True):
                    differing += cursor.differing(fresh)
                if band.statistics is not None:
                    statistics += band.statistics
                self._on_bytes(band.source_bytes)
        return differing, statistics


_COUNTED = {
    Treatment.QUANTIZE: "quantized modules",
    Treatment.PASS: "passed modules",
    Treatment.DECODE: "decoded tensors",
}


class _Listening:
    """A quantizer that remembers the values it was given."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._heard: list[np.ndarray[Any, np.dtype[np.float32]]] = []

    def __call__(self, source: Bits, dtype: str, /) -> EncodedRows:
        """Encode as the other quantizer does."""
        values = float_values(source, dtype).astype(np.float32)
        self._heard.append(values.reshape(source.shape))
        return self._quantizer(source, dtype)

    def values(self, lanes: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The rows heard since the last call; rows of several matrices take turns."""
        heard = np.concatenate([part.reshape(-1, columns) for part in self._heard])
        self._heard.clear()
        return np.ascontiguousarray(heard.reshape(lanes, -1, columns).swapaxes(0, 1)).reshape(
            -1, columns
        )


def as_rows(
    stored: list[np.ndarray[Any, np.dtype[np.uint8]]],
    fresh: list[np.ndarray[Any, np.dtype[np.uint8]]],
    band: Band,
    shape: tuple[int, ...],
) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.uint8]]] | None:
    """Stored codes [n, K/2] and scales [n, K/32]; None for a layout that orders bytes otherwise.

    Told by what the layout made of the fresh band.
    """
    assert band.codes is not None
    assert band.scales is not None
    plain = [band.codes.reshape(-1), band.scales.reshape(-1)]
    if len(fresh) != len(plain) or any(
        not np.array_equal(a.reshape(-1).view(np.uint8), b)
        for a, b in zip(fresh, plain, strict=True)
    ):
        return None
    rows, columns = shape
    return stored[0].reshape(rows, columns // 2), stored[1].reshape(rows, columns // BLOCK_SIZE)


class _Cursor:
    """Walks through one output tensor, comparing it with arrays as they come."""

    def __init__(self, shard: Any, tensor: StoredTensor) -> None:
        self._file = open(shard.path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._file.seek(tensor.offset)

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The next bytes; fewer at the end of the file."""
        stored = bytearray()
        while len(stored) < count and (piece := self._file.read(count - len(stored))):
            stored += piece
        return np.frombuffer(stored, np.uint8)

    def differing(self, expected: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
        """How many of the next bytes are not the expected ones."""
        stored = self.take(expected.nbytes)
        if len(stored) < expected.nbytes:
            return expected.nbytes
        return int(np.count_nonzero(stored != expected.reshape(-1)))
