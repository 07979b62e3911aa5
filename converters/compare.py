"""Compare an output with its source, by making every output tensor again, band by band."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mxfp4.converters.bands import Quantizer, bands_of
from mxfp4.converters.checkpoint import Checkpoint, open_checkpoint
from mxfp4.converters.convert import default_quantizer
from mxfp4.converters.findings import Verification
from mxfp4.converters.formats import OutputFormat
from mxfp4.converters.header import StoredTensor, TensorInfo
from mxfp4.converters.plan import OutputOptions, OutputShard, Plan, Task, Treatment
from mxfp4.converters.planning import make_plan
from mxfp4.converters.reader import ShardReader, SlabBuffer
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.work import SourceReaders, band_streams
from mxfp4.errors import NonFiniteError
from mxfp4.statistics import TensorStatistics


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
            "codes were chosen by calibration: names, shapes and kept tensors were compared, codes "
            "were not"
        )
    comparer = Comparer(plan, output, default_quantizer(recipe), result, on_bytes)
    for shard in plan.shards:
        comparer.compare_shard(shard)
    for tensor in output.tensors():
        if tensor.name not in comparer.accounted:
            result.add(tensor.name, "no source tensor accounts for this tensor")


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
        if not same:
            self._result.add(wanted.name, "kept, but its bytes differ from the source")

    def _compare_module(self, task: Task, expected: tuple[TensorInfo, ...]) -> None:
        assert task.module is not None
        self._result.count(_COUNTED[task.treatment])
        stored = [self._where[info.name] for info in expected]
        for (_, found), wanted in zip(stored, expected, strict=True):
            if found.info != wanted:
                self._result.add(wanted.name, f"shape {list(found.info.shape)} is not the source's")
                return
        try:
            differing, statistics = self._write_again(task, stored)
        except NonFiniteError as error:
            self._result.add(task.module, f"quantized, but its source {error.message}")
            return
        if task.treatment is Treatment.QUANTIZE:
            if self._plan.codes:
                return
            self._result.statistics += statistics
            self._result.modules.append((task.module, statistics.relative_l2))
        if differing:
            self._result.add(
                task.module, f"{differing:,} bytes differ from a fresh encoding of the source"
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


class _Cursor:
    """Walks through one output tensor, comparing it with arrays as they come."""

    def __init__(self, shard: Any, tensor: StoredTensor) -> None:
        self._file = open(shard.path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._file.seek(tensor.offset)

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def differing(self, expected: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
        """How many of the next bytes are not the expected ones."""
        stored = bytearray()
        while len(stored) < expected.nbytes:
            piece = self._file.read(expected.nbytes - len(stored))
            if not piece:
                return expected.nbytes
            stored += piece
        return int(np.count_nonzero(np.frombuffer(stored, np.uint8) != expected.reshape(-1)))
