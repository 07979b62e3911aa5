"""Formats without MXFP4: everything decoded to BF16, or to FP8 with a scale per 128 x 128 block."""

from __future__ import annotations

from mxfp4.converters.formats.types import ConfigEdit, Described, OutputFormat, Payload, Shape
from mxfp4.converters.header import TensorInfo

FP8_BLOCK = 128


def _bf16_tensors(module: str, shape: Shape) -> tuple[TensorInfo, ...]:
    return (TensorInfo(f"{module}.weight", "BF16", shape),)


def _fp8_tensors(module: str, shape: Shape) -> tuple[TensorInfo, ...]:
    rows, columns = (-(-length // FP8_BLOCK) for length in shape[-2:])
    return (
        TensorInfo(f"{module}.weight", "F8_E4M3", shape),
        TensorInfo(f"{module}.weight_scale_inv", "F32", (*shape[:-2], rows, columns)),
    )


def _fp8_config(described: Described) -> ConfigEdit:
    """Both spellings of the list of BF16 modules: vLLM reads one, transformers the other."""
    return ConfigEdit(
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "ignored_layers": list(described.unquantized),
            "modules_to_not_convert": list(described.unquantized),
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    )


BF16 = OutputFormat(
    "bf16",
    "every engine: an unquantized checkpoint",
    _bf16_tensors,
    lambda described: ConfigEdit(None),
    payload=Payload.BF16,
)

FP8 = OutputFormat(
    "fp8",
    "engines with FP8 block scales: packed weights become FP8, all else stays",
    _fp8_tensors,
    _fp8_config,
    payload=Payload.FP8,
    fp8_scale=".weight_scale_inv",
    fp8_scale_dtypes=frozenset({"F32", "BF16", "F8_E8M0", "U8"}),
)
