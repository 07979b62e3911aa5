"""Output formats: what a quantized matrix is called in the file, and what the config says of it.

One entry of `FORMATS` per layout; the conversion loop knows none of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxfp4.converters.header import TensorInfo
from mxfp4.errors import RecipeError
from mxfp4.spec import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Names and config of one on-disk layout.

    `codes` and `scales` describe the two tensors of a module with an [N, K] weight;
    `quantization_config` builds the config entry from the ignore list.
    """

    name: str
    codes: Callable[[str, int, int], TensorInfo]
    scales: Callable[[str, int, int], TensorInfo]
    quantization_config: Callable[[Sequence[str]], dict[str, Any]]


def _packed_codes(module: str, rows: int, columns: int) -> TensorInfo:
    return TensorInfo(f"{module}.weight_packed", "U8", (rows, columns // 2))


def _block_scales(module: str, rows: int, columns: int) -> TensorInfo:
    return TensorInfo(f"{module}.weight_scale", "U8", (rows, columns // BLOCK_SIZE))


def _compressed_tensors_config(ignore: Sequence[str]) -> dict[str, Any]:
    """The weight-only `mxfp4-pack-quantized` scheme of compressed-tensors.

    The key set is the one its pydantic schema has had since 0.17: the schema forbids unknown keys,
    so a key newer than a consumer's pin would stop it from loading.
    """
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
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
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "transform_config": {},
        "version": "0.19.0",
    }


FORMATS: Mapping[str, OutputFormat] = {
    "compressed-tensors": OutputFormat(
        "compressed-tensors", _packed_codes, _block_scales, _compressed_tensors_config
    ),
}
"""Every output format by its command-line name."""

DEFAULT_FORMAT = "compressed-tensors"


def output_format(name: str) -> OutputFormat:
    """Look up a format; raises `RecipeError` that lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise RecipeError(
            f"unknown output format {name!r}", hint="known formats: " + ", ".join(sorted(FORMATS))
        ) from None
