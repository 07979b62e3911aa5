"""Moments on disk: what a run over the text learned, to be used later and elsewhere.

Collecting needs the model, transformers and time; choosing codes from what was collected needs the
checkpoint alone. Each input of K channels costs 8 K^2 bytes, and every expert has inputs of its
own, so that this is for models of moderate width; plain `calibrate` never stores moments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mxfp4.calibration.block import BlockResult, ModuleResult, module_facts
from mxfp4.calibration.methods import MethodOptions, round_stack
from mxfp4.calibration.moments import Moments
from mxfp4.calibration.store import CodeStore
from mxfp4.calibration.streaming.capture import (
    expert_function,
    first_moments,
    layer_prior,
    observe,
    second_moments,
)
from mxfp4.calibration.streaming.layout import Slot
from mxfp4.calibration.streaming.parts import BankPart, LinearPart
from mxfp4.calibration.streaming.walk import Visit, Walk
from mxfp4.converters.plan import Plan, Task, Treatment
from mxfp4.converters.reader import ShardReader, SlabBuffer
from mxfp4.errors import CorruptCheckpointError, OutputExistsError, TensorNotFoundError
from mxfp4.kernels.fallback import float_values

_INDEX = "statistics.json"
_FORMAT = "mxfp4-statistics/1"
_FIELDS = ("sums", "weights", "counts")


@dataclass(frozen=True)
class Entry:
    """Moments of one module's inputs and what they are shrunk towards (None outside experts)."""

    moments: Moments
    prior: Moments | None


class Statistics:
    """A folder of collected moments, read module by module.

    Raises `CorruptCheckpointError` when the folder is not complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = json.loads((folder / _INDEX).read_bytes())
        except (OSError, ValueError) as error:
            raise CorruptCheckpointError(
                f"these are no complete statistics ({error})",
                file=str(folder),
                hint="collect them with mxfp4 calibrate SOURCE --collect FOLDER",
            ) from error
        self.facts: Mapping[str, Any] = index["facts"]
        self._places: Mapping[str, list[Any]] = index["modules"]

    @property
    def modules(self) -> Sequence[str]:
        """Every module that there are moments for."""
        return list(self._places)

    @property
    def layer_count(self) -> int:
        """Files of the folder, one per decoder layer."""
        return 1 + max((int(place[0]) for place in self._places.values()), default=-1)

    def layer_of(self, module: str) -> int:
        """The decoder layer that a module is in."""
        return int(self._places[module][0])

    def entry(self, module: str) -> Entry:
        """Moments and prior of one module."""
        number, key, position = self._places[module]
        one = slice(int(position), int(position) + 1)
        with np.load(_file(self.folder, number)) as arrays:
            moments = _load(arrays, key, one)
            if f"{key}|prior|sums" not in arrays:
                return Entry(moments, None)
            single = len(arrays[f"{key}|prior|counts"]) == 1
            return Entry(moments, _load(arrays, f"{key}|prior", slice(0, 1) if single else one))


def collect(walk: Walk, facts: Mapping[str, Any]) -> Statistics:
    """Run the source on all tokens and write the moments of every input to `walk.folder`."""
    folder = walk.folder
    if (folder / _INDEX).exists():
        raise OutputExistsError(
            "this folder already holds statistics", file=str(folder), hint="choose another folder"
        )
    places: dict[str, list[Any]] = {}

    def visit(visit: Visit) -> None:
        found, here = layer_moments(visit)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for key, entry in found.items():
            _store(arrays, key, entry.moments)
            if entry.prior is not None:
                _store(arrays, f"{key}|prior", entry.prior)
        with open(_file(folder, visit.number), "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        places.update({name: [visit.number, key, at] for name, (key, at) in here.items()})

    walk.go(0, visit, lambda number: None)
    index = {"format": _FORMAT, "facts": dict(facts), "modules": places}
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    return Statistics(folder)


def layer_moments(visit: Visit) -> tuple[dict[str, Entry], dict[str, tuple[str, int]]]:
    """Moments of all inputs in a layer by key, and (key, stack entry) of every module."""
    linears = [part for part in visit.parts if isinstance(part, LinearPart)]
    banks = [part for part in visit.parts if isinstance(part, BankPart)]
    moments, routes = observe(visit, linears, banks)
    found = {part.key: Entry(moments[part.key], None) for part in linears}
    places = {slot.module: (part.key, 0) for part in linears for slot in part.slots}
    for bank in banks:
        route = routes[bank.key]
        if bank.first:
            key, experts = f"{bank.key}#first", sorted(bank.first)
            found[key] = Entry(first_moments(route, experts), layer_prior(route))
            places.update(_expert_places(key, experts, bank.first))
        if bank.second:
            key, experts = f"{bank.key}#second", sorted(bank.second)
            through = expert_function(visit.layer.get_submodule(bank.path), bank)
            found[key] = Entry(*second_moments(route, experts, through))
            places.update(_expert_places(key, experts, bank.second))
    return found, places


def codes_from(
    plan: Plan,
    statistics: Statistics,
    options: MethodOptions,
    store: CodeStore,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Choose codes for every quantized module from its weight and its moments; no model is run.

    Raises `TensorNotFoundError` for a module without moments.
    """
    by_layer: dict[int, list[Task]] = {}
    for shard in plan.shards:
        for task in shard.tasks:
            if task.module is not None and task.treatment is Treatment.QUANTIZE:
                if task.module not in statistics.modules:
                    raise TensorNotFoundError(
                        "the statistics have no moments for this module",
                        tensor=task.module,
                        hint="collect them with the same recipe and level",
                    )
                by_layer.setdefault(statistics.layer_of(task.module), []).append(task)
    for number in range(store.done_layers, statistics.layer_count):
        result = BlockResult()
        for task in by_layer.get(number, []):
            assert task.module is not None
            weight = read_matrix(plan, task).unsqueeze(0)
            entry = statistics.entry(task.module)
            outcome = round_stack(weight, entry.moments, entry.prior, options)
            packed = outcome.rounded.pack()
            facts = module_facts(outcome, 0, entry.moments, weight)
            result.modules[task.module] = ModuleResult(packed.codes[0], packed.scales[0], facts)
        store.save(number, result)
        on_layer(number + 1, statistics.layer_count)


def read_matrix(plan: Plan, task: Task) -> torch.Tensor:
    """The source weight of a task as float32 [N, K]."""
    assert task.view is not None
    view = task.view
    pieces = []
    with ShardReader(plan.checkpoint.shards[task.shard], SlabBuffer()) as reader:
        for slab in reader.slabs(task.stored, view):
            pieces.append(float_values(slab.bits, task.stored.info.dtype).reshape(-1).copy())
    return torch.from_numpy(np.concatenate(pieces)).reshape(view.row_count, view.column_count)


def _expert_places(
    key: str, experts: Sequence[int], side: Mapping[int, tuple[Slot, ...]]
) -> dict[str, tuple[str, int]]:
    return {slot.module: (key, at) for at, e in enumerate(experts) for slot in side[e]}


def _store(arrays: dict[str, np.ndarray[Any, Any]], key: str, moments: Moments) -> None:
    for name in _FIELDS:
        arrays[f"{key}|{name}"] = getattr(moments, name).numpy()


def _load(arrays: Mapping[str, np.ndarray[Any, Any]], key: str, entries: slice) -> Moments:
    return Moments(
        torch.from_numpy(arrays[f"{key}|sums"][:, entries].copy()),
        torch.from_numpy(arrays[f"{key}|weights"][:, entries].copy()),
        torch.from_numpy(arrays[f"{key}|counts"][entries].copy()),
    )


def _file(folder: Path, number: int) -> Path:
    return folder / f"layer-{number:05d}.npz"
