"""AMD Quark: `weight` holds packed bytes; excluded modules are listed by their full names."""

from __future__ import annotations

from typing import Any

from mxfp4.converters.formats.types import ConfigEdit, Described, OutputFormat, pair_of_leaves
from mxfp4.spec import BLOCK_SIZE


def _tensor(dynamic: bool) -> dict[str, Any]:
    """How Quark 0.13 describes MXFP4, every key as it writes them."""
    return {
        "block_size": None,
        "ch_axis": -1,
        "dtype": "fp4",
        "enable_buffer_reuse": False,
        "group_size": BLOCK_SIZE,
        "is_dynamic": dynamic,
        "is_scale_quant": False,
        "max_input_numel": 4194304,
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "qscheme": "per_group",
        "round_method": "half_even",
        "scale_calculation_mode": "even",
        "scale_format": "e8m0",
        "scale_type": "float",
        "symmetric": None,
        "zero_point_type": "int32",
    }


def _config(described: Described) -> ConfigEdit:
    """The config that Quark's own exporter writes; `export` is required by vLLM."""
    inputs = _tensor(True) if described.activations == "mxfp4" else None
    return ConfigEdit(
        {
            "algo_config": None,
            "exclude": list(described.unquantized),
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": {
                "bias": None,
                "input_tensors": inputs,
                "output_tensors": None,
                "target_device": None,
                "weight": _tensor(False),
            },
            "kv_cache_post_rope": False,
            "kv_cache_quant_config": {},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": "0.13",
        }
    )


QUARK = OutputFormat(
    "quark",
    "vLLM; SGLang and TokenSpeed on AMD with --activations mxfp4",
    pair_of_leaves((".weight", "U8"), (".weight_scale", "U8")),
    _config,
    activations=frozenset({"none", "mxfp4"}),
)
