"""compressed-tensors `mxfp4-pack-quantized`: one Linear per expert and projection, any Linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mxfp4.converters.formats.types import ConfigEdit, Described, OutputFormat, pair_of_leaves
from mxfp4.spec import BLOCK_SIZE

_FORMAT = "mxfp4-pack-quantized"

_MXFP4_INPUTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": True,
    "group_size": BLOCK_SIZE,
    "num_bits": 4,
    "observer": None,
    "observer_kwargs": {},
    "scale_dtype": "torch.uint8",
    "strategy": "group",
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}
_FP8_INPUTS: dict[str, Any] = {
    **_MXFP4_INPUTS,
    "group_size": 128,
    "num_bits": 8,
    "scale_dtype": None,
}

ACTIVATIONS: Mapping[str, dict[str, Any] | None] = {
    "none": None,
    "mxfp4": _MXFP4_INPUTS,
    "fp8": _FP8_INPUTS,
}
"""What engines are told to do with activations; the tensors are the same for all three."""


def _config(described: Described) -> ConfigEdit:
    """The `mxfp4-pack-quantized` scheme of compressed-tensors.

    The key set is the one its pydantic schema has had since 0.17: the schema forbids unknown keys,
    so a key newer than a consumer's pin would stop it from loading.
    """
    weights = {**_MXFP4_INPUTS, "dynamic": False}
    group = {
        "format": _FORMAT,
        "input_activations": ACTIVATIONS[described.activations],
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return ConfigEdit(
        {
            "config_groups": {"group_0": group},
            "format": _FORMAT,
            "global_compression_ratio": None,
            "ignore": list(described.ignore),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "transform_config": {},
            "version": "0.19.0",
        }
    )


COMPRESSED_TENSORS = OutputFormat(
    "compressed-tensors",
    "vLLM, transformers, TensorRT-LLM, TokenSpeed; SGLang and mlx-lm for Kimi-K3",
    pair_of_leaves((".weight_packed", "U8"), (".weight_scale", "U8")),
    _config,
    ignores=True,
    activations=frozenset(ACTIVATIONS),
)
