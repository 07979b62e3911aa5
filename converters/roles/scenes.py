"""One layer as the rules see it: which modules stand side by side, and which block holds experts.

The many layers of a model are few different scenes; two layers with the same families and shapes
share one `Scene`, so questions about neighbours are answered once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mxfp4.converters.roles import words
from mxfp4.converters.roles.names import Family

Shape = tuple[int, ...]
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """One family with one shape and dtype: what half a million tensors come down to."""

    family: Family
    shape: Shape
    dtype: str


@dataclass(slots=True, eq=False)
class Scene:
    """The weights and biases of one layer by module path (or of everything outside layers).

    `mixed` holds paths whose numbered members differ in shape, like the parts of a Sequential.
    """

    weights: dict[Path, Shape] = field(default_factory=dict)
    biases: dict[Path, Shape] = field(default_factory=dict)
    mixed: set[Path] = field(default_factory=set)
    leaves: dict[Path, set[str]] = field(default_factory=dict)
    expert_blocks: set[Path] = field(default_factory=set)

    def siblings(self, path: Path) -> set[str]:
        """Leaves of the same parent, the module itself included."""
        return self.leaves.get(path[:-1], set())

    def matrices_under(self, parent: Path) -> Mapping[str, Shape]:
        """Weights of rank 2 or 3 directly below a module, by name."""
        found: dict[str, Shape] = {}
        for leaf in sorted(self.leaves.get(parent, ())):
            shape = self.weights.get((*parent, leaf))
            if shape is not None and len(shape) in (2, 3):
                found[leaf] = shape
        return found

    def has_word(self, words_wanted: Iterable[str]) -> bool:
        """Whether any module of the layer ends in one of the words."""
        wanted = frozenset(words_wanted)
        return any(wanted & leaves for leaves in self.leaves.values())


def build_scene(members: Iterable[Member], container_of: Mapping[Family, int | None]) -> Scene:
    """Collect the members of one layer; `container_of` gives where in a path the experts are."""
    scene = Scene()
    for member in members:
        path = member.family.path
        if not path:
            continue
        scene.leaves.setdefault(path[:-1], set()).add(path[-1])
        if member.family.parameter == "bias" or path[-1].endswith("_bias"):
            known = scene.biases.setdefault(path, member.shape)
        else:
            known = scene.weights.setdefault(path, member.shape)
        if known != member.shape:
            scene.mixed.add(path)
        container = container_of[member.family]
        if container is not None:
            scene.expert_blocks.add(path[:container])
    return scene


def find_container(path: Path, counted: frozenset[int], in_layer: bool) -> int | None:
    """Position of the container of routed experts in a module path, None if there is none.

    `counted` holds the positions of indices that run over as many values as the model has
    experts: such an index marks a container whatever its name. Outside layers an index has to
    follow.
    """
    for position, part in enumerate(path[:-1]):
        if words.SHARED.fullmatch(part):
            return None
        indexed = path[position + 1] == "#"
        if words.EXPERTS.fullmatch(part) and (indexed or in_layer):
            return position
        if indexed and (part in words.INDEXED_EXPERTS or position + 1 in counted):
            return position
    return None


def expert_index(path: Path, container: int) -> int | None:
    """Position of the part that numbers the experts: `experts.#`, `expert_#`, `experts.w1.#`."""
    numbered = (at for at in range(container, len(path)) if "#" in path[at])
    return next(numbered, None)
