"""Rules for what is never a plain projection: scales, biases, tables, norms, convolutions, scorers.

They run before the positive lists, so a name that both could claim is kept.
"""

from __future__ import annotations

from mxfp4.converters.roles import words
from mxfp4.converters.roles.types import Kind, Role
from mxfp4.converters.roles.view import Verdict, View
from mxfp4.converters.roles.words import word_set

_SCALES = word_set(
    "scale scales weight_scale weight_scale_inv scale_inv input_scale output_scale k_scale "
    "v_scale weight_shape weight_zero_point weight_g_idx qzeros weight_global_scale shape "
    "g_idx"
)
_PACKED_ONLY = frozenset({"weight_packed", "qweight", "blocks", "packed"})


def scale(view: View) -> Verdict | None:
    """Companions of a packed weight; a lone `scale` of a router or a norm is not one."""
    if view.family.parameter not in _SCALES:
        return None
    of_router = any(words.ROUTER.fullmatch(part) or part == "gate" for part in view.path)
    if of_router and view.scene.weights.get(view.path, view.shape) == view.shape:
        return Verdict(Role.ROUTER_BIAS, f"'{view.family.parameter}' of a router")
    if view.leaf and words.NORM.fullmatch(view.leaf):
        return Verdict(Role.NORM, "scale of a normalisation")
    axis = view.rank - 1 if view.rank > 1 else None
    return Verdict(Role.OTHER, "companion of a packed weight", axis, Kind.SCALE)


def bias(view: View) -> Verdict | None:
    """Biases by their last word, whatever their rank; the owner tells which kind."""
    leaf = view.leaf
    if words.ROUTER_BIAS.fullmatch(leaf):
        if leaf == "tid2eid":
            return Verdict(Role.ROUTER, "the table from token to expert of a hash router")
        return Verdict(Role.ROUTER_BIAS, f"'{leaf}' takes part in choosing experts")
    is_parameter = view.family.parameter == "bias"
    named = leaf.endswith(("_bias", "_biases")) and not words.EMBEDDING.fullmatch(leaf)
    if not (is_parameter or named or leaf in ("bias", "biases")):
        return None
    if "sink" in leaf:
        return Verdict(Role.OTHER, "a learned attention sink")
    owner = view.path if is_parameter else view.path[:-1]
    names = [part for part in owner if part != "#"]
    near = names[-1] if names else ""
    if words.STATE_ALWAYS.fullmatch(near if is_parameter else leaf):
        return Verdict(Role.SSM_SMALL, "bias of a recurrence's step or decay")
    if words.NORM.fullmatch(near):
        return Verdict(Role.NORM, "bias of a normalisation")
    if any(words.ROUTER.fullmatch(part) for part in names) or (
        near in words.ROUTER_WORDS and not view.in_attention and not view.in_expert
    ):
        return Verdict(Role.ROUTER_BIAS, "bias of a router")
    return Verdict(Role.BIAS, "a bias")


def convolution(view: View) -> Verdict | None:
    """By name, or by a rank that only convolutions have."""
    shape = view.shape
    if view.rank >= 3 and words.CONV.fullmatch(view.leaf):
        return Verdict(Role.CONV, f"'{view.leaf}' of rank {view.rank}")
    if view.rank in (4, 5) and view.family.parameter == "weight":
        return Verdict(Role.CONV, f"a weight of rank {view.rank}")
    small_tail = view.rank == 3 and (shape[1] == 1 or shape[2] <= 8) and not view.in_expert
    if small_tail and view.family.parameter == "weight" and shape[0] > 8:
        return Verdict(Role.CONV, f"a weight of rank 3 with a tail of {shape[1]} x {shape[2]}")
    if view.rank == 2 and shape[1] <= 8 and words.CONV.fullmatch(view.leaf):
        return Verdict(Role.CONV, f"'{view.leaf}' with {shape[1]} taps")
    return None


def table(view: View) -> Verdict | None:
    """Embeddings and output heads: by word, or by vocabulary rows outside the layers."""
    leaf, shape = view.leaf, view.shape
    axis = view.rank - 1 if view.rank >= 2 else None
    if any(words.HEAD.fullmatch(part) for part in view.path):
        return Verdict(Role.LM_HEAD, "an output head by name", axis if view.rank == 2 else None)
    if (view.late or not view.in_layer) and leaf in words.TOP_HEAD and view.rank == 2:
        return Verdict(Role.LM_HEAD, f"'{leaf}' outside the layers is an output head", axis)
    near = view.family.words[-2:]
    named = any(words.EMBEDDING.fullmatch(part) for part in near) and view.rank >= 2
    if named and not (words.NORM.fullmatch(leaf) or (leaf.endswith("_proj") and view.in_layer)):
        return Verdict(Role.EMBEDDING, f"'{'.'.join(near)}' is a table of vectors", axis)
    if view.rank == 2 and not view.in_layer and shape[0] == view.facts.vocab_size > 0:
        return Verdict(Role.EMBEDDING, "as many rows as the vocabulary, outside the layers", axis)
    return None


def norm(view: View) -> Verdict | None:
    """Norms by a word at the leaf, or one step above it for norms made of several parts."""
    parts = view.family.words
    last = parts[-1:] and words.NORM.fullmatch(parts[-1])
    above = parts[-2:-1] and words.NORM.fullmatch(parts[-2])
    above2 = parts[-3:-2] and words.NORM.fullmatch(parts[-3]) and "attn" not in "".join(parts[-2:])
    if last and (view.rank <= 2 or view.in_expert):
        return Verdict(Role.NORM, f"'{parts[-1]}' names a normalisation")
    if (above or above2) and not _belongs_to_mixer(parts):
        axis = 1 if view.rank == 2 else None
        return Verdict(Role.NORM, f"part of the normalisation '{parts[-2 if above else -3]}'", axis)
    return None


def _belongs_to_mixer(parts: tuple[str, ...]) -> bool:
    return any(words.ATTENTION.fullmatch(p) and not words.NORM.fullmatch(p) for p in parts[-2:-1])


def side_channel(view: View) -> Verdict | None:
    """Hyper-connections, per-layer embeddings, attention residuals, adapters."""
    found = next((part for part in view.path if words.SIDE_CHANNEL.fullmatch(part)), None)
    if found is None and not (view.family.parameter or "").startswith("lora"):
        return None
    text = f"'{found or view.family.parameter}' is a side channel of the residual stream"
    if view.rank == 2 and view.family.parameter == "weight":
        return Verdict(Role.OTHER_LINEAR, text, 1)
    return Verdict(Role.OTHER, text)


def scorer(view: View) -> Verdict | None:
    """The indexer of sparse attention and compressors of its keys."""
    axis = 1 if view.rank == 2 and view.family.parameter in {"weight", *_PACKED_ONLY} else None
    for part in view.path:
        if words.INDEXER.fullmatch(part):
            return Verdict(Role.INDEXER, f"'{part}' scores keys for sparse attention", axis)
    for part in view.path:
        if words.COMPRESSOR.fullmatch(part):
            gate = "gate" in view.leaf
            role = Role.ATTENTION_GATE if gate else Role.OTHER_LINEAR
            if axis is None:
                role = Role.OTHER
            return Verdict(role, f"'{part}' compresses keys and values", axis, Kind.KV_COMPRESSOR)
    return None
