"""Layouts that hold routed experts only, one matrix each: generic `mxfp4`, MiMo, DeepSeek-V4."""

from __future__ import annotations

from typing import Any

from mxfp4.converters.formats.types import ConfigEdit, Described, OutputFormat, pair_of_leaves
from mxfp4.converters.roles import Role
from mxfp4.spec import BLOCK_SIZE

_EXPERTS = frozenset({Role.EXPERT})


def _generic(described: Described) -> ConfigEdit:
    """vLLM reads nothing but the method; the list is for people and for other engines."""
    return ConfigEdit(
        {"quant_method": "mxfp4", "modules_to_not_convert": list(described.unquantized)}
    )


def _fp8(described: Described) -> dict[str, Any]:
    """The FP8 block config that describes the dense layers, whether or not there are any."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(described.block),
    }


def _mimo(described: Described) -> ConfigEdit:
    return ConfigEdit(
        {
            **_fp8(described),
            "ignored_layers": list(described.unquantized),
            "mxfp4_block_size": BLOCK_SIZE,
            "store_dtype": "mxfp4",
        }
    )


def _deepseek(described: Described) -> ConfigEdit:
    return ConfigEdit({**_fp8(described), "scale_fmt": "ue8m0"}, {"expert_dtype": "fp4"})


MXFP4 = OutputFormat(
    "mxfp4",
    "vLLM on any architecture (routed experts only), SGLang in part",
    pair_of_leaves((".weight", "U8"), (".weight_scale", "U8")),
    _generic,
    roles=_EXPERTS,
)

MIMO = OutputFormat(
    "mimo",
    "vLLM on any architecture, with dense layers that stay FP8; SGLang for MiMo",
    pair_of_leaves((".weight", "U8"), (".weight_scale", "U8")),
    _mimo,
    roles=_EXPERTS,
    fp8_scale=".weight_scale_inv",
    fp8_scale_dtypes=frozenset({"F32", "BF16", "F8_E8M0", "U8"}),
)

DEEPSEEK_V4 = OutputFormat(
    "deepseek-v4",
    "the DeepSeek-V4 architecture in vLLM, SGLang, TokenSpeed, TensorRT-LLM, transformers",
    pair_of_leaves((".weight", "I8"), (".scale", "F8_E8M0")),
    _deepseek,
    roles=_EXPERTS,
    fp8_scale=".scale",
    # Loaders copy scales by value into E8M0 parameters, which would round other floats.
    fp8_scale_dtypes=frozenset({"F8_E8M0", "U8"}),
)
