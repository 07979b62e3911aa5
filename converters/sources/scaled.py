"""Values times scales: FP8, INT4 and NVFP4 as float32, computed as `element * scale`.

One scale stands for a block of rows and columns; edges may be partial. The product is rounded once
to float32 (NVFP4: the scale of a block is first combined with the scale of the tensor, as its
own library does).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mxfp4.converters.header import DTYPE_BITS
from mxfp4.converters.sources.types import Bytes, Fetch, Floats, Part, Rows, Source, Storage
from mxfp4.spec import E2M1_VALUES, E8M0_BIAS, E8M0_NAN


def _e4m3_table() -> Floats:
    """Value of every E4M3 byte: bias 7, subnormals at exponent 0, NaN at 0x7F, no infinity."""
    bytes_ = np.arange(256)
    exponent, mantissa = (bytes_ >> 3) & 15, bytes_ & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values = np.where(bytes_ & 0x7F == 0x7F, np.nan, values)
    return np.where(bytes_ & 0x80, -values, values).astype(np.float32)


def _e5m2_table() -> Floats:
    """E5M2 is the upper half of a float16."""
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def _e8m0_table() -> Floats:
    """2^(b - 127); byte 255 is NaN."""
    exponents = np.arange(E8M0_NAN) - E8M0_BIAS
    return np.append(np.ldexp(1.0, exponents), np.nan).astype(np.float32)


E4M3_VALUES = _e4m3_table()
_E2M1 = np.concatenate([np.array(E2M1_VALUES), -np.array(E2M1_VALUES)]).astype(np.float32)
_BYTE_VALUES = {"F8_E4M3": E4M3_VALUES, "F8_E5M2": _e5m2_table()}
_E8M0_VALUES = _e8m0_table()
_INT4_ZERO = 8
"""compressed-tensors stores a signed four-bit integer plus eight."""


def float_bits(raw: Bytes, dtype: str) -> Floats:
    """Float32 values of raw bytes [n, m] of a scale dtype; U8 is an E8M0 byte."""
    if dtype in ("U8", "F8_E8M0"):
        return _E8M0_VALUES[raw]
    if dtype in _BYTE_VALUES:
        return _BYTE_VALUES[dtype][raw]
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    values: Floats = raw.view(np.float32)
    return values


SCALE_DTYPES = frozenset({"U8", "F8_E8M0", "F8_E4M3", "BF16", "F16", "F32"})


def _scale_grid(source: Source, part: Part) -> tuple[int, int]:
    """(rows of scales per matrix, scales per row)."""
    rows, columns = source.info.shape[-2:]
    return -(-rows // source.block[0]), -(-columns // source.block[1])


def block_scales(source: Source, fetch: Fetch, rows: Rows) -> Floats:
    """The scales of some rows, float32 [count, scales per row]."""
    part = source.parts[1]
    grid_rows, grid_columns = _scale_grid(source, part)
    length = source.info.shape[-2]
    index = rows.indices()
    wanted = index // length * grid_rows + index % length // source.block[0]
    low, high = (int(wanted[0]), int(wanted[-1]) + 1) if rows.count else (0, 0)
    row_bytes = grid_columns * DTYPE_BITS[part.info.dtype] // 8
    raw = fetch(part, row_bytes, Rows(low, high - low))
    scales: Floats = float_bits(raw, part.info.dtype)[wanted - low]
    return scales


def _scaled(elements: Floats, scales: Floats, block_columns: int) -> Floats:
    columns = elements.shape[1]
    if columns % block_columns == 0:
        blocks = elements.reshape(len(elements), -1, block_columns)
        blocks *= scales[:, :, None]
        return elements
    elements *= np.repeat(scales, block_columns, axis=1)[:, :columns]
    return elements


Elements = Callable[[Source, Fetch, Rows], npt.NDArray[np.float32]]


def fp8_elements(source: Source, fetch: Fetch, rows: Rows) -> Floats:
    """Unscaled FP8 values."""
    part = source.parts[0]
    return _BYTE_VALUES[part.info.dtype][fetch(part, source.info.shape[-1], rows)]


def int4_elements(source: Source, fetch: Fetch, rows: Rows) -> Floats:
    """Signed integers from eight codes a word, the first in the lowest bits."""
    raw = fetch(source.parts[0], source.info.shape[-1] // 2, rows)
    return _nibbles(raw).astype(np.float32) - np.float32(_INT4_ZERO)


def e2m1_elements(source: Source, fetch: Fetch, rows: Rows) -> Floats:
    """Unscaled E2M1 values."""
    raw = fetch(source.parts[0], source.info.shape[-1] // 2, rows)
    return _E2M1[_nibbles(raw)]


def _nibbles(raw: Bytes) -> Bytes:
    codes = np.empty((raw.shape[0], raw.shape[1] * 2), np.uint8)
    codes[:, 0::2] = raw & 15
    codes[:, 1::2] = raw >> 4
    return codes


def _values_of(elements: Elements) -> Callable[[Source, Fetch, Rows], Floats]:
    def values(source: Source, fetch: Fetch, rows: Rows) -> Floats:
        scales = block_scales(source, fetch, rows)
        with np.errstate(over="ignore", invalid="ignore"):
            return _scaled(elements(source, fetch, rows), scales, source.block[1])

    return values


def _nvfp4_values(source: Source, fetch: Fetch, rows: Rows) -> Floats:
    scales = block_scales(source, fetch, rows)
    part = source.parts[2]
    total = part.info.element_count
    every = float_bits(fetch(part, 4 * total, Rows(0, 1)), "F32")[0]
    matrix = rows.indices() // source.info.shape[-2] if total > 1 else np.zeros(rows.count, int)
    overall = every[matrix][:, None]
    inverse = part.info.name.endswith("weight_global_scale")
    combined = scales / overall if inverse else scales * overall
    return _scaled(e2m1_elements(source, fetch, rows), combined, source.block[1])


FP8_STORAGE = Storage("FP8", _values_of(fp8_elements))
INT4_STORAGE = Storage("INT4", _values_of(int4_elements))
NVFP4_STORAGE = Storage("NVFP4", _nvfp4_values)
