"""What the chosen layout makes of each decision, given how the tensor is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mxfp4.converters.checkpoint import Checkpoint
from mxfp4.converters.decide import Action, Decision
from mxfp4.converters.formats import OutputFormat, Payload
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.plan import PlannedTensor, PlannedTensors, Treatment
from mxfp4.converters.roles import ExpertBank, Role, TensorRole, facts_of, words
from mxfp4.converters.roles.banks import projections_of
from mxfp4.converters.sources import PACKED, STORAGES, Source
from mxfp4.converters.sources.types import PLAIN
from mxfp4.errors import RecipeError, UnsupportedFormatError

_BANK_ROLES = frozenset({Role.EXPERT, Role.SHARED_EXPERT})
_DEFAULT_BLOCK = (128, 128)
_VALUES = frozenset({PLAIN, "fp8"})
"""Storages with an element of its own for every value, along either axis."""

# Once, as Python 3.11 takes longer to find a member of an enumeration than to decide a tensor.
_WANTED = Action.QUANTIZE
_QUANTIZE, _KEEP = Treatment.QUANTIZE, Treatment.KEEP
_PASS, _DECODE = Treatment.PASS, Treatment.DECODE


def packed_roles(
    sources: Sequence[Source],
    infos: Sequence[TensorInfo],
    roles: Sequence[TensorRole],
    config: Mapping[str, Any] | None,
) -> list[TensorRole]:
    """Roles with what packing itself proves: codes lie along the last axis, so K is last."""
    changed = list(roles)
    facts = None
    for position, (source, role) in enumerate(zip(sources, roles, strict=True)):
        if source.storage in _VALUES:
            continue
        shape = source.info.shape
        if len(shape) == 2 and role.axis != 1 and role.bank is None:
            changed[position] = role._replace(axis=1)
        elif len(shape) == 3 and _trunk_role(role) in _BANK_ROLES:
            facts = facts or facts_of(infos, config)
            leaf = source.info.name.removesuffix(".weight").rpartition(".")[2].lower()
            fused = words.stem(leaf) in words.FUSED_IN
            projections, arrangement = projections_of(leaf, fused, facts)
            bank = ExpertBank(shape[0], 1, projections, arrangement)
            changed[position] = role._replace(axis=2, bank=bank)
    return changed


def _trunk_role(role: TensorRole) -> Role | None:
    return role.inner if role.role is Role.MTP else role.role


def shared_block(sources: Sequence[Source]) -> tuple[int, int]:
    """The block size that most FP8 weights of a checkpoint share."""
    found = Counter(s.block for s in sources if s.storage == "fp8" and min(s.block) > 1)
    return found.most_common(1)[0][0] if found else _DEFAULT_BLOCK


def stays_fp8(source: Source, layout: OutputFormat, block: tuple[int, int]) -> bool:
    """Whether a layout can hold an FP8 weight as it is: one block size, scales it can name."""
    if source.storage != "fp8" or layout.fp8_scale is None or source.block != block:
        return False
    if layout.payload is Payload.FP8 and block != _DEFAULT_BLOCK:
        return False
    weight, scale = (part.info for part in source.parts)
    same_rank = len(scale.shape) == len(weight.shape)
    return weight.dtype == "F8_E4M3" and same_rank and scale.dtype in layout.fp8_scale_dtypes


def treat(
    sources: Sequence[Source],
    decisions: Sequence[Decision],
    layout: OutputFormat,
    checkpoint: Checkpoint,
) -> PlannedTensors:
    """A treatment for every source, given its decision.

    Raises `RecipeError` where the recipe asks for more than the layout can hold.
    """
    block = shared_block(sources)
    quantizes = layout.payload is Payload.MXFP4
    planned = []
    for source, decision in zip(sources, decisions, strict=True):
        if not quantizes:
            decision = _unquantized(decision, layout)
        treatment = _treatment(source, decision, layout, block)
        if treatment is _QUANTIZE:
            _require_readable(source, decision, layout, checkpoint)
        elif treatment is not _KEEP:
            decision = _explained(decision, treatment)
        planned.append(PlannedTensor(source, decision, treatment))
    return PlannedTensors(planned)


def _unquantized(decision: Decision, layout: OutputFormat) -> Decision:
    if decision.action is Action.KEEP and not decision.blocked:
        return decision
    reason = f"the layout {layout.name} quantizes nothing"
    return decision._replace(action=Action.KEEP, reason=reason, blocked=False)


def _treatment(
    source: Source, decision: Decision, layout: OutputFormat, block: tuple[int, int]
) -> Treatment:
    wanted = decision.action is _WANTED
    if source.storage == PLAIN:
        return _QUANTIZE if wanted else _KEEP
    if source.storage in PACKED and layout.payload is Payload.MXFP4:
        held = layout.roles is None or _trunk_role(decision.role) in layout.roles
        return _PASS if held else _DECODE
    if wanted:
        return _QUANTIZE
    return _KEEP if stays_fp8(source, layout, block) else _DECODE


def _require_readable(
    source: Source, decision: Decision, layout: OutputFormat, checkpoint: Checkpoint
) -> None:
    role = decision.role
    if layout.roles is not None and _trunk_role(role) not in layout.roles:
        raise RecipeError(
            f"the layout {layout.name} holds {', '.join(sorted(layout.roles))} weights only, and "
            f"this {role.role} would be quantized ({decision.reason})",
            tensor=source.info.name,
            hint="use --level experts or another --format",
        )
    last = len(source.info.shape) - 1
    if not source.plain and role.axis != last:
        raise UnsupportedFormatError(
            f"{STORAGES[source.storage].label} with the contraction axis at {role.axis} of "
            f"{list(source.info.shape)} is not read",
            file=checkpoint.shards[source.parts[0].shard].name,
            tensor=source.info.name,
            hint=f"leave it alone with --keep '{source.info.name}'",
        )


def _explained(decision: Decision, treatment: Treatment) -> Decision:
    """The decision with the reason why a tensor is passed on or decoded."""
    reason = "stored as MXFP4 already; its bytes stay as they are"
    if treatment is _DECODE:
        reason = f"{decision.reason}; decoded, because the layout cannot hold its stored form"
    return Decision(decision.action, decision.role, reason)
