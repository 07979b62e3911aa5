"""From names and shapes to roles: group tensors into families and layers, ask the rules once each.

The result for a tensor depends on its family, its shape, its dtype, the scene of its layer and
whether that layer is a prediction layer, and on nothing else; all tensors that agree in these
share one verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mxfp4.converters.header import TensorInfo
from mxfp4.converters.roles import keep_rules, linear_rules, moe_rules
from mxfp4.converters.roles.axes import correct_axis
from mxfp4.converters.roles.facts import ModelFacts
from mxfp4.converters.roles.names import Family
from mxfp4.converters.roles.places import Place
from mxfp4.converters.roles.scenes import expert_index
from mxfp4.converters.roles.survey import Survey, survey
from mxfp4.converters.roles.types import Role, TensorRole
from mxfp4.converters.roles.view import WEIGHTS, Verdict, View

RULES: tuple[Callable[[View], Verdict | None], ...] = (
    keep_rules.scale,
    keep_rules.bias,
    keep_rules.norm,
    keep_rules.side_channel,
    keep_rules.scorer,
    keep_rules.table,
    keep_rules.convolution,
    moe_rules.router,
    moe_rules.latent,
    moe_rules.one_row,
    moe_rules.expert,
    moe_rules.shared_expert,
    linear_rules.state,
    linear_rules.mixer,
    linear_rules.feed_forward,
)
"""Asked in this order; the first answer counts."""

_PLACE_ROLES = {
    Place.TOWER: Role.VISION,
    Place.PROJECTOR: Role.VISION_PROJECTOR,
    Place.SPEECH: Role.OTHER_LINEAR,
    Place.MTP: Role.MTP,
}

_INDEX_DTYPES = frozenset({"I64", "I32", "I16", "U64", "U32", "U16", "BOOL"})

_PROJECTIONS = frozenset(
    {Role.EXPERT, Role.SHARED_EXPERT, Role.MLP, Role.ATTENTION, Role.ATTENTION_GATE}
)


def classify(
    tensors: Iterable[TensorInfo], config: Mapping[str, Any] | None
) -> dict[str, TensorRole]:
    """Role of every tensor, by name, in the order given. Pure: reads no data.

    `config` is the parsed `config.json`; with None, widths and expert counts are measured on the
    tensors, and prediction layers are found by their contents only.
    """
    listed = list(tensors)
    roles = classify_each(listed, config).roles
    return {info.name: role for info, role in zip(listed, roles, strict=True)}


@dataclass(frozen=True, slots=True)
class Classified:
    """Columns with an entry per tensor: its role, and its name as family and indices."""

    roles: list[TensorRole]
    families: list[str]
    indices: list[tuple[str, ...]]


def classify_each(tensors: Iterable[TensorInfo], config: Mapping[str, Any] | None) -> Classified:
    """The roles of `classify` in the order of the tensors."""
    found = survey(tensors, config)
    stamps: dict[tuple[int, int], _Stamp] = {}
    roles: list[TensorRole] = []
    rows = found.rows
    for kind, layer, indices in zip(rows.kinds, rows.layers, rows.indices, strict=True):
        key = (kind, layer.setting)
        stamp = stamps.get(key)
        if stamp is None:
            stamp = stamps[key] = _judge_member(found, kind, layer.setting)
        roles.append(stamp.role(indices))
    texts = [member.family.text for member in found.members]
    return Classified(roles, [texts[kind] for kind in rows.kinds], rows.indices)


def _judge_member(found: Survey, kind: int, setting: int) -> _Stamp:
    member = found.members[kind]
    scene, late = found.settings[setting]
    family = member.family
    container = found.containers[family]
    view = View(
        family,
        member.shape,
        member.dtype,
        scene,
        found.facts,
        container,
        family.layer_at is not None,
        late,
    )
    return _Stamp(judge(view, found, late), family, container)


def judge(view: View, found: Survey, late: bool) -> Verdict:
    """The verdict of the rules for one member, then of its place in the model."""
    place, reason = found.place(view.family)
    verdict = next((answer for rule in RULES if (answer := rule(view)) is not None), None)
    if verdict is None:
        verdict = _unknown(view)
    if place is Place.TRUNK and late:
        place, reason = Place.MTP, "its layer index lies beyond the trunk or holds prediction parts"
    if place is Place.TRUNK:
        return correct_axis(view, verdict)
    role = _PLACE_ROLES[place]
    if place is Place.SPEECH and verdict.recognised and verdict.role not in _PROJECTIONS:
        return verdict
    if verdict.role in (Role.EMBEDDING, Role.CONV) and view.leaf != "linear":
        verdict = replace(verdict, axis=None)
    return verdict.inside(role, f"in a {place.value} ({reason}): {verdict.evidence}")


def _unknown(view: View) -> Verdict:
    if view.rank < 2 or view.family.parameter not in WEIGHTS or view.dtype in _INDEX_DTYPES:
        return Verdict(Role.OTHER, "not a matrix of a projection")
    axis = 1 if view.rank == 2 and view.family.parameter else None
    return Verdict(Role.OTHER_LINEAR, "no rule knows this name", axis, recognised=False)


class _Stamp:
    """A verdict ready to be stamped onto the tensors that share it."""

    def __init__(self, verdict: Verdict, family: Family, container: int | None) -> None:
        self.verdict = verdict
        self.groups: dict[tuple[str, ...], str] = {}
        self.template, self.index_count = "", 0
        if verdict.group is not None:
            keep, tag = verdict.group
            text = family.text_until(keep)
            self.template = text.replace("%", "%%").replace("#", "%s") + ":" + tag
            self.index_count = text.count("#")
        self.layer_slot = family.layer_slot
        index = None if container is None else expert_index(family.path, container)
        self.expert_slot = None if index is None else family.slot_at(index)

    def role(self, indices: tuple[str, ...]) -> TensorRole:
        """The public form for one tensor."""
        verdict = self.verdict
        group = None
        if self.template:
            chosen = indices[: self.index_count]
            group = self.groups.get(chosen)
            if group is None:
                group = self.groups[chosen] = self.template % chosen
        layer, expert = self.layer_slot, self.expert_slot
        return TensorRole(
            verdict.role,
            verdict.axis,
            None if layer is None else int(indices[layer]),
            None if expert is None else int(indices[expert]),
            group,
            verdict.bank,
            verdict.evidence,
            verdict.recognised,
            verdict.kind,
            verdict.inner,
        )


def facts_of(tensors: Iterable[TensorInfo], config: Mapping[str, Any] | None) -> ModelFacts:
    """The numbers that `classify` would work with."""
    return survey(tensors, config).facts
