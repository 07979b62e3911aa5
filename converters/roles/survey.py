"""One pass over a checkpoint's names: families, layers, scenes and what they say together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mxfp4.converters.header import TensorInfo
from mxfp4.converters.roles import words
from mxfp4.converters.roles.facts import ModelFacts, complete_facts, nests_text, read_facts
from mxfp4.converters.roles.names import Family, parse_family, split_name
from mxfp4.converters.roles.places import Place, place_of
from mxfp4.converters.roles.scenes import Member, Scene, build_scene, find_container

_MOST_PREDICTION_LAYERS = 8
"""Releases have one to three; more layers than that beyond the config's count are no predictors."""

_TOWER_SHARE = 0.25
"""A stack without norms is foreign if fewer of its matrices have a side of the trunk's width."""


@dataclass(slots=True, eq=False)
class Layer:
    """One layer of one stack (both "" for what stands outside): the numbers of its members, and
    later the number of its setting."""

    stack: str
    index: str
    kinds: set[int] = field(default_factory=set)
    setting: int = -1


@dataclass(slots=True)
class Rows:
    """One entry per tensor: the number of its member, its layer and the indices in its name."""

    kinds: list[int] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    indices: list[tuple[str, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Survey:
    """Everything the rules need to know beyond one tensor.

    `rows` are columns of equal length; a setting is a scene and whether the layer predicts further
    tokens.
    """

    facts: ModelFacts
    members: list[Member]
    settings: list[tuple[Scene, bool]]
    rows: Rows
    containers: dict[Family, int | None]
    towers: frozenset[str] = frozenset()
    _places: dict[Family, tuple[Place, str]] = field(default_factory=dict)

    def place(self, family: Family) -> tuple[Place, str]:
        """Where a family stands; a stack of foreign width is a tower whatever its name."""
        if family not in self._places:
            place, reason = place_of(family)
            if place is Place.TRUNK and family.layer_at is not None:
                stack = family.stack
                if stack in self.towers:
                    place, reason = Place.TOWER, f"'{stack}' has another width than the trunk"
            self._places[family] = place, reason
        return self._places[family]


def survey(tensors: Iterable[TensorInfo], config: Mapping[str, Any] | None) -> Survey:
    """Parse every name once and intern families, members and scenes."""
    tracks: dict[str, _Track] = {}
    members: list[Member] = []
    stacks: dict[str, dict[str, Layer]] = defaultdict(dict)
    outside = Layer("", "")
    rows = Rows()
    for name, dtype, shape in tensors:
        text, indices = split_name(name)
        track = tracks.get(text)
        if track is None:
            track = tracks[text] = _Track(parse_family(text), len(indices))
        kind = track.kinds.get((shape, dtype))
        if kind is None:
            kind = track.kinds[shape, dtype] = len(members)
            members.append(Member(track.family, shape, dtype))
        for slot, seen in track.numbers:
            seen.add(indices[slot])
        layer = outside
        if track.layer_slot is not None:
            index = indices[track.layer_slot]
            layers = stacks[track.family.stack]
            layer = layers.get(index) or layers.setdefault(index, Layer(track.family.stack, index))
        layer.kinds.add(kind)
        rows.kinds.append(kind)
        rows.layers.append(layer)
        rows.indices.append(indices)
    found = [outside, *(layer for layers in stacks.values() for layer in layers.values())]
    return _assemble(config, members, found, rows, list(tracks.values()))


class _Track:
    """What is collected about one family while the names pass by."""

    __slots__ = ("family", "kinds", "layer_slot", "numbers")

    def __init__(self, family: Family, index_count: int) -> None:
        self.family = family
        self.kinds: dict[tuple[tuple[int, ...], str], int] = {}
        self.layer_slot = family.layer_slot
        slots = (slot for slot in range(index_count) if slot != family.layer_slot)
        self.numbers: list[tuple[int, set[str]]] = [(slot, set()) for slot in slots]

    def count_at(self, slot: int) -> int:
        """How many numbers were seen in a slot; 0 for the layer's."""
        return next((len(seen) for known, seen in self.numbers if known == slot), 0)


def _assemble(
    config: Mapping[str, Any] | None,
    members: list[Member],
    layers: list[Layer],
    rows: Rows,
    tracks: list[_Track],
) -> Survey:
    stated = read_facts(config) if config is not None else None
    counts = stated.expert_counts if stated is not None else frozenset[int]()
    containers = {track.family: _container(track, counts) for track in tracks}
    facts = _measure(stated, members, containers, tracks)
    scenes: dict[frozenset[int], Scene] = {}
    settings: dict[tuple[frozenset[int], bool], int] = {}
    sizes = Counter(layer.stack for layer in layers)
    for layer in layers:
        kinds = frozenset(layer.kinds)
        if kinds not in scenes:
            scenes[kinds] = build_scene((members[kind] for kind in kinds), containers)
        extra = sizes[layer.stack] - facts.layer_count
        late = bool(layer.index) and _is_prediction_layer(layer, scenes[kinds], facts, extra)
        layer.setting = settings.setdefault((kinds, late), len(settings))
    return Survey(
        facts,
        members,
        [(scenes[kinds], late) for kinds, late in settings],
        rows,
        containers,
        _foreign_stacks(members, facts, config),
    )


def _is_prediction_layer(layer: Layer, scene: Scene, facts: ModelFacts, extra: int) -> bool:
    """Whether a layer predicts further tokens: by what it holds, or by an index past the trunk.

    In an encoder-decoder the stacks may have different lengths, and with many `extra` layers the
    config counts something else than this stack; then only contents count.
    """
    if scene.has_word(words.MTP_LEAVES):
        return True
    if facts.encoder_decoder or extra > _MOST_PREDICTION_LAYERS:
        return False
    beyond = 0 < facts.layer_count <= int(layer.index)
    return beyond and "encoder" not in layer.stack.split(".")


def _container(track: _Track, counts: frozenset[int]) -> int | None:
    """Positions of indices that run over all experts count as containers, whatever their name."""
    family = track.family
    counted = set()
    for position, part in enumerate(family.path):
        if part == "#" and family.layer_at is not None:
            count = track.count_at(family.slot_at(position))
            if count in counts and count > 3:
                counted.add(position)
    return find_container(family.path, frozenset(counted), family.layer_at is not None)


def _measure(
    stated: ModelFacts | None,
    members: list[Member],
    containers: Mapping[Family, int | None],
    tracks: list[_Track],
) -> ModelFacts:
    tables, norms, counts, banks = [], [], [], []
    most = {t.family: max((len(seen) for _, seen in t.numbers), default=0) for t in tracks}
    rows = {member.shape[0] for member in members if _looks_like_router(member)}
    for member in members:
        family, shape = member.family, member.shape
        place = place_of(family)[0]
        if place is not Place.TRUNK:
            continue
        if len(shape) == 2 and family.layer_at is None and words.EMBEDDING.fullmatch(family.leaf):
            tables.append(shape)
        if len(shape) == 1 and family.layer_at is not None and words.NORM.fullmatch(family.leaf):
            norms.append(shape[0])
        container = containers[family]
        if container is not None and "#" in family.path[container:]:
            counts.append(most[family])
        elif len(shape) == 3 and (container is not None or shape[0] in rows):
            banks.append(shape[0])
    return complete_facts(stated, tables, norms, counts, banks)


def _looks_like_router(member: Member) -> bool:
    named = any(words.ROUTER.fullmatch(part) or part == "gate" for part in member.family.path)
    return named and len(member.shape) == 2


def _foreign_stacks(
    members: list[Member], facts: ModelFacts, config: Mapping[str, Any] | None
) -> frozenset[str]:
    """Stacks of another width than the text trunk, and encoders beside a nested text model."""
    if not facts.hidden_size:
        return frozenset()
    fits: dict[str, list[bool]] = defaultdict(list)
    norms: dict[str, set[int]] = defaultdict(set)
    widths = {*facts.expert_widths, facts.hidden_size}
    for member in members:
        family, shape = member.family, member.shape
        if family.layer_at is None or member.dtype not in ("BF16", "F16", "F32"):
            continue
        stack = family.stack
        if len(shape) in (2, 3) and not words.STATE_ALWAYS.fullmatch(family.leaf):
            fits[stack].append(any(side in widths for side in shape))
        elif len(shape) == 1 and len(family.words) == 1 and words.NORM.fullmatch(family.leaf):
            norms[stack].add(shape[0])
    nested = config is not None and nests_text(config)
    return frozenset(
        stack
        for stack, flags in fits.items()
        if (norms[stack] and facts.hidden_size not in norms[stack])
        or (not norms[stack] and sum(flags) < _TOWER_SHARE * len(flags))
        or (nested and "encoder" in stack.split(".") and len(fits) > 1)
    )
