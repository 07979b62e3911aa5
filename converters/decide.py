"""Roles and a recipe in, one decision and its reason per tensor out.

Everything is kept unless its role belongs to the level or a pattern asks for it. Tensors that
engines fuse share one decision: one member that must stay keeps the whole group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from mxfp4.converters.header import TensorInfo
from mxfp4.converters.patterns import NamePatterns
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Kind, Role, TensorRole
from mxfp4.errors import RecipeError
from mxfp4.spec import BLOCK_SIZE

PROTECTED_ROLES = frozenset(
    {
        Role.ROUTER,
        Role.ROUTER_BIAS,
        Role.SHARED_EXPERT_GATE,
        Role.EMBEDDING,
        Role.LM_HEAD,
        Role.NORM,
        Role.BIAS,
        Role.CONV,
        Role.SSM_SMALL,
        Role.INDEXER,
    }
)
"""A pattern alone never quantizes these; `force_roles` has to name them."""

LEVEL_ROLES: Mapping[Level, frozenset[Role]] = {
    Level.EXPERTS: frozenset({Role.EXPERT}),
    Level.MOE: frozenset({Role.EXPERT, Role.SHARED_EXPERT, Role.MLP}),
    Level.LINEAR: frozenset({Role.EXPERT, Role.SHARED_EXPERT, Role.MLP, Role.ATTENTION}),
    Level.ALL: frozenset(
        {
            Role.EXPERT,
            Role.SHARED_EXPERT,
            Role.MLP,
            Role.ATTENTION,
            Role.ATTENTION_GATE,
            Role.OTHER_LINEAR,
        }
    ),
}
"""Roles of each level; `ALL_ONLY_KINDS` narrows it."""

ALL_ONLY_KINDS = frozenset({Kind.SSM_PROJECTION, Kind.LATENT_MOE})
"""Kinds that only the level `all` takes; of `other_linear` it takes nothing else."""

SOURCE_DTYPES = frozenset({"BF16", "F16", "F32"})
"""Stored dtypes that can be quantized as they are."""


class Action(StrEnum):
    """What happens to a tensor."""

    QUANTIZE = "quantize"
    KEEP = "keep"


class Decision(NamedTuple):
    """`blocked`: wanted, but its shape cannot hold blocks; a conversion refuses until it is kept
    on purpose."""

    action: Action
    role: TensorRole
    reason: str
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one tensor would get alone. `final` keeps its group from being quantized."""

    quantize: bool
    reason: str
    blocked: bool = False
    final: bool = False
    asked: bool = False


def default_level(roles: Mapping[str, TensorRole] | Sequence[TensorRole]) -> Level:
    """Experts if the model has any outside its prediction blocks, else linear."""
    listed = roles.values() if isinstance(roles, Mapping) else roles
    has_experts = any(role.role is Role.EXPERT for role in listed)
    return Level.EXPERTS if has_experts else Level.LINEAR


def decide(
    tensors: Sequence[TensorInfo], roles: Mapping[str, TensorRole], recipe: Recipe
) -> dict[str, Decision]:
    """A decision for every tensor, in the order given.

    Raises `RecipeError` for a pattern that matches nothing, for one that would quantize a
    protected role, and for one that asks for a part of a fusion group only.
    """
    listed = [roles[info.name] for info in tensors]
    decisions = decide_each(tensors, listed, recipe)
    return {info.name: found for info, found in zip(tensors, decisions, strict=True)}


def decide_each(
    tensors: Sequence[TensorInfo], roles: Sequence[TensorRole], recipe: Recipe
) -> list[Decision]:
    """The decisions of `decide` for tensors and their roles in the same order."""
    names = [info.name for info in tensors]
    kept = NamePatterns(recipe.keep, "keep").match(names)
    asked = NamePatterns(recipe.quantize, "quantize").match(names)
    level = recipe.level if recipe.level is not None else default_level(roles)
    wishes: dict[tuple[object, ...], _Wish] = {}
    chosen: list[_Wish] = []
    groups: dict[str, list[int]] = {}
    for position, (info, role) in enumerate(zip(tensors, roles, strict=True)):
        keep, want = kept.get(info.name), asked.get(info.name)
        key = (role.verdict, info.dtype, info.shape, keep, want)
        wish = wishes.get(key)
        if wish is None:
            wish = wishes[key] = _wish(info, role, level, recipe, keep, want)
        chosen.append(wish)
        if role.group is not None:
            groups.setdefault(role.group, []).append(position)
    _settle(groups, chosen, names, roles)
    actions = {True: Action.QUANTIZE, False: Action.KEEP}
    return [
        Decision(actions[wish.quantize], role, wish.reason, wish.blocked)
        for role, wish in zip(roles, chosen, strict=True)
    ]


def _wish(
    info: TensorInfo,
    role: TensorRole,
    level: Level,
    recipe: Recipe,
    keep: str | None,
    asked: str | None,
) -> _Wish:
    if keep is not None:
        return _Wish(False, f"kept by the pattern {keep!r}", final=True)
    if asked is not None and Role.BIAS in (role.role, role.inner) and "bias" not in asked:
        return _Wish(False, f"a bias is not part of what {asked!r} quantizes")
    if asked is not None:
        _refuse_protected(info, role, recipe, asked)
        reason = f"asked for by the pattern {asked!r}"
    elif _is_forced(info, role, recipe):
        reason = f"role {role.role} is forced"
    elif in_level(role, level):
        reason = f"{role.role}: level {level}"
    else:
        return _Wish(False, _why_kept(role, level), final=role.role in PROTECTED_ROLES)
    if info.dtype not in SOURCE_DTYPES:
        return _Wish(False, f"{role.role}, but stored packed as {info.dtype}", final=True)
    length = role.contraction_length(info.shape)
    if length is None or length % BLOCK_SIZE or not length:
        return _Wish(False, _why_blocked(info, role, length), blocked=True, final=True)
    return _Wish(True, reason, asked=asked is not None)


def _is_forced(info: TensorInfo, role: TensorRole, recipe: Recipe) -> bool:
    """Forcing a tower or a prediction block does not reach the protected parts inside it."""
    shielded = role.inner in PROTECTED_ROLES and role.inner not in recipe.force_roles
    return role.role in recipe.force_roles and len(info.shape) >= 2 and not shielded


def in_level(role: TensorRole, level: Level) -> bool:
    """Whether a level takes a role; unrecognised tensors belong to no level."""
    if not role.recognised or role.kind is Kind.KV_COMPRESSOR:
        return False
    if role.role not in LEVEL_ROLES[level]:
        return False
    if role.kind in ALL_ONLY_KINDS or role.role is Role.OTHER_LINEAR:
        return level is Level.ALL and role.kind in ALL_ONLY_KINDS
    return True


def _refuse_protected(info: TensorInfo, role: TensorRole, recipe: Recipe, pattern: str) -> None:
    for found in (role.role, role.inner):
        if found in PROTECTED_ROLES and found not in recipe.force_roles:
            raise RecipeError(
                f"the pattern {pattern!r} would quantize a {found} ({role.evidence})",
                tensor=info.name,
                hint=f"narrow the pattern, or spell it out: --force-role {found}=quantize",
            )


def _why_kept(role: TensorRole, level: Level) -> str:
    if not role.recognised:
        return f"not recognised: {role.evidence}"
    if role.role in PROTECTED_ROLES or role.role in (Role.OTHER, Role.VISION, Role.MTP):
        return f"{role.role} stays in its source dtype"
    return f"{role.role} is not part of level {level}"


def _why_blocked(info: TensorInfo, role: TensorRole, length: int | None) -> str:
    if length is None:
        return f"{role.role}, but its contraction axis is unknown: {role.evidence}"
    return f"{role.role}, but {length} along axis {role.axis} is no multiple of {BLOCK_SIZE}"


def _settle(
    groups: Mapping[str, list[int]],
    chosen: list[_Wish],
    names: Sequence[str],
    roles: Sequence[TensorRole],
) -> None:
    """Give all members of a group one action."""
    for members in groups.values():
        wanted = [position for position in members if chosen[position].quantize]
        if not wanted or len(wanted) == len(members):
            continue
        others = [position for position in members if not chosen[position].quantize]
        stopper = next((p for p in others if chosen[p].final), None)
        if stopper is not None:
            _spread(wanted, chosen, names[stopper])
        elif all(roles[p].role is Role.ATTENTION_GATE for p in others):
            for position in others:
                reason = f"fused with {names[wanted[0]]}"
                chosen[position] = _follow(chosen[position], reason)
        else:
            _partly(wanted, others, chosen, names)


def _follow(wish: _Wish, reason: str) -> _Wish:
    return _Wish(True, reason)


def _spread(wanted: Iterable[int], chosen: list[_Wish], stopper: str) -> None:
    for position in wanted:
        chosen[position] = _Wish(False, f"fused with {stopper}, which stays", final=True)


def _partly(
    wanted: Sequence[int], others: Sequence[int], chosen: list[_Wish], names: Sequence[str]
) -> None:
    if any(chosen[position].asked for position in wanted):
        raise RecipeError(
            f"engines fuse {names[wanted[0]]} with {names[others[0]]}, and the patterns ask for "
            f"only {len(wanted)} of these {len(wanted) + len(others)} tensors",
            hint="let the pattern cover the whole group, or none of it",
        )
    _spread(wanted, chosen, names[others[0]])
