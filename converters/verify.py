"""Check an output folder, on its own or against its source; every difference is listed.

On its own: index, headers, sizes and metadata agree; every packed module is complete and shaped
right; the ignore list separates quantized from kept modules; with `deep` also all hashes, and no
scale byte stands for NaN. Against the source: every source tensor is accounted for, kept ones are
byte-identical, quantized ones equal a fresh encoding bit for bit, and their error is measured.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mxfp4.converters.bands import Quantizer, bands_of
from mxfp4.converters.checkpoint import Checkpoint, open_checkpoint, read_json_object
from mxfp4.converters.convert import default_quantizer
from mxfp4.converters.formats import (
    DEFAULT_FORMAT,
    Described,
    OutputFormat,
    Payload,
    output_format,
)
from mxfp4.converters.header import StoredTensor, TensorInfo
from mxfp4.converters.ignore_check import check_ignore
from mxfp4.converters.plan import OutputOptions, OutputShard, Plan, Task, Treatment
from mxfp4.converters.planning import make_plan, module_of
from mxfp4.converters.reader import ShardReader, SlabBuffer
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.report import MANIFEST_NAME
from mxfp4.converters.work import SourceReaders, band_streams
from mxfp4.errors import CheckpointError, CorruptCheckpointError, NonFiniteError, RecipeError
from mxfp4.spec import BLOCK_SIZE, MAX_SCALE_BYTE
from mxfp4.statistics import TensorStatistics

_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference: where it is, and what is wrong."""

    place: str
    problem: str

    def to_json(self) -> dict[str, str]:
        """As JSON data."""
        return {"place": self.place, "problem": self.problem}


@dataclass
class Verification:
    """What was checked and what was found."""

    output: str
    source: str | None
    deep: bool
    checked: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    statistics: TensorStatistics = field(default_factory=TensorStatistics)
    modules: list[tuple[str, float]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def count(self, what: str, number: int = 1) -> None:
        """Add to the number of things checked."""
        self.checked[what] = self.checked.get(what, 0) + number

    def add(self, place: str, problem: str) -> None:
        """Record a difference."""
        self.findings.append(Finding(place, problem))

    def worst(self, count: int = 10) -> list[tuple[str, float]]:
        """Modules with the largest relative L2 error, worst first."""
        return sorted(self.modules, key=lambda item: (-item[1], item[0]))[:count]

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        error = self.statistics.to_json() if self.modules else None
        return {
            "output": self.output,
            "source": self.source,
            "deep": self.deep,
            "ok": self.ok,
            "checked": self.checked,
            "findings": [finding.to_json() for finding in self.findings],
            "notes": self.notes,
            "error": error,
            "worst_modules": [{"module": m, "relative_l2": e} for m, e in self.worst()],
        }


def verify(
    output: str | Path,
    source: str | Path | None = None,
    *,
    deep: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Verification:
    """Check a converted folder; differences are findings, not exceptions.

    Raises only when source or output cannot be opened at all as a checkpoint.
    """
    output = Path(output)
    result = Verification(str(output), None if source is None else str(source), deep)
    try:
        checkpoint = open_checkpoint(output, allow_missing_config=True)
    except CheckpointError as error:
        result.add(error.file or str(output), error.message)
        return result
    described = _read_manifest(output, result)
    layout = output_format(described.get("output_format", DEFAULT_FORMAT))
    modules = packed_modules(checkpoint, layout, result)
    _check_folder(checkpoint, layout, result)
    _check_config(checkpoint, layout, modules, result)
    if deep:
        _check_hashes(output, described, result, on_bytes)
        _check_scales(checkpoint, modules, layout, result)
    if source is not None:
        _check_against(source, checkpoint, described, layout, result, on_bytes)
    return result


def packed_modules(
    checkpoint: Checkpoint, layout: OutputFormat, result: Verification
) -> dict[str, tuple[int, ...]]:
    """Logical shape of every module with codes in the names of a layout; misfits are findings.

    Shapes are [N, K], or [E, N, K] for stacked experts.
    """
    if layout.payload is not Payload.MXFP4:
        return {}
    infos = {tensor.name: tensor for tensor in checkpoint.tensors()}
    found: dict[str, tuple[int, ...]] = {}
    models = layout.tensors("", (1, BLOCK_SIZE))
    leaves = [info.name for info in models]
    partners = {leaves[0]: leaves[-1], leaves[-1]: leaves[0]}
    for name, info in infos.items():
        if (
            name.endswith(leaves[-1])
            and info.dtype == layout.tensors("", (1, BLOCK_SIZE))[-1].dtype
        ):
            partner = name.removesuffix(leaves[-1]) + partners[leaves[-1]]
            if partner not in infos:
                result.add(name, "these scales have no packed codes beside them")
        if not name.endswith(leaves[0]):
            continue
        module = name.removesuffix(leaves[0])
        shape = _module_shape(info, layout, infos, module + leaves[-1])
        if shape is None:
            continue
        expected = layout.tensors(module, shape)
        result.count("packed modules")
        if info != expected[0] or not shape[-1]:
            result.add(name, f"{info.dtype} {list(info.shape)} is not a matrix of packed codes")
        elif (scales := infos.get(expected[-1].name)) is None:
            result.add(name, f"its scales {expected[-1].name} are missing")
        elif scales != expected[-1]:
            result.add(
                scales.name,
                f"{scales.dtype} {list(scales.shape)}, expected {expected[-1].dtype} "
                f"{list(expected[-1].shape)} for these codes",
            )
        else:
            found[module] = shape
    return found


def _module_shape(
    info: TensorInfo, layout: OutputFormat, infos: Mapping[str, TensorInfo], scales: str
) -> tuple[int, ...] | None:
    """Logical shape of codes, judged by their own; None if this is no packed tensor at all.

    Where codes are called `weight`, a tensor of another dtype is a kept one.
    """
    block = layout.tensors("", (1, BLOCK_SIZE))[0]
    if block.name == ".weight" and (info.dtype != block.dtype or scales not in infos):
        return None
    axes = len(block.shape) - 1
    if len(info.shape) <= axes:
        return (0, 0)
    stored = math.prod(info.shape[-axes:])
    return (*info.shape[:-axes], stored // block.element_count * BLOCK_SIZE)


def _read_manifest(output: Path, result: Verification) -> Mapping[str, Any]:
    path = output / MANIFEST_NAME
    if not path.is_file():
        result.notes.append(f"no {MANIFEST_NAME}: hashes and recipe are unknown")
        return {}
    try:
        return read_json_object(path)
    except CorruptCheckpointError as error:
        result.add(MANIFEST_NAME, error.message)
        return {}


def _check_folder(checkpoint: Checkpoint, layout: OutputFormat, result: Verification) -> None:
    if not checkpoint.indexed:
        result.add("model.safetensors.index.json", "there is no index; was the run interrupted?")
    else:
        index = read_json_object(checkpoint.folder / "model.safetensors.index.json")
        total = sum(tensor.byte_count for tensor in checkpoint.tensors())
        claimed = (index.get("metadata") or {}).get("total_size")
        if claimed != total:
            result.add("model.safetensors.index.json", f"total_size {claimed}, tensors {total:,}")
    for name in checkpoint.stray:
        if name.endswith(".safetensors"):
            result.add(name, "this file is not in the index; loaders that glob would read it")
    for shard in checkpoint.shards:
        result.count("shards")
        wanted = layout.metadata["format"]
        if shard.header.metadata.get("format") != wanted:
            text = f'its metadata lack {{"format": "{wanted}"}}; old loaders refuse it'
            result.add(shard.name, text)
    result.count("tensors", len(checkpoint.tensors()))


def _check_config(
    checkpoint: Checkpoint,
    layout: OutputFormat,
    modules: Mapping[str, tuple[int, ...]],
    result: Verification,
) -> None:
    """Lint what engines read: method, group, and an ignore list that cuts exactly."""
    if checkpoint.config is None:
        result.add("config.json", "there is no config.json, so no engine can load this folder")
        return
    config = checkpoint.quantization
    if config is None:
        if modules:
            result.add("config.json", "packed modules, but no quantization_config")
        return
    wanted = layout.config(Described((), (), (), (), {})).quantization
    if wanted is None:
        result.add("config.json", f"a quantization_config in the layout {layout.name}")
        return
    if config.get("quant_method") != wanted.get("quant_method"):
        result.add("config.json", f"quant_method is {config.get('quant_method')!r}")
        return
    if layout.name != DEFAULT_FORMAT:
        return
    groups = config.get("config_groups") or {}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        seen = [weights.get(key) for key in ("num_bits", "type", "group_size", "symmetric")]
        if seen != [4, "float", 32, True]:
            result.add("config.json", f"{name} describes {seen}, not MXFP4 weights")
        if "Linear" not in group.get("targets", []):
            result.add("config.json", f"{name} lacks the target 'Linear' that engines look for")
    kept = {
        module_of(t.name)
        for t in checkpoint.tensors()
        if t.name.endswith(".weight") and len(t.shape) == 2
    }
    try:
        check_ignore(list(config.get("ignore") or []), list(modules), kept)
    except RecipeError as error:
        result.add("config.json", error.message)
    result.count("ignore patterns", len(config.get("ignore") or []))


def _check_hashes(
    output: Path,
    described: Mapping[str, Any],
    result: Verification,
    on_bytes: Callable[[int], None],
) -> None:
    for name, facts in (described.get("files") or {}).items():
        path = output / name
        if not path.is_file():
            result.add(name, "the manifest lists this file, but it is not here")
            continue
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(_READ_BYTES)
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                on_bytes(count)
        result.count("hashed files")
        if digest.hexdigest() != facts["sha256"]:
            result.add(name, "its SHA-256 is not the one in the manifest: the file is damaged")


def _check_scales(
    checkpoint: Checkpoint,
    modules: Iterable[str],
    layout: OutputFormat,
    result: Verification,
) -> None:
    if len(layout.tensors("", (1, BLOCK_SIZE))) < 2:
        return
    wanted = {layout.tensors(module, (1, BLOCK_SIZE))[1].name for module in modules}
    buffer = SlabBuffer()
    for shard in checkpoint.shards:
        with ShardReader(shard, buffer) as reader:
            for tensor in shard.header.tensors:
                if tensor.info.name not in wanted:
                    continue
                largest = max(
                    (int(np.frombuffer(p, np.uint8).max()) for p in reader.pieces(tensor)),
                    default=0,
                )
                if largest > MAX_SCALE_BYTE:
                    what = "NaN" if largest == 255 else "a scale whose largest codes overflow"
                    result.add(tensor.info.name, f"scale byte {largest} stands for {what}")


def _check_against(
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
    comparer = _Comparer(plan, output, default_quantizer(recipe), result, on_bytes)
    for shard in plan.shards:
        comparer.compare_shard(shard)
    for tensor in output.tensors():
        if tensor.name not in comparer.accounted:
            result.add(tensor.name, "no source tensor accounts for this tensor")


class _Comparer:
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
