"""What a conversion will do, decided from headers alone: one decision per tensor, tasks per module.

A `Plan` is immutable. Its document (`Plan.document`) is canonical JSON whose SHA-256 is the plan's
id: the same source, recipe and output options give the same id and, with the same codec, the same
bytes. Output shards are the units of work; each is independent of all others.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from mxfp4.converters.checkpoint import Checkpoint
from mxfp4.converters.decide import Decision
from mxfp4.converters.formats import OutputFormat, Payload, output_format
from mxfp4.converters.header import DATA_ALIGNMENT, StoredTensor, TensorInfo
from mxfp4.converters.reader import MatrixView
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.sources import PACKED, Part, Source
from mxfp4.converters.sources.types import PLAIN

PLAN_FORMAT = "mxfp4-plan/1"
CODEC_ID = "e2m1-e8m0/1"
"""Changes whenever the codec writes other bytes for the same input and rule."""

_SIZED = PACKED | {PLAIN}
"""Storages whose size follows from dtype and shape, without a look at every companion."""


class Treatment(StrEnum):
    """What becomes of a source tensor in the chosen layout."""

    QUANTIZE = "quantize"
    KEEP = "keep"
    """Copied byte for byte; companions of FP8 weights may change their name."""
    PASS = "pass"
    """MXFP4 already: the same codes and scale bytes under the layout's names."""
    DECODE = "decode"
    """Written as values, because the layout cannot hold the source's own form."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the output is laid out; part of the plan's identity."""

    format: str = "compressed-tensors"
    max_shard_bytes: int = 5_000_000_000
    layout: str = "pack"
    """`pack` fills shards up to `max_shard_bytes`; `same` keeps the source's shards and names."""
    activations: str = "none"
    """What the config tells engines to do with activations: `none`, `mxfp4` or `fp8`."""


class PlannedTensor(NamedTuple):
    """One logical source tensor and what becomes of it."""

    source: Source
    decision: Decision
    treatment: Treatment

    @property
    def info(self) -> TensorInfo:
        """Canonical name and logical shape; the dtype is the storage's name unless plain."""
        return self.source.info

    @property
    def shard(self) -> int:
        """The shard of the weight itself."""
        return self.source.parts[0].shard

    @property
    def stored(self) -> StoredTensor:
        """The stored weight, without its companions."""
        return self.source.parts[0].stored

    @property
    def byte_count(self) -> int:
        """Bytes of the weight and its companions."""
        return self.source.byte_count


class PlannedTensors(tuple[PlannedTensor, ...]):
    """All tensors of a plan in file order, and the kinds of tensors among them.

    A checkpoint has hundreds of thousands of tensors of a few dozen kinds. Those of one kind have
    the same fate for the same reason, and the same role, shape and size.
    """

    @cached_property
    def kinds(self) -> tuple[tuple[PlannedTensor, int], ...]:
        """The first tensor of every kind, with how many there are."""
        first: dict[int, PlannedTensor] = {}
        for tensor, number in zip(self, self.kind_numbers, strict=True):
            first.setdefault(number, tensor)
        counts = Counter(self.kind_numbers)
        return tuple((tensor, counts[number]) for number, tensor in first.items())

    @cached_property
    def kind_numbers(self) -> list[int]:
        """The place in `kinds` of each tensor's kind."""
        known: dict[tuple[object, ...], int] = {}
        numbers = []
        for source, decision, treatment in self:
            _, dtype, shape = source.info
            fate = (treatment, decision.reason, decision.blocked, decision.role.verdict)
            form = (source.storage, dtype, shape)
            kind = (*fate, *form, None if source.storage in _SIZED else source.byte_count)
            numbers.append(known.setdefault(kind, len(known)))
        return numbers


class Matrix(NamedTuple):
    """An [N, K] matrix of a source; `module` is its name as a module of its own."""

    source: Source
    module: str
    view: MatrixView


class Task(NamedTuple):
    """One module of the output, or one tensor to copy.

    A copy takes part number `part` of the source, under `renamed` where that is given. A module
    has a logical `shape`, [N, K] or [E, N, K], and is made of `matrices` in this order; with
    `lanes`, so many neighbours share an expert and their rows alternate. `transposed` modules are
    written as [E, K, N].
    """

    treatment: Treatment
    source: Source
    module: str | None = None
    shape: tuple[int, ...] = ()
    matrices: tuple[Matrix, ...] = ()
    lanes: int = 1
    transposed: bool = False
    part: int = 0
    renamed: TensorInfo | None = None

    @property
    def shard(self) -> int:
        """The source shard that this task belongs to."""
        return self.source.parts[0].shard

    @property
    def stored(self) -> StoredTensor:
        """The stored tensor to copy, or the first that is read."""
        return self.source.parts[self.part].stored

    @property
    def view(self) -> MatrixView | None:
        """Where the (first) matrix lies; None for a copy."""
        return self.matrices[0].view if self.matrices else None

    @property
    def source_bytes(self) -> int:
        """Bytes of values or codes to read, without scales."""
        if not self.matrices:
            return self.stored.info.byte_count
        return sum(matrix_bytes(m.source, m.view.row_count) for m in self.matrices)

    def outputs(self, layout: OutputFormat) -> tuple[TensorInfo, ...]:
        """The tensors this task writes, in file order."""
        if self.module is None:
            return (self.renamed or self.stored.info,)
        if self.treatment is not Treatment.DECODE:
            return layout.tensors(self.module, self.shape)
        lead, shape = self.shape[:-2], self.shape
        if self.transposed:
            shape = (*lead, shape[-1], shape[-2])
        bare = self.module if self.transposed else self.source.info.name
        if layout.payload is not Payload.FP8:
            named = f"{self.module}.weight" if bare.endswith(".weight") else bare
            return (TensorInfo(named, "BF16", shape),)
        weight, scales = layout.tensors(self.module, shape)
        if bare.endswith(".weight"):
            return weight, scales
        return weight._replace(name=bare), scales._replace(name=f"{bare}_scale_inv")

    def byte_count(self, layout: OutputFormat) -> int:
        """Bytes of the tensors this task writes."""
        return sum(info.byte_count for info in self.outputs(layout))


def matrix_bytes(source: Source, row_count: int) -> int:
    """Bytes of so many rows of K values or codes of a source."""
    info = source.parts[0].info
    rows = source.info.element_count // source.info.shape[-1] if source.info.element_count else 1
    return info.byte_count * row_count // rows


@dataclass(frozen=True, slots=True)
class OutputShard:
    """One file of the output: its name, its tasks in file order, its tensor bytes."""

    name: str
    tasks: tuple[Task, ...]
    byte_count: int


@dataclass(frozen=True)
class Plan:
    """The whole conversion; see the module docstring."""

    checkpoint: Checkpoint
    recipe: Recipe
    level: Level
    options: OutputOptions
    tensors: PlannedTensors
    shards: tuple[OutputShard, ...]
    ignore: tuple[str, ...]
    warnings: tuple[str, ...]
    codes: str = ""
    """Identity of codes made elsewhere (calibration); empty when the codec makes them."""
    dropped: tuple[Part, ...] = ()
    """Stored tensors that nothing in the output needs, such as scales of activations."""
    stale: tuple[str, ...] = ()
    """Files of the source that describe its quantization, which are not carried over."""

    @property
    def companions(self) -> tuple[str, ...]:
        """Files to carry over unchanged."""
        return tuple(name for name in self.checkpoint.companions if name not in self.stale)

    @property
    def format(self) -> OutputFormat:
        """The output format's entry in the registry."""
        return output_format(self.options.format)

    @cached_property
    def blocked(self) -> tuple[PlannedTensor, ...]:
        """Tensors that the recipe wants to quantize and that cannot be."""
        return tuple(tensor for tensor in self.tensors if tensor.decision.blocked)

    @property
    def quantized(self) -> tuple[PlannedTensor, ...]:
        """Source tensors that will be quantized."""
        return self.treated(Treatment.QUANTIZE)

    def treated(self, treatment: Treatment) -> tuple[PlannedTensor, ...]:
        """Source tensors with one treatment."""
        return tuple(t for t in self.tensors if t.treatment is treatment)

    def output_tensors(self) -> Iterator[tuple[str, TensorInfo]]:
        """(shard name, tensor) for everything the output will hold."""
        layout = self.format
        for shard in self.shards:
            for task in shard.tasks:
                for info in task.outputs(layout):
                    yield shard.name, info

    @property
    def kinds(self) -> tuple[tuple[PlannedTensor, int], ...]:
        """The first tensor of every kind, with how many there are (see `PlannedTensors`)."""
        return self.tensors.kinds

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Counts and bytes of the whole conversion."""
        treated: Counter[Treatment] = Counter()
        for tensor, count in self.kinds:
            treated[tensor.treatment] += count
        return {
            "tensors": len(self.tensors),
            "quantized": treated[Treatment.QUANTIZE],
            "kept": treated[Treatment.KEEP],
            "passed": treated[Treatment.PASS],
            "decoded": treated[Treatment.DECODE],
            "dropped": len(self.dropped),
            "blocked": len(self.blocked),
            "parameters": sum(count * t.info.element_count for t, count in self.kinds),
            "bytes_before": sum(count * t.byte_count for t, count in self.kinds),
            "bytes_after": sum(shard.byte_count for shard in self.shards),
            "quantized_bytes_before": sum(
                count * t.byte_count for t, count in self.kinds if t.treatment is Treatment.QUANTIZE
            ),
            "source_shards": len(self.checkpoint.shards),
            "output_shards": len(self.shards),
        }

    @cached_property
    def id(self) -> str:
        """SHA-256 of the canonical document."""
        return hashlib.sha256(_canonical(self._content())).hexdigest()

    def document(self) -> dict[str, Any]:
        """The plan as JSON data, with its id."""
        return {**self._content(), "id": self.id}

    def _content(self) -> dict[str, Any]:
        config = self.checkpoint.config
        return {
            "format": PLAN_FORMAT,
            "codec": CODEC_ID,
            **({"codes": self.codes} if self.codes else {}),
            "source": {
                "files": [
                    {
                        "name": shard.name,
                        "size": shard.identity.size,
                        "mtime_ns": shard.identity.mtime_ns,
                        "header_sha256": shard.header.sha256,
                    }
                    for shard in self.checkpoint.shards
                ],
                "config_sha256": hashlib.sha256(_canonical(config)).hexdigest(),
                "companions": list(self.companions),
            },
            "recipe": self.recipe.to_json(),
            "level": str(self.level),
            "output": {
                "format": self.options.format,
                "layout": self.options.layout,
                "max_shard_bytes": self.options.max_shard_bytes,
                "alignment": DATA_ALIGNMENT,
                "activations": self.options.activations,
            },
            "totals": dict(self.totals),
            "shards": [
                {
                    "name": shard.name,
                    "bytes": shard.byte_count,
                    "tasks": [_task_row(task) for task in shard.tasks],
                }
                for shard in self.shards
            ],
        }


def first_difference(old: Any, new: Any, path: str = "") -> str:
    """Name the first place where two plan documents differ, or return an empty string."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            if key != "id":
                place = f"{path}.{key}" if path else str(key)
                if found := first_difference(old.get(key), new.get(key), place):
                    return found
        return ""
    if isinstance(old, list) and isinstance(new, list):
        for number, (before, after) in enumerate(zip(old, new, strict=False)):
            if found := first_difference(before, after, f"{path}[{number}]"):
                return found
        if len(old) != len(new):
            return f"{path} had {len(old)} entries, now {len(new)}"
        return ""
    return "" if old == new else f"{path} was {old!r}, now {new!r}"


def _task_row(task: Task) -> list[Any]:
    """What decides a task's bytes: its parts by shard and name, and how they are cut."""
    if task.module is None:
        part = task.source.parts[task.part]
        row: list[Any] = [part.shard, part.info.name]
        return [*row, task.renamed.name, task.renamed.dtype] if task.renamed else row
    row = [task.shard, task.stored.info.name, task.module, str(task.treatment)]
    if task.lanes > 1 or task.transposed:
        row.append([task.lanes, int(task.transposed)])
    for matrix in task.matrices:
        view = matrix.view
        numbers = [view.row_count, view.column_count, view.offset]
        row.append([*numbers, view.row_stride, view.column_stride])
        if not matrix.source.plain or len(task.matrices) > 1:
            row.append([[part.shard, part.info.name] for part in matrix.source.parts])
    return row


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
