"""Rules for mixtures of experts: routers first, then the gates and bodies of experts.

"gate" is a question of whole segments and of place: a router beside the experts, a projection
inside an expert, an output gate inside attention.
"""

from __future__ import annotations

from mxfp4.converters.roles import words
from mxfp4.converters.roles.banks import bank_layout, flattened_bank, stacked_bank
from mxfp4.converters.roles.scenes import expert_index
from mxfp4.converters.roles.types import Kind, Role
from mxfp4.converters.roles.view import WEIGHTS, Verdict, View


def router(view: View) -> Verdict | None:
    """Routers by word, or by as many rows as there are experts right beside the experts."""
    axis = _router_axis(view)
    for part in view.family.words:
        if words.SHARED_GATE.fullmatch(part):
            return Verdict(Role.SHARED_EXPERT_GATE, f"'{part}' gates a shared expert", axis)
    named = next((part for part in view.path if words.ROUTER.fullmatch(part)), None)
    if named is not None:
        role = Role.ROUTER if view.rank >= 2 else Role.ROUTER_BIAS
        return Verdict(role, f"'{named}' names a router", axis)
    if view.in_attention and not view.in_expert:
        return None
    if view.container is not None and expert_index(view.path, view.container) is not None:
        return None
    return _gate_word(view, axis) or _expert_rows(view, axis)


def _gate_word(view: View, axis: int | None) -> Verdict | None:
    parts = view.family.words
    for position, part in enumerate(parts):
        if part not in words.ROUTER_WORDS:
            continue
        if any(words.SHARED.fullmatch(above) for above in parts[:position]):
            return None
        if position == len(parts) - 1 and _is_projection_gate(view):
            return None
        if view.rank == 3:
            return None
        role = Role.ROUTER if view.rank == 2 else Role.ROUTER_BIAS
        return Verdict(role, f"the segment '{part}' outside experts and attention", axis)
    return None


def _is_projection_gate(view: View) -> bool:
    """A bare `gate` is a projection only beside an `up` and a `down` of its own size."""
    around = view.scene.matrices_under(view.path[:-1])
    twins = [name for name in ("up", "up_proj", "w_up") if around.get(name) == view.shape]
    downs = [name for name in ("down", "down_proj", "w_down") if name in around]
    return bool(twins and downs)


def _expert_rows(view: View, axis: int | None) -> Verdict | None:
    """Rows in {E, E + extra} for a matrix directly in the block that holds the experts."""
    if view.rank != 2 or view.family.parameter not in ("weight", "") or view.in_expert:
        return None
    if view.path[:-1] not in view.scene.expert_blocks:
        return None
    rows = view.facts.router_rows
    if view.shape[0] in rows or (view.shape[1] in rows and view.shape[0] == view.facts.hidden_size):
        text = f"{list(view.shape)} beside the experts has one row per expert"
        return Verdict(Role.ROUTER, text, axis)
    return None


def _router_axis(view: View) -> int | None:
    if view.rank != 2:
        return None
    rows, columns = view.shape
    swapped = columns in view.facts.router_rows and rows == view.facts.hidden_size
    return 0 if swapped and rows not in view.facts.router_rows else 1


def one_row(view: View) -> Verdict | None:
    """A matrix with one row is a gate or a query, never worth a block format."""
    if view.rank != 2 or view.shape[0] != 1 or view.family.parameter not in WEIGHTS:
        return None
    if any(words.SHARED.fullmatch(part) or "expert" in part for part in view.path):
        return Verdict(Role.SHARED_EXPERT_GATE, "one row, named after an expert", 1)
    return Verdict(Role.OTHER_LINEAR, "one row", 1)


def latent(view: View) -> Verdict | None:
    """Projections between the residual stream and the width of the routed experts."""
    if view.rank != 2 or view.in_expert or view.family.parameter not in WEIGHTS:
        return None
    if not words.LATENT.fullmatch(view.leaf):
        return None
    text = f"'{view.leaf}' projects into or out of the experts' width"
    return Verdict(Role.OTHER_LINEAR, text, 1, Kind.LATENT_MOE)


def expert(view: View) -> Verdict | None:
    """Everything of rank 2 or 3 inside the experts, per expert or stacked."""
    if view.family.parameter not in WEIGHTS or view.rank not in (2, 3, 4):
        return None
    if view.container is None:
        return _bare_bank(view) or _bare_flattened(view)
    index = expert_index(view.path, view.container)
    if view.rank == 2 and index is not None:
        if view.leaf in words.ROUTER_WORDS and not _is_projection_gate(view):
            return None
        text = f"a matrix of one expert in '{view.path[view.container]}'"
        return Verdict(Role.EXPERT, text, 1, group=_group(view, view.container))
    if view.rank == 2:
        return _flattened(view, view.container)
    if view.rank == 3 and index is None:
        return _stacked(view, Role.EXPERT, _group(view, view.container))
    if view.rank == 4 and view.family.parameter == "blocks":
        group = _group(view, view.container)
        return Verdict(Role.EXPERT, "packed blocks of stacked experts", 2, group=group)
    return None


def _group(view: View, container: int) -> tuple[int, str]:
    """All routed experts of a layer are one fusion group."""
    return (container + ("#" not in view.path[container]), "experts")


def _bare_bank(view: View) -> Verdict | None:
    """Rank 3 with one slice per expert and a feed-forward word, without an `experts` segment."""
    stem = words.stem(view.leaf)
    known = words.FFN_IN.fullmatch(stem) or words.FFN_OUT.fullmatch(stem)
    if view.rank != 3 or not known or not view.in_layer or view.in_attention:
        return None
    if view.shape[0] in view.facts.expert_counts:
        return _stacked(view, Role.EXPERT, (len(view.path) - 1, "experts"))
    return None


def _bare_flattened(view: View) -> Verdict | None:
    """`w1` and `w2` of one shape `[E*I, H]` beside a router: experts under no container."""
    around = view.scene.matrices_under(view.path[:-1])
    routers = [name for name in around if words.ROUTER.fullmatch(name) or name == "gate"]
    if view.rank != 2 or not routers or not view.in_layer:
        return None
    if view.leaf not in ("w1", "w2", "w3", "v1") or around.get("w1") != around.get("w2"):
        return None
    return _flattened(view, len(view.path) - 2)


def _stacked(view: View, role: Role, group: tuple[int, str]) -> Verdict:
    layout = bank_layout(view.scene, view.path[:-1], view.facts)
    if layout.input_major is None:
        return Verdict(role, f"stacked experts; {layout.evidence}", None, group=group)
    bank = stacked_bank(view.leaf, view.shape, layout, view.facts)
    axis = 1 if layout.input_major else 2
    text = f"{view.shape[0]} stacked experts; {layout.evidence}"
    return Verdict(role, text, axis, group=group, bank=bank)


def _flattened(view: View, container: int) -> Verdict | None:
    found = flattened_bank(view.scene, view.path, view.shape, view.facts)
    if found is None:
        return None
    axis, bank = found
    text = f"{bank.expert_count} experts flattened into {list(view.shape)}"
    return Verdict(Role.EXPERT, text, axis, group=_group(view, container), bank=bank)


def shared_expert(view: View) -> Verdict | None:
    """Feed-forward leaves under a shared expert, plain or stacked."""
    at = next((i for i, part in enumerate(view.path) if words.SHARED.fullmatch(part)), None)
    if at is None or view.family.parameter not in WEIGHTS or view.rank not in (2, 3):
        return None
    stem = words.stem(view.leaf)
    inward = words.FFN_IN.fullmatch(stem)
    outward = words.FFN_OUT.fullmatch(stem)
    if not inward and not outward:
        return None
    if view.leaf in words.ROUTER_WORDS and not _is_projection_gate(view):
        return None
    if view.rank == 3:
        return _stacked(view, Role.SHARED_EXPERT, (len(view.path) - 1, "experts"))
    group = (len(view.path) - 1, "gate_up") if inward and not outward else None
    text = f"a feed-forward matrix of '{view.path[at]}'"
    return Verdict(Role.SHARED_EXPERT, text, 1, group=group)
