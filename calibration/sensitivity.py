"""`sensitivity`: which fusion groups are worth their bytes in the source dtype, under a budget.

A group is what engines fuse and so must be quantized as a whole. It is ranked by the output error
that quantizing it makes, relative to its output, for every byte that quantizing it saves. From
weights alone all inputs count as equal and uncorrelated; with collected statistics the error is
measured on their moments. Groups that hurt most per byte are kept until the budget is used up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mxfp4.calibration.moments import output_error
from mxfp4.calibration.rounding import round_even
from mxfp4.calibration.statistics import Statistics, read_matrix
from mxfp4.converters.plan import Plan, PlannedTensor
from mxfp4.converters.planning import tasks_of
from mxfp4.converters.recipe import Recipe
from mxfp4.errors import RecipeError

BITS_PER_BYTE = 8


@dataclass(frozen=True)
class GroupSensitivity:
    """One fusion group: its source tensors, sizes, and what quantizing it costs.

    `error` is the output error relative to the output's energy, summed over modules in proportion
    to their energy; `score` is that error per byte saved.
    """

    name: str
    tensors: tuple[str, ...]
    elements: int
    bytes_kept: int
    bytes_quantized: int
    error: float

    @property
    def saved_bytes(self) -> int:
        """Bytes that quantizing the group saves."""
        return self.bytes_kept - self.bytes_quantized

    @property
    def score(self) -> float:
        """Error per byte saved."""
        return self.error / self.saved_bytes

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensor names."""
        return {
            "group": self.name,
            "tensors": len(self.tensors),
            "elements": self.elements,
            "bytes_saved": self.saved_bytes,
            "relative_output_error": self.error,
            "error_per_gigabyte": self.score * 1e9,
        }


@dataclass(frozen=True)
class Budget:
    """How large the result may be: bits per quantizable weight, or bytes of all tensors."""

    bits: float | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class SensitivityReport:
    """Groups from most to least sensitive, the recipe that keeps the first, and what it gives."""

    groups: tuple[GroupSensitivity, ...]
    kept: tuple[GroupSensitivity, ...]
    recipe: Recipe
    bits: float
    byte_count: int

    def to_json(self) -> dict[str, Any]:
        """The ranking and the recipe."""
        return {
            "format": "mxfp4-sensitivity/1",
            "bits_per_weight": self.bits,
            "bytes": self.byte_count,
            "kept": [group.name for group in self.kept],
            "recipe": self.recipe.to_json(),
            "groups": [group.to_json() for group in self.groups],
        }


def sensitivity(
    plan: Plan, budget: Budget, statistics: Statistics | None = None
) -> SensitivityReport:
    """Rank the groups that a plan quantizes and keep the most sensitive ones within a budget.

    Raises `RecipeError` when even a plan that keeps nothing more is larger than the budget.
    """
    groups = sorted(rank(plan, statistics), key=lambda g: (-g.score, g.name))
    total = plan.totals["bytes_after"]
    weights = sum(group.elements for group in groups)
    room = _room(budget, groups, total, weights)
    kept: list[GroupSensitivity] = []
    for group in groups:
        if group.saved_bytes <= room:
            kept.append(group)
            room -= group.saved_bytes
    added = sum(group.saved_bytes for group in kept)
    quantized = sum(group.bytes_quantized for group in groups)
    patterns = tuple(name for group in kept for name in group.tensors)
    recipe = replace(plan.recipe, level=plan.level, keep=(*plan.recipe.keep, *patterns))
    bits = (quantized + added) * BITS_PER_BYTE / max(weights, 1)
    return SensitivityReport(tuple(groups), tuple(kept), recipe, bits, total + added)


def rank(plan: Plan, statistics: Statistics | None) -> list[GroupSensitivity]:
    """The sensitivity of every group that the plan quantizes."""
    members: dict[str, list[PlannedTensor]] = {}
    for tensor in plan.quantized:
        members.setdefault(tensor.decision.role.group or tensor.info.name, []).append(tensor)
    return [_measure(plan, name, found, statistics) for name, found in members.items()]


def _measure(
    plan: Plan, name: str, tensors: list[PlannedTensor], statistics: Statistics | None
) -> GroupSensitivity:
    tasks = [task for tensor in tensors for task in tasks_of(tensor)]
    lost = energy = 0.0
    for task in tasks:
        assert task.module is not None
        weight = read_matrix(plan, task).unsqueeze(0)
        values = round_even(weight).values()
        if statistics is None:
            lost += float(((weight - values) ** 2).sum())
            energy += float((weight**2).sum())
        else:
            hessian = statistics.entry(task.module).moments.mean()
            lost += float(output_error(weight, values, hessian)[0])
            energy += float(output_error(weight, torch.zeros_like(weight), hessian)[0])
    return GroupSensitivity(
        name,
        tuple(tensor.info.name for tensor in tensors),
        sum(tensor.info.element_count for tensor in tensors),
        sum(tensor.info.byte_count for tensor in tensors),
        sum(info.byte_count for task in tasks for info in task.outputs(plan.format)),
        lost / energy if energy else 0.0,
    )


def _room(budget: Budget, groups: list[GroupSensitivity], total: int, weights: int) -> int:
    """Bytes that may be added to the plan's result."""
    if (budget.bits is None) == (budget.max_bytes is None):
        raise RecipeError("give one budget", hint="either --bits 4.6 or --max-size 20GiB")
    if budget.max_bytes is not None:
        room, smallest = budget.max_bytes - total, f"{total:,} bytes"
    else:
        assert budget.bits is not None
        quantized = sum(group.bytes_quantized for group in groups)
        room = int(budget.bits * weights / BITS_PER_BYTE) - quantized
        smallest = f"{quantized * BITS_PER_BYTE / max(weights, 1):.3f} bits per weight"
    if room < 0:
        raise RecipeError(
            f"the smallest result of this level is {smallest}",
            hint="raise the budget, or quantize more with --level",
        )
    return room


def recipe_yaml(recipe: Mapping[str, Any]) -> str:
    """A recipe file with these settings."""
    import yaml

    return yaml.safe_dump({k: v for k, v in recipe.items() if v}, sort_keys=False)
