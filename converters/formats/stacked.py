"""Layouts that stack the experts of a layer into one tensor: gpt-oss and MLX."""

from __future__ import annotations

import re

from mxfp4.converters.formats.types import (
    ConfigEdit,
    Described,
    OutputFormat,
    Shape,
    Slot,
    pair_of_leaves,
)
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.roles import Role
from mxfp4.spec import BLOCK_BYTES, BLOCK_SIZE

_EXPERT = re.compile(r"(?P<parent>(?:.*\.)?)experts\.(?P<expert>\d+)\.(?P<leaf>\w+)")
_PROJECTIONS = {
    "gate_proj": "gate_proj",
    "up_proj": "up_proj",
    "down_proj": "down_proj",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}


def expert_place(module: str) -> tuple[str, int, str] | None:
    """(parent with its dot, expert, projection) of a per-expert module, or None."""
    match = _EXPERT.fullmatch(module)
    if match is None or match["leaf"] not in _PROJECTIONS:
        return None
    return match["parent"], int(match["expert"]), _PROJECTIONS[match["leaf"]]


def _gpt_oss_slot(module: str) -> Slot | None:
    """Gate and up share a tensor, their rows in turn: even rows gate, odd rows up."""
    place = expert_place(module)
    if place is None:
        return None
    parent, expert, projection = place
    if projection == "down_proj":
        return Slot(f"{parent}experts.down_proj", expert)
    return Slot(f"{parent}experts.gate_up_proj", expert, int(projection == "up_proj"), 2)


def _gpt_oss_tensors(module: str, shape: Shape) -> tuple[TensorInfo, ...]:
    blocks = (*shape[:-1], shape[-1] // BLOCK_SIZE)
    return (
        TensorInfo(f"{module}_blocks", "U8", (*blocks, BLOCK_BYTES)),
        TensorInfo(f"{module}_scales", "U8", blocks),
    )


def _gpt_oss_config(described: Described) -> ConfigEdit:
    return ConfigEdit(
        {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        }
    )


def _mlx_slot(module: str) -> Slot | None:
    place = expert_place(module)
    if place is None:
        return None
    parent, expert, projection = place
    return Slot(f"{parent}switch_mlp.{projection}", expert)


def _mlx_config(described: Described) -> ConfigEdit:
    """MLX looks under either key, and quantizes exactly the modules that have scales."""
    entry = {"bits": 4, "group_size": BLOCK_SIZE, "mode": "mxfp4"}
    return ConfigEdit(entry, {"quantization": entry})


GPT_OSS = OutputFormat(
    "gpt-oss",
    "the gpt-oss architecture in every engine",
    _gpt_oss_tensors,
    _gpt_oss_config,
    slot=_gpt_oss_slot,
    roles=frozenset({Role.EXPERT}),
    model_types=frozenset({"gpt_oss"}),
)

MLX = OutputFormat(
    "mlx",
    "mlx-lm",
    pair_of_leaves((".weight", "U32"), (".scales", "U8"), codes_per_unit=8),
    _mlx_config,
    slot=_mlx_slot,
    # Tensor names follow mlx-lm's own clean-up code, model by model.
    model_types=frozenset(
        {
            *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
            *("glm4_moe", "deepseek_v2", "deepseek_v3", "minimax", "olmoe"),
        }
    ),
    metadata={"format": "mlx"},
)
