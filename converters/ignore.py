"""The `ignore` list of a compressed-tensors checkpoint, generated from what was really left alone.

Engines rename and prefix modules, some match from the start with an open end and some match whole
names, so every pattern has the form `re:.*\\b<tail of the name>$`: free of prefixes and the same
under `re.match` and `re.fullmatch`. Numbers become `\\d+` wherever that stays exact.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mxfp4.converters.decide import Action, Decision
from mxfp4.converters.ignore_check import Matcher, canonical_names, check_ignore
from mxfp4.converters.patterns import module_name
from mxfp4.converters.roles import ExpertBank, Role, TensorRole
from mxfp4.converters.roles.names import parse_family, split_name
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


@dataclass(slots=True)
class _Names:
    """Module names by family: index tuples of the kept and of the quantized ones.

    `packed_forms` are the families of quantized modules and the names that engines give to their
    fusions; `kept_trunk` are kept families outside prediction blocks.
    """

    kept: dict[str, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))
    packed: dict[str, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))
    kept_trunk: set[str] = field(default_factory=set)
    packed_forms: set[str] = field(default_factory=set)


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


def ignore_patterns(quantized_modules: Iterable[str], kept: Mapping[str, TensorRole]) -> list[str]:
    """Patterns that hit every kept module, and what engines may call it, and no quantized one.

    Raises `RecipeError` if the two sides cannot be told apart.
    """
    quantized = list(quantized_modules)
    names = _Names()
    for module in quantized:
        text, indices = split_name(module)
        names.packed[text].add(indices)
    for module, role in kept.items():
        text, indices = split_name(module)
        names.kept[text].add(indices)
        if role.role is not Role.MTP:
            names.kept_trunk.add(text)
    names.packed_forms = set(names.packed) | _aliases(names.packed)
    bodies: list[str] = []
    bodies += _prediction_bodies(kept, quantized)
    bodies += _subtree_bodies(kept)
    chosen = [body for body in dict.fromkeys(bodies) if _clean(body, names)]
    covered = Matcher([_pattern(body) for body in chosen])
    for text, members in sorted(names.kept.items()):
        if all(covered.hits(name) for name in canonical_names(_spell(text, members), covered)):
            continue
        chosen += _family_bodies(text, members, names)
    for text in sorted(_aliases(names.kept_trunk) | _bank_aliases(kept)):
        if text not in names.packed and (found := _shortest(text, names)) is not None:
            chosen.append(found)
    patterns = _without_redundant([_pattern(body) for body in dict.fromkeys(chosen)], names)
    check_ignore(patterns, quantized, kept)
    return patterns


def _pattern(body: str) -> str:
    return rf"re:.*\b{body}$"


def _spell(text: str, indices: Iterable[tuple[str, ...]]) -> Iterator[str]:
    template = text.replace("%", "%%").replace("#", "%s")
    for numbers in indices:
        yield template % numbers


def _body(segments: Iterable[str]) -> str:
    return r"\.".join(r"\d+" if part == "#" else re.escape(part) for part in segments)


def _clean(body: str, names: _Names) -> bool:
    """Whether a body hits no quantized module."""
    matcher = Matcher([_pattern(body)])
    return not any(
        matcher.hits(name)
        for text, indices in names.packed.items()
        for name in canonical_names(_spell(text, indices), matcher)
    )


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


def _family_bodies(text: str, indices: set[tuple[str, ...]], names: _Names) -> list[str]:
    """One body for the whole family, or one that spells out its first differing index."""
    found = _shortest(text, names) if text not in names.packed else None
    if found is not None:
        return [found]
    return _spelled_out(text, indices, names)


def _spelled_out(text: str, indices: set[tuple[str, ...]], names: _Names) -> list[str]:
    """Bodies with the kept numbers of one slot written out, or of several if they must be."""
    packed = names.packed.get(text, set())
    segments = text.split(".")
    slots = [position for position, part in enumerate(segments) if part == "#"]
    for number in range(len(slots)):
        mine = {numbers[number] for numbers in indices}
        if mine.isdisjoint(numbers[number] for numbers in packed):
            parts = [r"\d+" if part == "#" else re.escape(part) for part in segments]
            parts[slots[number]] = _choice(mine)
            for start in range(max(slots[number] - 1, 0), -1, -1):
                body = r"\.".join(parts[start:])
                if segments[start] != "#" and _clean(body, names):
                    return [body]
            return [r"\.".join(parts)]
    bodies = []
    by_first: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for numbers in indices:
        by_first[numbers[0] if numbers else ""].add(numbers)
    for group in by_first.values():
        for name in sorted(_spell(text, group)):
            bodies.append(re.escape(name).replace(r"\-", "-"))
    return bodies


def _choice(numbers: Iterable[str]) -> str:
    ordered = sorted(set(numbers), key=int)
    return ordered[0] if len(ordered) == 1 else "(?:" + "|".join(ordered) + ")"


def _prediction_bodies(kept: Mapping[str, TensorRole], quantized: Iterable[str]) -> list[str]:
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


def _without_redundant(patterns: list[str], names: _Names) -> list[str]:
    """Drop patterns whose kept families are all hit by the others, narrowest first."""
    spelled = {text: list(_spell(text, indices)) for text, indices in names.kept.items()}
    everything = Matcher(patterns)
    hits: dict[str, set[str]] = {}
    for pattern in patterns:
        matcher = Matcher([pattern])
        hits[pattern] = {
            name
            for members in spelled.values()
            for name in canonical_names(members, everything)
            if matcher.hits(name)
        }
    remaining = list(patterns)
    for pattern in sorted(patterns, key=lambda item: (len(hits[item]), item)):
        others = set().union(*(hits[other] for other in remaining if other != pattern))
        if hits[pattern] and hits[pattern] <= others:
            remaining.remove(pattern)
    return sorted(remaining)
