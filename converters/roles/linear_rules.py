"""The positive lists: attention and feed-forward projections in their places, and small states.

A leaf counts only inside a segment that fits it. What no rule claims is kept and reported.
"""

from __future__ import annotations

from mxfp4.converters.roles import words
from mxfp4.converters.roles.types import Kind, Role
from mxfp4.converters.roles.view import WEIGHTS, Verdict, View
from mxfp4.converters.roles.words import word_set

_DELTA_LEAVES = word_set(
    "in_proj_qkv in_proj_qkvz in_proj_q in_proj_k in_proj_v q_proj k_proj v_proj qkv_proj "
    "q_conv1d k_conv1d v_conv1d"
)
_STATE_SIGNS = word_set("a_log conv1d dt_bias x_proj dt_proj d")
_FFN_PAIRS = (
    ("fc1", "fc2"),
    ("w1", "w2"),
    ("w3", "w2"),
    ("wi", "wo"),
    ("up_proj", "down_proj"),
    ("gate_proj", "down_proj"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),
)


def state(view: View) -> Verdict | None:
    """Steps, decays and other small parts of a recurrence."""
    leaf = view.leaf
    axis = 1 if view.rank == 2 and view.family.parameter in WEIGHTS else None
    if axis is not None and not view.family.parameter:
        axis = None
    if words.STATE_ALWAYS.fullmatch(leaf):
        return Verdict(Role.SSM_SMALL, f"'{leaf}' is a step or decay of a recurrence", axis)
    if words.STATE_LEAVES.fullmatch(leaf) and _recurrent(view):
        return Verdict(Role.SSM_SMALL, f"'{leaf}' in a recurrent block", axis)
    return None


def _recurrent(view: View) -> bool:
    if any(words.RECURRENCE.fullmatch(part) for part in view.family.words[:-1]):
        return True
    return bool(view.scene.siblings(view.path) & (_STATE_SIGNS - {"d"}))


def mixer(view: View) -> Verdict | None:
    """Projections of attention, linear attention and state-space blocks."""
    if view.rank != 2 or view.family.parameter not in WEIGHTS or view.in_expert:
        return None
    leaf, parents = view.leaf, view.parents
    siblings = view.scene.siblings(view.path)
    recurrent = _recurrent(view)
    inside = next((p for p in reversed(parents) if words.ATTENTION.fullmatch(p)), None)
    if recurrent and not (siblings & _DELTA_LEAVES):
        return _state_space(view, siblings)
    if inside is None:
        if "conv" in parents[-1:] and leaf in ("in_proj", "out_proj"):
            text = "projection around a short convolution"
            return Verdict(Role.ATTENTION, text, 1, Kind.SSM_PROJECTION)
        return None
    if inside == "mixer" and siblings & {"up_proj", "gate_proj"} and leaf != "o_proj":
        return None
    kind = Kind.LINEAR_ATTENTION if recurrent or "linear_attn" in parents else Kind.PLAIN
    return _attention_leaf(view, inside, kind)


def _state_space(view: View, siblings: set[str]) -> Verdict | None:
    if view.leaf in ("in_proj", "out_proj", "z_proj", "x_in_proj", "gate_proj", "input_proj"):
        text = f"'{view.leaf}' of a state-space block"
        return Verdict(Role.ATTENTION, text, 1, Kind.SSM_PROJECTION)
    return None


def _attention_leaf(view: View, inside: str, kind: Kind) -> Verdict | None:
    leaf = view.leaf
    cut = len(view.path) - 1
    text = f"'{leaf}' in '{inside}'"
    if words.ATTENTION_GATE.fullmatch(leaf):
        group = (cut, "in_proj_qkvz") if leaf == "in_proj_z" else None
        return Verdict(Role.ATTENTION_GATE, f"{text} gates its output", 1, group=group)
    if words.MLA_LEAVES.fullmatch(leaf):
        down = "_a" in leaf or "down" in leaf
        mla = Kind.MLA_DOWN if down and not leaf.startswith(("wo", "o_")) else Kind.MLA_UP
        group = (cut, "qkv_a") if mla is Kind.MLA_DOWN else None
        return Verdict(Role.ATTENTION, text, 1, mla, group=group)
    if words.QKV_LEAVES.fullmatch(leaf):
        if kind is Kind.PLAIN and leaf == "wkv" and "wq_a" in view.scene.siblings(view.path):
            return Verdict(Role.ATTENTION, text, 1, Kind.MLA_DOWN, group=(cut, "qkv_a"))
        tag = "in_proj_qkvz" if leaf.startswith("in_proj") else "qkv"
        return Verdict(Role.ATTENTION, text, 1, kind, group=(cut, tag))
    if words.OUTPUT_LEAVES.fullmatch(leaf):
        return Verdict(Role.ATTENTION, text, 1, kind)
    return None


def feed_forward(view: View) -> Verdict | None:
    """Dense feed-forward projections: inside such a segment, or as a matching pair in the layer."""
    if view.rank != 2 or view.family.parameter not in WEIGHTS or view.in_expert:
        return None
    leaf, parents = view.leaf, view.parents
    inward, outward = words.FFN_IN.fullmatch(leaf), words.FFN_OUT.fullmatch(leaf)
    if not view.in_layer or not (inward or outward):
        return None
    inside = next((p for p in reversed(parents) if words.FFN.fullmatch(p)), None)
    text = f"'{leaf}' in '{inside}'"
    if inside is None:
        if not _pair_in_layer(view):
            return None
        text = f"'{leaf}' with a counterpart of swapped shape beside it"
    group = (len(view.path) - 1, "gate_up") if inward and not outward else None
    return Verdict(Role.MLP, text, 1, group=group)


def _pair_in_layer(view: View) -> bool:
    around = view.scene.matrices_under(view.path[:-1])
    swapped = view.shape[::-1]
    return any(
        view.leaf in pair and around.get(pair[pair.index(view.leaf) - 1]) == swapped
        for pair in _FFN_PAIRS
    )
