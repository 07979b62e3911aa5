"""The positive lists: attention and feed-forward projections in their places, and small states.

A leaf counts only inside a layer and directly inside a segment that fits it; what stands between
the two has to be a known wrapper. What no rule claims is kept and reported.
"""

from __future__ import annotations

import re

from mxfp4.converters.roles import words
from mxfp4.converters.roles.types import Kind, Role
from mxfp4.converters.roles.view import WEIGHTS, Verdict, View
from mxfp4.converters.roles.words import word_set

_MATRICES = WEIGHTS - {""}
"""Attention and dense projections are modules; a bare matrix there is a query or a table."""

_DELTA_LEAVES = word_set(
    "in_proj_qkv in_proj_qkvz in_proj_q in_proj_k in_proj_v q_proj k_proj v_proj qkv_proj "
    "q_conv1d k_conv1d v_conv1d"
)
_STATE_SIGNS = word_set(
    "a_log conv1d conv_1d dt_bias x_proj dt_proj rg_lru time_decay time_first time_mix_k bcdt_proj"
)
_STATE_SPACE_LEAVES = word_set(
    "in_proj out_proj z_proj x_in_proj gate_proj input_proj linear_x linear_y linear_out x_proj_in"
)
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
    leaf = view.leaf.removesuffix("_weight")
    axis = 1 if view.rank == 2 and view.family.parameter in _MATRICES else None
    if words.STATE_ALWAYS.fullmatch(leaf):
        return Verdict(Role.SSM_SMALL, f"'{leaf}' is a step or decay of a recurrence", axis)
    if words.STATE_LEAVES.fullmatch(leaf) and _recurrent(view):
        return Verdict(Role.SSM_SMALL, f"'{leaf}' in a recurrent block", axis)
    return None


def _recurrent(view: View) -> bool:
    if any(words.RECURRENCE.fullmatch(part) for part in view.parents):
        return True
    return bool(view.scene.siblings(view.path) & _STATE_SIGNS)


def mixer(view: View) -> Verdict | None:
    """Projections of attention, linear attention and state-space blocks."""
    if not _is_matrix(view):
        return None
    leaf, parents = _unwrapped(view)
    siblings = view.scene.siblings(view.path)
    recurrent = _recurrent(view)
    if recurrent and not (siblings & _DELTA_LEAVES):
        if leaf not in _STATE_SPACE_LEAVES:
            return None
        text = f"'{leaf}' of a state-space block"
        return Verdict(Role.ATTENTION, text, 1, Kind.SSM_PROJECTION)
    if "conv" in parents[-1:] and leaf in ("in_proj", "out_proj"):
        text = "projection around a short convolution"
        return Verdict(Role.ATTENTION, text, 1, Kind.SSM_PROJECTION)
    inside = _owner(parents, words.ATTENTION, words.ATTENTION_WRAPPERS)
    if inside is None:
        direct = not parents and words.DIRECT_ATTENTION.fullmatch(leaf)
        inward = leaf not in ("attn_out", "attn_output", "o_proj")
        group = (0, "qkv") if direct and inward else None
        return Verdict(Role.ATTENTION, f"'{leaf}'", 1, group=group) if direct else None
    if inside in words.ANY_MIXER and siblings & {"up_proj", "gate_proj"} and leaf != "o_proj":
        return None
    kind = Kind.LINEAR_ATTENTION if recurrent or "linear_attn" in parents else Kind.PLAIN
    return _attention_leaf(view, leaf, inside, kind)


def _is_matrix(view: View) -> bool:
    return (
        view.rank == 2
        and view.in_layer
        and not view.in_expert
        and view.family.parameter in _MATRICES
    )


def _unwrapped(view: View) -> tuple[str, tuple[str, ...]]:
    """Leaf and parents without a generic wrapper, as in `q_proj.linear` or `q_proj.base_layer`."""
    leaf, parents = view.leaf, view.parents
    if leaf in words.LEAF_WRAPPERS and parents and words.PROJECTION.fullmatch(parents[-1]):
        return parents[-1], parents[:-1]
    return leaf, parents


def _owner(
    parents: tuple[str, ...], block: re.Pattern[str], wrappers: frozenset[str]
) -> str | None:
    """The nearest parent of a kind, if only wrappers stand between it and the leaf."""
    for part in reversed(parents):
        if block.fullmatch(part):
            return part
        if part not in wrappers:
            return None
    return None


def _attention_leaf(view: View, leaf: str, inside: str, kind: Kind) -> Verdict | None:
    cut = len(view.path) - 1
    text = f"'{leaf}' in '{inside}'"
    if words.ATTENTION_GATE.fullmatch(leaf):
        group = (cut, "in_proj_qkvz") if leaf == "in_proj_z" else None
        return Verdict(Role.ATTENTION_GATE, f"{text} gates its output", 1, group=group)
    if words.MLA_LEAVES.fullmatch(leaf):
        down = ("_a" in leaf or "down" in leaf) and not leaf.startswith(("wo", "o_"))
        mla = Kind.MLA_DOWN if down else Kind.MLA_UP
        return Verdict(Role.ATTENTION, text, 1, mla, group=(cut, "qkv_a") if down else None)
    if words.QKV_LEAVES.fullmatch(leaf):
        if leaf == "wkv" and "wq_a" in view.scene.siblings(view.path):
            return Verdict(Role.ATTENTION, text, 1, Kind.MLA_DOWN, group=(cut, "qkv_a"))
        tag = "in_proj_qkvz" if leaf.startswith("in_proj") else "qkv"
        cut -= leaf != view.leaf
        return Verdict(Role.ATTENTION, text, 1, kind, group=(cut, tag))
    if words.OUTPUT_LEAVES.fullmatch(leaf):
        return Verdict(Role.ATTENTION, text, 1, kind)
    return None


def feed_forward(view: View) -> Verdict | None:
    """Dense feed-forward projections: inside such a segment, or as a matching pair in the layer."""
    if not _is_matrix(view):
        return None
    leaf, parents = _unwrapped(view)
    inward, outward = words.FFN_IN.fullmatch(leaf), words.FFN_OUT.fullmatch(leaf)
    if any(words.GATE_PARENT.fullmatch(part) for part in parents) or _alone_beside_experts(view):
        return None
    inside = _owner(parents, words.FFN, words.FFN_WRAPPERS)
    if (inward or outward) and inside is not None:
        text = f"'{leaf}' in '{inside}'"
    elif not parents and words.DIRECT_FFN.fullmatch(leaf):
        text, inward = f"'{leaf}'", re.match("ff_proj|.*(up|gate)", leaf)
    elif _pair_in_layer(view):
        text = f"'{leaf}' with a counterpart of swapped shape beside it"
    else:
        return _encoder_pair(view)
    if leaf == "w2" and "c_proj" in view.scene.siblings(view.path):
        inward, outward = inward or outward, None
    group = (len(view.path) - 1, "gate_up") if inward and not outward else None
    return Verdict(Role.MLP, text, 1, group=group)


def _alone_beside_experts(view: View) -> bool:
    """Directly beside the experts under a general name, without a counterpart: perhaps a router."""
    telling = view.leaf in words.FUSED_IN or view.leaf.endswith(("gate_proj", "up_proj"))
    if telling or view.path[:-1] not in view.scene.expert_blocks:
        return False
    around = view.scene.matrices_under(view.path[:-1]).items()
    ways = (words.FFN_IN, words.FFN_OUT)
    into, back = ([shape for name, shape in around if way.fullmatch(name)] for way in ways)
    pairs = [(a, b) for a in into for b in back if a[-1] == b[-2] and a[-2] in (b[-1], 2 * b[-1])]
    return not any(view.shape in pair for pair in pairs)


def _pair_in_layer(view: View) -> bool:
    if "#" in view.path:
        return False
    around = view.scene.matrices_under(view.path[:-1])
    swapped = view.shape[::-1]
    return any(
        view.leaf in pair and around.get(pair[pair.index(view.leaf) - 1]) == swapped
        for pair in _FFN_PAIRS
    )


def _encoder_pair(view: View) -> Verdict | None:
    """`intermediate.dense` and `output.dense` of BERT-like encoders, with swapped shapes."""
    ends = (("intermediate", "dense"), ("output", "dense"))
    if view.path[-2:] not in ends or view.in_attention:
        return None
    other = (*view.path[:-2], *ends[1 - ends.index(view.path[-2:])])
    if view.scene.weights.get(other) != view.shape[::-1]:
        return None
    return Verdict(Role.MLP, f"'{'.'.join(view.path[-2:])}' of an encoder layer", 1)
