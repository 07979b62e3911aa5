"""Recognise FP8, INT4 and NVFP4 weights by their companions, and find the block of their scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mxfp4.converters.header import TensorInfo
from mxfp4.converters.sources.scaled import SCALE_DTYPES
from mxfp4.converters.sources.types import Lookup, Part, Source
from mxfp4.errors import CorruptCheckpointError, TensorNotFoundError, UnsupportedFormatError

FP8_DTYPES = frozenset({"F8_E4M3", "F8_E5M2"})
FP8_BLOCKS = ((128, 128), (32, 32), (1, 128), (1, 32))
"""Blocks to try when the config names none that fits."""

_FP8_SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
_BARE_SCALES = ("_scale_inv", "_weight_scale", "_scale")
_NVFP4_GROUP = 16
_GLOBAL_SCALES = (".weight_global_scale", ".weight_scale_2")


def recognise_fp8(part: Part, lookup: Lookup, blocks: Sequence[tuple[int, int]]) -> Source | None:
    """An FP8 weight with scales per block, per output channel or per tensor."""
    info = part.info
    if info.dtype not in FP8_DTYPES or _is_companion(info.name):
        return None
    base = info.name.removesuffix(".weight")
    leaves = _FP8_SCALES if info.name.endswith(".weight") else _BARE_SCALES
    scale = _first(lookup, base, leaves)
    if scale is None:
        raise TensorNotFoundError(
            f"this {info.dtype} weight has no scale; looked for "
            + ", ".join(base + leaf for leaf in leaves),
            tensor=info.name,
            hint="download the checkpoint again: without its scale the weight has no meaning",
        )
    block = fp8_block(info, scale.info, blocks)
    logical = TensorInfo(info.name, "FP8", info.shape)
    return Source("fp8", logical, (part, scale), block)


def _is_companion(name: str) -> bool:
    return name.endswith((".weight_scale", ".scale", ".scales", ".weight_scale_inv", "_scale"))


def fp8_block(
    weight: TensorInfo, scale: TensorInfo, blocks: Iterable[tuple[int, int]]
) -> tuple[int, int]:
    """Rows and columns that one scale stands for, from the shapes; `blocks` are tried first."""
    if scale.dtype not in SCALE_DTYPES or len(weight.shape) < 2:
        raise _unfit(weight, scale)
    lead, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    for block in (*blocks, *FP8_BLOCKS):
        grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        if scale.shape == grid:
            return block
    if scale.shape in ((*lead, rows, 1), (*lead, rows)):
        return 1, columns
    if scale.element_count == 1 and not lead:
        return rows, columns
    if lead and scale.shape in (lead, (*lead, 1), (*lead, 1, 1)):
        return rows, columns
    raise _unfit(weight, scale)


def _unfit(weight: TensorInfo, scale: TensorInfo) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the scale {scale.name} {scale.dtype} {list(scale.shape)} fits no known block of the "
        f"weight {weight.dtype} {list(weight.shape)}",
        tensor=weight.name,
        hint="known are one scale per tensor, per output channel, and per block of "
        + ", ".join(f"{a}x{b}" for a, b in FP8_BLOCKS),
    )


def recognise_int4(part: Part, lookup: Lookup, blocks: Sequence[tuple[int, int]]) -> Source | None:
    """compressed-tensors INT4: eight codes in an I32, one float scale per group."""
    info = part.info
    if not info.name.endswith(".weight_packed") or info.dtype != "I32" or len(info.shape) != 2:
        return None
    base = info.name.removesuffix(".weight_packed")
    for leaf in (".weight_zero_point", ".weight_g_idx"):
        if lookup(base + leaf) is not None:
            raise UnsupportedFormatError(
                f"INT4 with {leaf[1:]} is not read",
                tensor=info.name,
                hint="only symmetric INT4 "
                "with groups in stored order is; start from the unquantized checkpoint",
            )
    scale = _first(lookup, base, (".weight_scale",))
    if scale is None:
        raise _no_scale(info, base + ".weight_scale")
    rows, columns = info.shape[0], info.shape[1] * 8
    groups = scale.info.shape[-1] if len(scale.info.shape) == 2 else 0
    fits = groups and scale.info.shape[0] == rows and columns % groups == 0
    if not fits or scale.info.dtype not in ("BF16", "F16", "F32"):
        raise _unfit(info, scale.info)
    logical = TensorInfo(base + ".weight", "INT4", (rows, columns))
    return Source("int4", logical, (part, scale), (1, columns // groups))


def recognise_nvfp4(part: Part, lookup: Lookup, blocks: Sequence[tuple[int, int]]) -> Source | None:
    """E2M1 codes with an E4M3 scale for every 16 and a float32 scale of the tensor."""
    info = part.info
    base, _, leaf = info.name.rpartition(".")
    if (
        leaf not in ("weight_packed", "weight")
        or info.dtype not in ("U8", "I8")
        or len(info.shape) < 2
    ):
        return None
    scale = lookup(base + ".weight_scale")
    if scale is None or scale.info.dtype != "F8_E4M3":
        return None
    overall = _first(lookup, base, _GLOBAL_SCALES)
    if overall is None:
        raise _no_scale(info, " or ".join(base + leaf for leaf in _GLOBAL_SCALES))
    columns = info.shape[-1] * 2
    lead = info.shape[:-2]
    matrices = 1
    for length in lead:
        matrices *= length
    fits = scale.info.shape == (*info.shape[:-1], columns // _NVFP4_GROUP)
    if not fits or columns % _NVFP4_GROUP:
        raise _unfit(info, scale.info)
    if overall.info.dtype != "F32" or overall.info.element_count not in (1, matrices):
        raise _unfit(info, overall.info)
    logical = TensorInfo(base + ".weight", "NVFP4", (*info.shape[:-1], columns))
    return Source("nvfp4", logical, (part, scale, overall), (1, _NVFP4_GROUP))


def _first(lookup: Lookup, base: str, leaves: Iterable[str]) -> Part | None:
    return next((part for leaf in leaves if (part := lookup(base + leaf)) is not None), None)


def _no_scale(info: TensorInfo, wanted: str) -> TensorNotFoundError:
    return TensorNotFoundError(
        f"this packed {info.dtype} weight has no scale; looked for {wanted}",
        tensor=info.name,
        hint="download the checkpoint again: without its scale the weight has no meaning",
    )
