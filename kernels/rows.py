"""Encode and decode raw rows of a checkpoint: numpy in, numpy out, without torch.

Pure functions: they keep no state, may be called from several threads at once, and release the
interpreter lock while the C codec works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from mxfp4.errors import DtypeError, NonFiniteError, RecipeError, ShapeError
from mxfp4.kernels.backends import block_codec
from mxfp4.kernels.fallback import float_values
from mxfp4.spec import BLOCK_BYTES, BLOCK_SIZE, E8M0_NAN, CodecOptions, ScaleRule
from mxfp4.statistics import TensorStatistics

__all__ = ["CodecOptions", "EncodedRows", "TensorStatistics", "decode_rows", "encode_rows"]

SOURCE_WIDTH = {"BF16": 2, "F16": 2, "F32": 4}
"""Source dtypes by their safetensors names, with their bytes per value."""

_BYTE = np.dtype(np.uint8)
_Kind = TypeVar("_Kind", bound=np.generic)

NanScale = Literal["raise", "nan"]


@dataclass(frozen=True)
class EncodedRows:
    """`codes` uint8 [N, K/2], `scales` uint8 [N, K/32], and the statistics if they were asked."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    statistics: TensorStatistics | None = None


def encode_rows(
    source: NDArray[np.generic],
    dtype: str,
    options: CodecOptions = CodecOptions(),  # noqa: B008 (frozen)
    *,
    codes: NDArray[np.uint8] | None = None,
    scales: NDArray[np.uint8] | None = None,
    statistics: bool = False,
    importance: NDArray[np.floating] | None = None,
) -> EncodedRows:
    """Encode rows of raw bits in blocks of 32 along the last axis.

    `source` is C-contiguous [N, K], K a multiple of 32: uint16 for `dtype` "BF16" or "F16", uint32
    or float32 for "F32". `codes` uint8 [N, K/2] and `scales` uint8 [N, K/32] are filled in place
    when given; both must be contiguous, but may be parts of larger buffers. `importance` [K] weighs
    the squared error of each column for the rule "search".

    Raises `ShapeError`, `DtypeError`, and `NonFiniteError` with the first NaN or infinity as
    (row, column); the outputs are then undefined.
    """
    blocks = _source_blocks(source, dtype)
    rows, columns = source.shape
    codes = _output(codes, (rows, columns // 2), "codes", _BYTE)
    scales = _output(scales, (rows, columns // BLOCK_SIZE), "scales", _BYTE)
    weights = _importance(importance, columns, options)
    bad, found = block_codec().encode_blocks(
        blocks,
        dtype,
        options,
        codes.reshape(-1, BLOCK_BYTES),
        scales.reshape(-1),
        importance=weights,
        statistics=statistics,
    )
    if bad >= 0:
        raise NonFiniteError(index=_first_non_finite(blocks, dtype, bad, columns))
    return EncodedRows(codes, scales, found)


def decode_rows(
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    dtype: str = "BF16",
    *,
    nan_scale: NanScale = "raise",
    out: NDArray[np.generic] | None = None,
) -> NDArray[np.generic]:
    """Decode `codes` uint8 [N, K/2] and `scales` uint8 [N, K/32] to raw bits [N, K] of `dtype`.

    Returns uint16 for "BF16" and "F16", float32 for "F32". BF16 and F32 hold every element exactly;
    codes 4 to 7 of scale bytes 253 and 254 can be beyond their range and become infinite. F16 is
    rounded. `out` is filled and returned when given. Scale byte 255 raises `NonFiniteError` unless
    `nan_scale` is "nan".
    """
    if dtype not in SOURCE_WIDTH:
        raise DtypeError(f"cannot decode to {dtype!r}", hint=f"one of {', '.join(SOURCE_WIDTH)}")
    rows, columns = codes.shape[0], codes.shape[1] * 2
    if scales.shape != (rows, columns // BLOCK_SIZE) or columns % BLOCK_SIZE:
        raise ShapeError(f"codes {list(codes.shape)} and scales {list(scales.shape)} do not match")
    if nan_scale == "raise" and (scales == E8M0_NAN).any():
        raise _nan_scale_error(scales)
    bits = np.dtype(np.float32 if dtype == "F32" else np.uint16)
    result: NDArray[np.generic] = _output(out, (rows, columns), "out", bits)
    floats = np.empty((rows, columns), np.float32) if dtype == "F16" else result
    block_codec().decode_blocks(
        np.ascontiguousarray(codes).reshape(-1, BLOCK_BYTES),
        np.ascontiguousarray(scales).reshape(-1),
        floats.reshape(-1, BLOCK_SIZE),
        "BF16" if dtype == "BF16" else "F32",
    )
    if dtype == "F16":
        with np.errstate(over="ignore"):
            result.view(np.float16)[...] = floats
    return result


def _nan_scale_error(scales: NDArray[np.uint8]) -> NonFiniteError:
    index = tuple(int(i) for i in np.argwhere(scales == E8M0_NAN)[0])
    return NonFiniteError(
        f"scale byte 255 (NaN) at block {list(index)}",
        index=index,
        hint="the checkpoint is damaged or was written from NaN; nan_scale='nan' decodes it to NaN",
    )


def _source_blocks(source: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """`source` as [blocks, 32] after all checks."""
    width = SOURCE_WIDTH.get(dtype)
    if width is None:
        raise DtypeError(f"cannot encode {dtype!r}", hint=f"one of {', '.join(SOURCE_WIDTH)}")
    if source.dtype.itemsize != width or source.dtype.kind not in "uif":
        raise DtypeError(f"{dtype} needs {width} bytes a value, the array has {source.dtype}")
    if source.ndim != 2 or not source.flags.c_contiguous:
        raise ShapeError(f"rows must be contiguous [N, K], seen {list(source.shape)}")
    if source.shape[1] % BLOCK_SIZE:
        raise ShapeError(
            f"rows have {source.shape[1]:,} elements, not a multiple of {BLOCK_SIZE}",
            hint="keep this tensor in its source dtype or choose another axis",
        )
    if not source.flags.aligned:  # as in a file whose header has an odd length
        source = source.copy()
    return source.reshape(source.size // BLOCK_SIZE, BLOCK_SIZE)


def _output(
    given: NDArray[_Kind] | None, shape: tuple[int, int], name: str, dtype: np.dtype[_Kind]
) -> NDArray[_Kind]:
    if given is None:
        return np.empty(shape, dtype)
    if given.dtype != dtype or given.shape != shape or not given.flags.c_contiguous:
        raise ShapeError(
            f"{name} must be contiguous {dtype} {list(shape)}, "
            f"seen {given.dtype} {list(given.shape)}"
        )
    return given


def _importance(
    importance: NDArray[np.floating] | None,
    columns: int,
    options: CodecOptions,
) -> NDArray[np.float32] | None:
    """Weights as float32 [K/32, 32]."""
    if importance is None:
        return None
    if options.rule is not ScaleRule.SEARCH:
        raise RecipeError(
            f"importance weights do nothing under the rule {options.rule.value!r}",
            hint="use rule='search' or leave them out",
        )
    weights = np.ascontiguousarray(importance, np.float32)
    if weights.shape != (columns,):
        raise ShapeError(f"importance must be [{columns}], seen {list(weights.shape)}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise RecipeError("importance weights must be finite and not negative")
    return weights.reshape(-1, BLOCK_SIZE)


def _first_non_finite(
    blocks: NDArray[np.generic], dtype: str, block: int, columns: int
) -> tuple[int, int]:
    values = float_values(blocks[block], dtype)
    position = block * BLOCK_SIZE + int(np.argmin(np.isfinite(values)))
    return position // columns, position % columns
