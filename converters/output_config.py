"""`config.json` of the output: one quantization entry, where the source had it, no older one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from mxfp4.converters.checkpoint import QUANTIZATION_KEYS, Checkpoint
from mxfp4.converters.formats import ConfigEdit, Described
from mxfp4.converters.plan import Plan, Treatment
from mxfp4.converters.roles import Role
from mxfp4.converters.tasks import module_of, modules_of
from mxfp4.converters.treatments import shared_block

STALE_FILES = ("hf_quant_config.json", "quantization_config.json", "quant_model_description.json")
"""Files that say how the source was quantized; they would be read as a word about the output."""

STALE_KEYS = ("expert_dtype", "scale_fmt", "store_dtype", "mxfp4_block_size")
"""Keys beside the quantization entry that only the old layout needs."""

_MLX_KEY = "quantization"
_NESTED_MODELS = frozenset({"kimi_k3", "kimi_k25"})
"""Models whose loaders look for the entry inside `text_config`."""

_NO_LINEAR = frozenset({Role.EMBEDDING, Role.NORM, Role.CONV, Role.BIAS, Role.ROUTER_BIAS})
_HEAD = "lm_head"


def stale_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Files of the source that must not be carried over."""
    return tuple(name for name in checkpoint.companions if name.split("/")[-1] in STALE_FILES)


def output_config(plan: Plan) -> dict[str, Any]:
    """The source's config with the old quantization removed and the new one in its place."""
    source = plan.checkpoint.config or {}
    config = copy.deepcopy(dict(source))
    place = quantization_place(source)
    for _, holder in list(_holders(config)):
        for key in (*QUANTIZATION_KEYS, _MLX_KEY):
            if isinstance(holder.get(key), Mapping):
                del holder[key]
    for key in STALE_KEYS:
        config.pop(key, None)
    edit = plan.format.config(described(plan))
    if edit.quantization is not None:
        holder = config
        for key in place:
            holder = holder[key]
        holder["quantization_config"] = edit.quantization
    config.update(edit.top)
    return config


def quantization_place(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that lead to the mapping which holds (or should hold) the quantization entry."""
    for place, holder in _holders(config):
        if any(isinstance(holder.get(key), Mapping) for key in (*QUANTIZATION_KEYS, _MLX_KEY)):
            return place
    nested = config.get("model_type") in _NESTED_MODELS
    return ("text_config",) if nested and isinstance(config.get("text_config"), Mapping) else ()


def _holders(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The config and the parts of it that describe sub-models."""
    yield (), config
    for key, value in config.items():
        if key.endswith("_config") and key not in QUANTIZATION_KEYS and isinstance(value, Mapping):
            yield (key,), value


def described(plan: Plan) -> Described:
    """What a format needs to know for its config."""
    kept = [t for t in plan.tensors if t.treatment in (Treatment.KEEP, Treatment.DECODE)]
    fp8 = {id(t) for t in kept if t.treatment is Treatment.KEEP and not t.source.plain}
    linear = [
        t
        for t in kept
        if id(t) not in fp8
        and len(t.info.shape) == 2
        and t.info.name.endswith(".weight")
        and (t.decision.role.inner or t.decision.role.role) not in _NO_LINEAR
    ]
    names = [module_of(t.info.name) for t in linear]
    if not any(name.endswith(_HEAD) for name in names):
        names.append(_HEAD)
    return Described(
        ignore=plan.ignore,
        quantized=[name for shard in plan.shards for name in modules_of(shard.tasks)],
        unquantized=names,
        fp8=[module_of(t.info.name) for t in kept if id(t) in fp8],
        model=plan.checkpoint.config or {},
        activations=plan.options.activations,
        block=shared_block([t.source for t in plan.tensors]),
    )


def quantization_of(plan: Plan) -> ConfigEdit:
    """The config entry alone."""
    return plan.format.config(described(plan))
