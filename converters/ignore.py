"""The `ignore` list of a compressed-tensors checkpoint, generated from what was really left alone.

Engines rename and prefix modules, some match from the start with an open end and some match whole
names, so every pattern has the form `re:.*\\b<tail of the name>$`: free of prefixes and the same
under `re.match` and `re.fullmatch`. Numbers become `\\d+` wherever that stays exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mxfp4.converters.decide import Action, Decision
from mxfp4.converters.ignore_check import Matcher, NameSet, check_ignore
from mxfp4.converters.patterns import module_name
from mxfp4.converters.roles import ExpertBank, Role, TensorRole
from mxfp4.converters.roles.names import parse_family, spell, split_name
from mxfp4.converters.roles.places import place_of

__all__ = ["check_ignore", "expert_modules", "ignore_patterns", "modules_by_action"]

_SUBTREE_ROLES = frozenset({Role.VISION, Role.VISION_PROJECTOR})

FUSED_MODULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
)
"""What engines call a fusion of neighbours. Both spellings are listed, whichever the file has."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Both sides. `packed_forms` are the families of quantized modules and the names that engines
    give to their fusions; `kept_trunk` are kept families outside prediction blocks."""

    kept: NameSet
    packed: NameSet
    kept_trunk: frozenset[str]
    packed_forms: frozenset[str]


def modules_by_action(
    decisions: Mapping[str, Decision],
) -> tuple[set[str], dict[str, TensorRole]]:
    """Modules to be stored packed, and the others with the role of their weight.

    A quantized bank of experts counts as the modules of its experts (see `expert_modules`). A
    module with a quantized weight and a kept bias is quantized.
    """
    quantized: set[str] = set()
    kept: dict[str, TensorRole] = {}
    for name, decision in decisions.items():
        role = decision.role
        if decision.action is Action.QUANTIZE:
            quantized.update(expert_modules(name, role.bank) if role.bank else [module_name(name)])
        elif not name.endswith(".bias") or module_name(name) not in kept:
            kept[module_name(name)] = role
    return quantized, {name: role for name, role in kept.items() if name not in quantized}


def expert_modules(name: str, bank: ExpertBank) -> Iterator[str]:
    """Names of the modules that a bank becomes, expert by expert: `...experts.{i}.gate_proj`."""
    parent = module_name(name).rpartition(".")[0]
    if not parent.endswith("experts"):
        parent = f"{parent}.experts" if parent else "experts"
    for expert in range(bank.expert_count):
        for projection in bank.projections:
            yield f"{parent}.{expert}.{projection}"


def ignore_patterns(
    quantized_modules: Iterable[str] | NameSet, kept: Mapping[str, TensorRole]
) -> list[str]:
    """Patterns that hit every kept module, and what engines may call it, and no quantized one.

    Both sides have been checked with `check_ignore` when this returns. Raises `RecipeError` if
    they cannot be told apart.
    """
    packed = (
        quantized_modules if isinstance(quantized_modules, NameSet) else NameSet(quantized_modules)
    )
    predicted = NameSet(name for name, role in kept.items() if role.role is Role.MTP)
    everything = NameSet(kept)
    trunk = {
        text
        for text, members in everything.families.items()
        if not members <= predicted.families.get(text, set())
    }
    forms = frozenset(packed.families) | _aliases(packed.families)
    names = _Names(everything, packed, frozenset(trunk), forms)
    predictions = [body for body in _prediction_bodies(kept) if _clean(body, names)]
    subtrees = [body for body in _subtree_bodies(kept) if _clean(body, names)]
    chosen = predictions + subtrees
    covered = Matcher([_pattern(body) for body in chosen])
    for text in sorted(names.kept.families):
        if not all(covered.hits(name) for name in names.kept.representatives(covered, text)):
            chosen += _family_bodies(text, names)
    for text in sorted(_aliases(names.kept_trunk) | _bank_aliases(kept)):
        if text not in packed.families and (found := _shortest(text, names)) is not None:
            chosen.append(found)
    patterns = _without_redundant(
        [_pattern(body) for body in dict.fromkeys(chosen)],
        {_pattern(body) for body in predictions},
        names,
    )
    check_ignore(patterns, packed, names.kept)
    return patterns


def _pattern(body: str) -> str:
    return rf"re:.*\b{body}$"


def _body(segments: Iterable[str]) -> str:
    return r"\.".join(_literal(part) for part in segments)


def _clean(body: str, names: _Names) -> bool:
    """Whether a body hits no quantized module."""
    matcher = Matcher([_pattern(body)])
    return not any(matcher.hits(name) for name in names.packed.representatives(matcher))


def _shortest(text: str, names: _Names) -> str | None:
    """The shortest tail of a family that hits no quantized family, None if there is none."""
    segments = text.split(".")
    shortest = 2 if len(segments) > 3 and segments[-2] != "#" else 1
    for length in range(min(shortest, len(segments)), len(segments) + 1):
        tail = segments[-length:]
        if tail[0] == "#":
            continue
        body = _body(tail)
        if _generic_clean(body, names):
            return body
    return None


def _generic_clean(body: str, names: _Names) -> bool:
    matcher = Matcher([_pattern(body)])
    return not any(matcher.hits(text.replace("#", "0")) for text in names.packed_forms)


def _family_bodies(text: str, names: _Names) -> list[str]:
    """One body for the whole family, or one that spells out the numbers that tell it apart."""
    packed = names.packed.families.get(text, set())
    found = None if packed else _shortest(text, names)
    if found is not None:
        return [found]
    members = names.kept.families[text]
    segments = text.split(".")
    slots = [position for position, part in enumerate(segments) if "#" in part]
    for number, slot in enumerate(slots):
        mine = {indices[number] for indices in members}
        if mine.isdisjoint(indices[number] for indices in packed):
            parts = [_literal(part) for part in segments]
            parts[slot] = _literal(segments[slot], _choice(mine))
            starts = [at for at in range(slot) if segments[at] != "#"]
            tails = [r"\.".join(parts[at:]) for at in reversed(starts)]
            return [next((body for body in tails if _clean(body, names)), tails[-1])]
    return [_literal(name) for name in sorted(spell(text, members))]


def _literal(name: str, numbers: str = r"\d+") -> str:
    """A name as a regular expression, `#` standing for numbers."""
    return re.escape(name).replace(r"\-", "-").replace(r"\#", numbers)


def _choice(numbers: Iterable[str]) -> str:
    ordered = sorted(set(numbers), key=int)
    return ordered[0] if len(ordered) == 1 else "(?:" + "|".join(ordered) + ")"


def _prediction_bodies(kept: Mapping[str, TensorRole]) -> list[str]:
    """Prediction blocks under all names in use: `mtp.*` and a layer beyond the trunk."""
    late = {
        role.layer: split_name(name)[0].split(".")
        for name, role in kept.items()
        if role.role is Role.MTP and role.layer is not None
    }
    if not any(role.role is Role.MTP for role in kept.values()):
        return []
    trunk = {
        role.layer
        for role in kept.values()
        if role.layer is not None and role.role not in (Role.MTP, *_SUBTREE_ROLES)
    }
    count = max((layer for layer in trunk), default=-1) + 1
    bodies = [r"mtp\..*"]
    if count:
        numbers = {layer if layer >= count else count + layer for layer in late} or {count}
        bodies.append(rf"layers\.{_choice(map(str, numbers))}\..*")
    return bodies


def _subtree_bodies(kept: Mapping[str, TensorRole]) -> list[str]:
    """A tower or a projector as a whole, by the segment that names it."""
    found: dict[str, None] = {}
    for text in {split_name(name)[0] for name, role in kept.items() if role.role in _SUBTREE_ROLES}:
        _, reason = place_of(parse_family(text + ".weight"))
        original = next((part for part in text.split(".") if part.lower() == reason), None)
        if original is not None and not text.endswith(original):
            found[re.escape(original) + r"\..*"] = None
    return sorted(found)


def _aliases(families: Iterable[str]) -> set[str]:
    """What engines may call these families: fusions by their parts and parts by their fusion."""
    found: set[str] = set()
    for text in families:
        parent, _, leaf = text.rpartition(".")
        for fused, parts in FUSED_MODULES:
            if leaf == fused:
                found.update(f"{parent}.{part}" for part in parts)
            elif leaf in parts:
                found.add(f"{parent}.{fused}")
    return found


def _bank_aliases(kept: Mapping[str, TensorRole]) -> set[str]:
    """The per-expert families of kept banks, for engines that look at single experts."""
    found: set[str] = set()
    for name, role in kept.items():
        if role.bank is not None and role.role is not Role.MTP:
            first = next(expert_modules(name, role.bank))
            found.add(split_name(first)[0].rpartition(".")[0])
    return {f"{text}.{leaf}" for text in found for leaf in ("gate_proj", "up_proj", "down_proj")}


def _without_redundant(patterns: list[str], fixed: set[str], names: _Names) -> list[str]:
    """Drop patterns whose kept modules are all hit by the others, narrowest first.

    The spellings of prediction blocks stay: engines look for each of them.
    """
    kept = list(names.kept.representatives(Matcher(patterns)))
    matchers = {pattern: Matcher([pattern]) for pattern in patterns}
    hits = {
        pattern: {name for name in kept if matcher.hits(name)}
        for pattern, matcher in matchers.items()
    }
    remaining = list(patterns)
    for pattern in sorted(patterns, key=lambda item: (len(hits[item]), item)):
        others = set().union(*(hits[other] for other in remaining if other != pattern))
        if pattern not in fixed and hits[pattern] and hits[pattern] <= others:
            remaining.remove(pattern)
    return sorted(remaining)
