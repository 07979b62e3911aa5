"""What a conversion will do, decided from headers alone: one decision per tensor, tasks per module.

A `Plan` is immutable. Its document (`Plan.document`) is canonical JSON whose SHA-256 is the plan's
id: the same source, recipe and output options give the same id and, with the same codec, the same
bytes. Output shards are the units of work; each is independent of all others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mxfp4.converters.checkpoint import Checkpoint
from mxfp4.converters.decide import Action, Decision
from mxfp4.converters.formats import OutputFormat, output_format
from mxfp4.converters.header import DATA_ALIGNMENT, StoredTensor, TensorInfo
from mxfp4.converters.reader import MatrixView
from mxfp4.converters.recipe import Level, Recipe

PLAN_FORMAT = "mxfp4-plan/1"
CODEC_ID = "e2m1-e8m0/1"
"""Changes whenever the codec writes other bytes for the same input and rule."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the output is laid out; part of the plan's identity."""

    format: str = "compressed-tensors"
    max_shard_bytes: int = 5_000_000_000
    layout: str = "pack"
    """`pack` fills shards up to `max_shard_bytes`; `same` keeps the source's shards and names."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One source tensor and what becomes of it."""

    shard: int
    stored: StoredTensor
    decision: Decision

    @property
    def info(self) -> TensorInfo:
        """Name, dtype and shape."""
        return self.stored.info


@dataclass(frozen=True, slots=True)
class Task:
    """One module of the output: a tensor to copy, or an [N, K] matrix to quantize.

    For a matrix, `module` names the output module and `view` says where the matrix lies in the
    source tensor; for a copy both are None.
    """

    shard: int
    stored: StoredTensor
    module: str | None = None
    view: MatrixView | None = None

    def outputs(self, layout: OutputFormat) -> tuple[TensorInfo, ...]:
        """The tensors this task writes, in file order."""
        if self.module is None or self.view is None:
            return (self.stored.info,)
        rows, columns = self.view.row_count, self.view.column_count
        return (
            layout.codes(self.module, rows, columns),
            layout.scales(self.module, rows, columns),
        )

    def byte_count(self, layout: OutputFormat) -> int:
        """Bytes of the tensors this task writes."""
        return sum(info.byte_count for info in self.outputs(layout))


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
    tensors: tuple[PlannedTensor, ...]
    shards: tuple[OutputShard, ...]
    ignore: tuple[str, ...]
    warnings: tuple[str, ...]
    codes: str = ""
    """Identity of codes made elsewhere (calibration); empty when the codec makes them."""

    @property
    def format(self) -> OutputFormat:
        """The output format's entry in the registry."""
        return output_format(self.options.format)

    @property
    def blocked(self) -> tuple[PlannedTensor, ...]:
        """Tensors that the recipe wants to quantize and that cannot be."""
        return tuple(tensor for tensor in self.tensors if tensor.decision.blocked)

    @property
    def quantized(self) -> tuple[PlannedTensor, ...]:
        """Source tensors that will be quantized."""
        return tuple(t for t in self.tensors if t.decision.action is Action.QUANTIZE)

    def output_tensors(self) -> Iterator[tuple[str, TensorInfo]]:
        """(shard name, tensor) for everything the output will hold."""
        layout = self.format
        for shard in self.shards:
            for task in shard.tasks:
                for info in task.outputs(layout):
                    yield shard.name, info

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Counts and bytes of the whole conversion."""
        quantized = self.quantized
        return {
            "tensors": len(self.tensors),
            "quantized": len(quantized),
            "kept": len(self.tensors) - len(quantized),
            "blocked": len(self.blocked),
            "parameters": sum(t.info.element_count for t in self.tensors),
            "bytes_before": sum(t.info.byte_count for t in self.tensors),
            "bytes_after": sum(shard.byte_count for shard in self.shards),
            "quantized_bytes_before": sum(t.info.byte_count for t in quantized),
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
                "companions": list(self.checkpoint.companions),
            },
            "recipe": self.recipe.to_json(),
            "level": str(self.level),
            "output": {
                "format": self.options.format,
                "layout": self.options.layout,
                "max_shard_bytes": self.options.max_shard_bytes,
                "alignment": DATA_ALIGNMENT,
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
    row: list[Any] = [task.shard, task.stored.info.name]
    if task.module is not None and task.view is not None:
        view = task.view
        row.append(task.module)
        row.append([view.row_count, view.column_count, view.offset])
        row[-1] += [view.row_stride, view.column_stride]
    return row


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
