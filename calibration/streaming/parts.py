"""What of a decoder layer is quantized together: linears that share their input, banks of experts.

A part belongs to a stage. Attention comes first and all else behind it, so that what follows the
attention is calibrated on the attention as it will be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from mxfp4.calibration.streaming.layout import Layout, Slot, weight_module
from mxfp4.converters.plan import Plan
from mxfp4.converters.roles import Role, TensorRole

ATTENTION_STAGE, OTHER_STAGE = 0, 1
_ATTENTION = frozenset({Role.ATTENTION, Role.ATTENTION_GATE})


@dataclass(frozen=True)
class LinearPart:
    """Linears with one input; paths are relative to the decoder layer, slots in their order."""

    key: str
    stage: int
    slots: tuple[Slot, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class BankPart:
    """The stacked experts under one container module; slots by expert, in stacked order."""

    key: str
    stage: int
    path: str
    first: Mapping[int, tuple[Slot, ...]]
    """Matrices that read the layer's hidden states: gate and up."""
    second: Mapping[int, tuple[Slot, ...]]
    """The matrix that reads what the expert computed: down."""


Part = LinearPart | BankPart


@dataclass
class _Bank:
    first: dict[int, list[Slot]] = field(default_factory=dict)
    second: dict[int, list[Slot]] = field(default_factory=dict)


def find_parts(layer: nn.Module, prefix: str, layout: Layout, plan: Plan) -> list[Part]:
    """The parts of a decoder layer that the plan quantizes; `prefix` is the layer's name."""
    roles = {tensor.info.name: tensor.decision.role for tensor in plan.tensors}
    linears: dict[str, list[tuple[Slot, str]]] = {}
    banks: dict[str, _Bank] = {}
    stages: dict[str, int] = {}
    for name, parameter in layer.named_parameters():
        for slot in layout.slots(f"{prefix}.{name}", parameter.shape):
            role = _role_of(slot, roles)
            if slot.expert is not None:
                path, _, leaf = name.rpartition(".")
                bank = banks.setdefault(path, _Bank())
                side = bank.second if leaf.startswith("down") else bank.first
                side.setdefault(slot.expert, []).append(slot)
                continue
            # Engines fuse all experts of a layer, which do not share an input; others do.
            shared = role.group if role.group and role.role is not Role.EXPERT else None
            key = shared or slot.module
            linears.setdefault(key, []).append((slot, weight_module(name)))
            stages[key] = ATTENTION_STAGE if role.role in _ATTENTION else OTHER_STAGE
    parts: list[Part] = [
        LinearPart(key, stages[key], tuple(s for s, _ in found), tuple(p for _, p in found))
        for key, found in linears.items()
    ]
    parts += [
        BankPart(f"{prefix}.{path}", OTHER_STAGE, path, _frozen(bank.first), _frozen(bank.second))
        for path, bank in banks.items()
    ]
    return parts


def _frozen(side: Mapping[int, list[Slot]]) -> dict[int, tuple[Slot, ...]]:
    return {expert: tuple(slots) for expert, slots in sorted(side.items())}


def _role_of(slot: Slot, roles: Mapping[str, TensorRole]) -> TensorRole:
    return roles.get(f"{slot.module}.weight") or roles[slot.parameter]


def matrix(layer: nn.Module, prefix: str, slot: Slot) -> torch.Tensor:
    """The weight [N, K] of a slot inside a filled layer; writing to it changes the layer."""
    return slot.of(layer.get_parameter(slot.parameter.removeprefix(prefix + ".")))
