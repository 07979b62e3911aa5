"""MXFP4 as others store it: the same codes and scale bytes under many names and dtypes.

The dtype of a stored tensor only says how its bytes are called here; nothing is ever converted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mxfp4.converters.header import DTYPE_BITS, TensorInfo
from mxfp4.converters.sources.types import Bytes, Fetch, Floats, Lookup, Part, Rows, Source, Storage
from mxfp4.errors import CorruptCheckpointError
from mxfp4.kernels.rows import decode_rows
from mxfp4.spec import BLOCK_BYTES, BLOCK_SIZE

GGUF_BLOCK_BYTES = 1 + BLOCK_BYTES
"""One scale byte, then the codes of 32 elements."""

Shape = tuple[int, ...]

_BYTE_SCALES = frozenset({"U8", "F8_E8M0"})


class PackedNames(NamedTuple):
    """Leaves and dtypes of one family; `canonical` replaces the codes' leaf in the name."""

    codes: str
    dtypes: frozenset[str]
    scales: str
    canonical: str = ".weight"
    blocked: bool = False
    """Whether the codes have an axis of their own for the 16 bytes of a block."""


_BYTES = frozenset({"U8", "I8"})

PACKED_NAMES = (
    PackedNames(".weight_packed", _BYTES, ".weight_scale"),  # compressed-tensors, Kimi-K3
    PackedNames(".weight", _BYTES | {"F4"}, ".weight_scale"),  # generic, Quark, MiMo, ModelOpt
    PackedNames(".weight", _BYTES, ".scale"),  # DeepSeek-V4
    PackedNames(".weight", _BYTES, ".weight_scale_inv"),  # Ling
    PackedNames(".weight", frozenset({"U32"}), ".scales"),  # MLX
    PackedNames("_blocks", _BYTES, "_scales", canonical="", blocked=True),  # gpt-oss
)
"""Families of MXFP4, told apart by what is really there and not by the config's word."""

_FAMILIES = {
    dtype: tuple(names for names in PACKED_NAMES if dtype in names.dtypes)
    for dtype in frozenset[str]().union(*(names.dtypes for names in PACKED_NAMES))
}

_MLX_EXPERTS = (".switch_mlp.", ".experts.")
"""MLX stacks experts under a module of its own name."""

GGUF_LEAF = ".weight_gguf"
"""Codes and scales in one tensor of GGUF blocks."""


def recognise(part: Part, lookup: Lookup, blocks: Sequence[tuple[int, int]]) -> Source | None:
    """MXFP4 codes with a scale byte for every 32 of them; None for everything else."""
    name, dtype, shape = part.stored.info
    for codes, _, leaf, canonical, blocked in _FAMILIES.get(dtype, ()):
        if not name.endswith(codes):
            continue
        base = name.removesuffix(codes)
        scales = lookup(base + leaf)
        if scales is None:
            continue
        scales_name, scales_dtype, scales_shape = scales.stored.info
        if scales_dtype not in _BYTE_SCALES:
            continue
        logical, wanted = _logical_shapes(dtype, shape, blocked)
        if logical is None or scales_shape != wanted:
            raise CorruptCheckpointError(
                f"codes {dtype} {list(shape)} and scales {scales_name} {scales_dtype} "
                f"{list(scales_shape)} do not belong together: one scale byte for {BLOCK_SIZE} "
                "codes was expected",
                tensor=name,
                hint="this is neither MXFP4 nor another layout that is read here; convert from "
                "the unquantized checkpoint",
            )
        info = TensorInfo((base + canonical).replace(*_MLX_EXPERTS), "MXFP4", logical)
        return Source("mxfp4", info, (part, scales), (1, BLOCK_SIZE))
    return _gguf(part) if dtype == "U8" and name.endswith(GGUF_LEAF) else None


@functools.lru_cache(maxsize=65536)
def _logical_shapes(
    dtype: str, shape: Shape, blocked: bool
) -> tuple[Shape, Shape] | tuple[None, None]:
    """Shapes in elements and in scales of codes stored in `shape`, where those can be codes.

    Cached: a checkpoint has hundreds of thousands of tensors and a few dozen shapes.
    """
    lead, columns = shape[:-1], 0
    if blocked and len(shape) >= 3 and shape[-1] == BLOCK_BYTES:
        lead, columns = shape[:-2], shape[-2] * BLOCK_SIZE
    elif not blocked and len(shape) >= 2:
        columns = shape[-1] * DTYPE_BITS[dtype] // 4
    if not columns or columns % BLOCK_SIZE:
        return None, None
    return (*lead, columns), (*lead, columns // BLOCK_SIZE)


def _gguf(part: Part) -> Source:
    shape = part.info.shape
    if len(shape) < 2 or shape[-1] % GGUF_BLOCK_BYTES:
        raise CorruptCheckpointError(
            f"U8 {list(shape)} is no whole number of GGUF blocks of {GGUF_BLOCK_BYTES} bytes",
            tensor=part.info.name,
            hint="write the blocks again",
        )
    columns = shape[-1] // GGUF_BLOCK_BYTES * BLOCK_SIZE
    name = part.info.name.removesuffix(GGUF_LEAF) + ".weight"
    info = TensorInfo(name, "MXFP4", (*shape[:-1], columns))
    return Source("mxfp4-gguf", info, (part,), (1, BLOCK_SIZE))


def gguf_to_rows(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """GGUF blocks uint8 [N, 17 K/32] to codes [N, K/2] in neighbour order and scales [N, K/32].

    A GGUF block holds code j and code j + 16 in one byte; all others hold codes 2j and 2j + 1.
    """
    rows, row_bytes = blocks.shape
    split = blocks.reshape(rows, row_bytes // GGUF_BLOCK_BYTES, GGUF_BLOCK_BYTES)
    payload = split[:, :, 1:]
    halves = np.concatenate([payload & np.uint8(15), payload >> np.uint8(4)], axis=2)
    codes = (halves[:, :, 0::2] | (halves[:, :, 1::2] << np.uint8(4))).reshape(rows, -1)
    return np.ascontiguousarray(codes), np.ascontiguousarray(split[:, :, 0])


def rows_to_gguf(codes: Bytes, scales: Bytes) -> Bytes:
    """The inverse of `gguf_to_rows`: uint8 [N, 17 K/32]."""
    rows, count = scales.shape
    pairs = codes.reshape(rows, count, BLOCK_BYTES)
    blocks = np.empty((rows, count, GGUF_BLOCK_BYTES), np.uint8)
    elements = np.empty((rows, count, BLOCK_SIZE), np.uint8)
    elements[:, :, 0::2] = pairs & 15
    elements[:, :, 1::2] = pairs >> 4
    blocks[:, :, 0] = scales
    blocks[:, :, 1:] = elements[:, :, :BLOCK_BYTES] | (elements[:, :, BLOCK_BYTES:] << 4)
    return blocks.reshape(rows, -1)


def _packed(source: Source, fetch: Fetch, rows: Rows) -> tuple[Bytes, Bytes]:
    columns = source.info.shape[-1]
    codes = fetch(source.parts[0], columns // 2, rows)
    return codes, fetch(source.parts[1], columns // BLOCK_SIZE, rows)


def _packed_gguf(source: Source, fetch: Fetch, rows: Rows) -> tuple[Bytes, Bytes]:
    row_bytes = source.info.shape[-1] // BLOCK_SIZE * GGUF_BLOCK_BYTES
    return gguf_to_rows(fetch(source.parts[0], row_bytes, rows))


def _values(source: Source, fetch: Fetch, rows: Rows) -> Floats:
    read = _packed if source.storage == "mxfp4" else _packed_gguf
    codes, scales = read(source, fetch, rows)
    return decode_rows(codes, scales, "F32").astype(np.float32, copy=False)


STORAGE = Storage("MXFP4", _values, _packed)
GGUF_STORAGE = Storage("MXFP4 in GGUF blocks", _values, _packed_gguf)
