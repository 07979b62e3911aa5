"""Every output format by its command-line name."""

from __future__ import annotations

from collections.abc import Mapping

from mxfp4.converters.formats.compressed_tensors import COMPRESSED_TENSORS
from mxfp4.converters.formats.decoded import BF16, FP8
from mxfp4.converters.formats.expert_layouts import DEEPSEEK_V4, MIMO, MXFP4
from mxfp4.converters.formats.gguf_blocks import GGUF_BLOCKS
from mxfp4.converters.formats.quark import QUARK
from mxfp4.converters.formats.stacked import GPT_OSS, MLX
from mxfp4.converters.formats.types import OutputFormat
from mxfp4.errors import RecipeError

FORMATS: Mapping[str, OutputFormat] = {
    layout.name: layout
    for layout in (
        COMPRESSED_TENSORS,
        MXFP4,
        GPT_OSS,
        QUARK,
        DEEPSEEK_V4,
        MIMO,
        MLX,
        GGUF_BLOCKS,
        BF16,
        FP8,
    )
}
"""Every output format by its command-line name."""

DEFAULT_FORMAT = COMPRESSED_TENSORS.name


def output_format(name: str) -> OutputFormat:
    """Look up a format; raises `RecipeError` that lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise RecipeError(
            f"unknown output format {name!r}", hint="known formats: " + ", ".join(sorted(FORMATS))
        ) from None
