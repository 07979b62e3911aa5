"""GGUF blocks: the scale byte and 16 bytes of codes together, in llama.cpp's order of nibbles.

The repack is exact both ways and is meant as a library (`gguf_to_rows`, `rows_to_gguf`); as an
output format it keeps the blocks of a module in one tensor, for tools that assemble GGUF files.
Whole GGUF models are the work of llama.cpp's converter.
"""

from __future__ import annotations

from mxfp4.converters.formats.types import Bytes, ConfigEdit, Described, OutputFormat, Shape
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.sources.mxfp4 import (
    GGUF_BLOCK_BYTES,
    GGUF_LEAF,
    gguf_to_rows,
    rows_to_gguf,
)
from mxfp4.spec import BLOCK_SIZE

__all__ = ["GGUF_BLOCKS", "gguf_to_rows", "rows_to_gguf"]


def _tensors(module: str, shape: Shape) -> tuple[TensorInfo, ...]:
    row_bytes = shape[-1] // BLOCK_SIZE * GGUF_BLOCK_BYTES
    return (TensorInfo(module + GGUF_LEAF, "U8", (*shape[:-1], row_bytes)),)


def _streams(codes: Bytes, scales: Bytes) -> tuple[Bytes, ...]:
    return (rows_to_gguf(codes, scales),)


def _config(described: Described) -> ConfigEdit:
    return ConfigEdit({"quant_method": "gguf-blocks", "ignore": list(described.ignore)})


GGUF_BLOCKS = OutputFormat(
    "gguf-blocks",
    "no engine by itself: blocks for tools that assemble GGUF files",
    _tensors,
    _config,
    streams=_streams,
    ignores=True,
)
