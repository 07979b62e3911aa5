"""Which checkpoint tensors fill which model parameters, and where each module's matrix lies there.

transformers stacks the experts of a layer in one parameter [E, 2I, H] that most checkpoints store
as 3E matrices; a plan names every matrix as a module of its own. A `Slot` joins the three.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from mxfp4.converters.plan import Plan, Task, Treatment
from mxfp4.converters.planning import module_of
from mxfp4.converters.reader import MatrixView
from mxfp4.errors import TensorNotFoundError, UnsupportedFormatError

BANK_PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w1",)),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Leaf of a stacked parameter to the names its parts can have per expert, in stacked order."""

PACKED = ".weight_packed"
SCALES = ".weight_scale"


@dataclass(frozen=True, slots=True)
class Slot:
    """The [N, K] matrix of a module inside a model parameter; `expert` is None outside banks."""

    module: str
    parameter: str
    view: MatrixView
    expert: int | None = None

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The matrix as a view into the contiguous parameter; writing to it changes the latter."""
        view = self.view
        return parameter.as_strided(
            (view.row_count, view.column_count),
            (view.row_stride, view.column_stride),
            parameter.storage_offset() + view.offset,
        )


@dataclass(frozen=True)
class Layout:
    """Where the tensors of one checkpoint go.

    `names` are all stored tensors; `tasks` the quantized modules of each source tensor, empty for
    a checkpoint that is only run.
    """

    names: Collection[str]
    tasks: Mapping[str, tuple[Task, ...]]

    @classmethod
    def of_plan(cls, plan: Plan) -> Layout:
        """The layout of a plan's source."""
        tasks: dict[str, list[Task]] = {}
        for shard in plan.shards:
            for task in shard.tasks:
                if task.treatment is Treatment.QUANTIZE:
                    tasks.setdefault(task.stored.info.name, []).append(task)
        names = {tensor.info.name for tensor in plan.tensors}
        return cls(names, {name: tuple(found) for name, found in tasks.items()})

    def slots(self, parameter: str, shape: torch.Size) -> list[Slot]:
        """Modules of this parameter that the plan quantizes."""
        if parameter in self.names:
            found = self.tasks.get(parameter, ())
            several = len(shape) > 2
            return [
                Slot(task.module, parameter, task.view, number % shape[0] if several else None)
                for number, task in enumerate(_expert_order(found, shape))
                if task.module is not None and task.view is not None
            ]
        return [
            slot for slot in self.bank(parameter, shape) if f"{slot.module}.weight" in self.tasks
        ]

    def bank(self, parameter: str, shape: torch.Size) -> list[Slot]:
        """Every expert matrix of a stacked parameter [E, P N, K] stored one by one."""
        parent, _, leaf = parameter.rpartition(".")
        parts = self._parts(parent, leaf)
        if parts is None or len(shape) != 3:
            raise TensorNotFoundError(
                f"the model has this parameter {list(shape)}, and the checkpoint holds neither it "
                "nor its experts one by one",
                tensor=parameter,
                hint="check that config.json belongs to these weights",
            )
        experts, stacked, columns = shape
        rows = stacked // len(parts)
        return [
            Slot(
                f"{parent}.{expert}.{part}",
                parameter,
                MatrixView(
                    rows, columns, (expert * len(parts) + place) * rows * columns, columns, 1
                ),
                expert,
            )
            for expert in range(experts)
            for place, part in enumerate(parts)
        ]

    def has_module(self, module: str) -> bool:
        """Whether a weight is stored, plain or packed."""
        return f"{module}.weight" in self.names or module + PACKED in self.names

    def _parts(self, parent: str, leaf: str) -> tuple[str, ...] | None:
        for parts in BANK_PARTS.get(leaf, ()):
            if all(self.has_module(f"{parent}.0.{part}") for part in parts):
                return parts
        return None


def _expert_order(tasks: tuple[Task, ...], shape: torch.Size) -> Iterator[Task]:
    """Tasks of a stored bank, part by part, so that counting modulo E gives the expert."""
    if len(shape) <= 2:
        yield from tasks
        return
    if len(tasks) % shape[0]:
        raise UnsupportedFormatError(f"{len(tasks)} modules for {shape[0]} experts")
    parts = len(tasks) // shape[0]
    for part in range(parts):
        yield from tasks[part::parts]


def weight_module(parameter: str) -> str:
    """The module that a `.weight` parameter belongs to."""
    return module_of(parameter)
