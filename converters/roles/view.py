"""What a rule is given, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mxfp4.converters.roles import words
from mxfp4.converters.roles.facts import ModelFacts
from mxfp4.converters.roles.names import Family
from mxfp4.converters.roles.scenes import Path, Scene, Shape
from mxfp4.converters.roles.types import ExpertBank, Kind, Role

WEIGHTS = frozenset({"", "weight", "weight_packed", "packed", "blocks", "qweight"})
"""Last parts of names that hold the matrix itself; "" is a bare parameter."""


@dataclass(frozen=True, slots=True)
class View:
    """One member of a family in its scene. `container` is the position of the experts' container
    in the path; `in_layer` is False outside the stacks, `late` is True in a prediction layer."""

    family: Family
    shape: Shape
    dtype: str
    scene: Scene
    facts: ModelFacts
    container: int | None
    in_layer: bool
    late: bool = False

    @property
    def path(self) -> Path:
        """Module path below the layer, indices as "#"."""
        return self.family.path

    @property
    def leaf(self) -> str:
        """Last word of the module."""
        return self.family.leaf

    @property
    def parents(self) -> tuple[str, ...]:
        """Words of the path before the leaf."""
        return self.family.words[:-1]

    @property
    def rank(self) -> int:
        """Rank of the stored tensor."""
        return len(self.shape)

    @property
    def in_attention(self) -> bool:
        """Whether a parent names attention; `mixer` says nothing, a norm's name neither."""
        return any(
            words.ATTENTION.fullmatch(part)
            and part not in words.ANY_MIXER
            and not words.NORM.fullmatch(part)
            for part in self.parents
        )

    @property
    def in_expert(self) -> bool:
        """Whether this sits inside a container of routed experts."""
        return self.container is not None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A role for every tensor of a member. `group` is (parts of the path to keep, tag)."""

    role: Role
    evidence: str
    axis: int | None = None
    kind: Kind = Kind.PLAIN
    group: tuple[int, str] | None = None
    bank: ExpertBank | None = None
    recognised: bool = True
    inner: Role | None = None

    def inside(self, role: Role, evidence: str) -> Verdict:
        """The same tensor, seen as part of something that has a role of its own."""
        return replace(
            self,
            role=role,
            evidence=evidence,
            kind=Kind.PLAIN,
            inner=self.role,
            recognised=True,
        )
