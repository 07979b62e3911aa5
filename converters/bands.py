"""Turn a module's task into bands: some rows at a time, ready to be written in any layout.

A band of codes goes to every layout that holds MXFP4; a band of values is what decoded layouts
write. Memory is a few bands, whatever the tensor's size; only a transposed stack holds the packed
codes of one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mxfp4.converters.formats import Payload
from mxfp4.converters.formats.decoded import FP8_BLOCK
from mxfp4.converters.fp8 import encode_fp8_blocks
from mxfp4.converters.header import StoredTensor
from mxfp4.converters.plan import Matrix, Task, Treatment, matrix_bytes
from mxfp4.converters.reader import Bits, MatrixView, ShardReader, SlabBuffer
from mxfp4.converters.sources import STORAGES, Part, Source
from mxfp4.converters.sources.types import Bytes, Rows
from mxfp4.errors import NonFiniteError
from mxfp4.kernels.rows import EncodedRows, TensorStatistics, decode_rows
from mxfp4.spec import BLOCK_SIZE, E8M0_NAN

_VALUE_BYTES = 4


class Quantizer(Protocol):
    """Encodes raw bits [n, K] of a safetensors dtype; pure, and safe to call from threads."""

    def __call__(self, source: Bits, dtype: str, /) -> EncodedRows:
        """Return codes uint8 [n, K/2], scales uint8 [n, K/32] and their statistics."""
        ...


@dataclass(frozen=True, slots=True)
class Band:
    """Some rows of a module: codes and scales, or the bytes of `values` (and their `scales`).

    `lossy_blocks` counts FP8 blocks whose values are not all what they were.
    """

    source_bytes: int
    codes: Bytes | None = None
    scales: Bytes | None = None
    values: Bytes | None = None
    statistics: TensorStatistics | None = None
    lossy_blocks: int = 0


class Readers(Protocol):
    """The open source shards of one unit."""

    slab_bytes: int

    def open(self, number: int) -> ShardReader:
        """The reader of a source shard."""
        ...

    def scratch(self) -> SlabBuffer:
        """Memory to read into for a moment."""
        ...

    def name(self, number: int) -> str:
        """The file name of a source shard."""
        ...


def bands_of(
    task: Task, readers: Readers, quantizer_of: Callable[[str], Quantizer], payload: Payload
) -> Iterator[Band]:
    """The bands of a module in the order of its rows.

    Raises `NonFiniteError` naming file, tensor and index.
    """
    if task.treatment is Treatment.DECODE:
        decode = _fp8_bands if payload is Payload.FP8 else _bf16_bands
        yield from _transposed(task, readers) if task.transposed else decode(task, readers)
    elif task.lanes == 1:
        for matrix in task.matrices:
            yield from matrix_bands(matrix, readers, quantizer_of(matrix.module))
    else:
        for first in range(0, len(task.matrices), task.lanes):
            lanes = task.matrices[first : first + task.lanes]
            yield from _alternating(lanes, readers, quantizer_of)


def matrix_bands(matrix: Matrix, readers: Readers, quantizer: Quantizer) -> Iterator[Band]:
    """Codes and scales of one matrix; packed sources pass through."""
    source = matrix.source
    if source.plain:
        reader = readers.open(source.parts[0].shard)
        return _encoded(reader, matrix, matrix.view, quantizer, readers)
    if STORAGES[source.storage].packed is not None:
        return _passed(matrix, readers)
    return _requantized(matrix, readers, quantizer)


def _encoded(
    reader: ShardReader,
    matrix: Matrix,
    view: MatrixView,
    quantizer: Quantizer,
    readers: Readers,
    scratch: SlabBuffer | None = None,
) -> Iterator[Band]:
    stored = matrix.source.parts[0].stored
    for slab in reader.slabs(stored, view, scratch):
        try:
            found = quantizer(slab.bits, stored.info.dtype)
        except NonFiniteError as error:
            row, column = error.index
            flat = slab.first_element + row * slab.bits.shape[1] + column
            raise _placed(error, divmod(flat, view.column_count), matrix, readers) from error
        yield Band(slab.bits.nbytes, found.codes, found.scales, statistics=found.statistics)


def _passed(matrix: Matrix, readers: Readers) -> Iterator[Band]:
    source = matrix.source
    for rows in row_bands(matrix, readers.slab_bytes * 2):
        codes, scales = packed_rows(matrix, readers, rows)
        yield Band(matrix_bytes(source, rows.count), codes, scales)


def packed_rows(matrix: Matrix, readers: Readers, rows: Rows) -> tuple[Bytes, Bytes]:
    """Codes and scales of rows of a packed source; a scale of NaN is refused."""
    packed = STORAGES[matrix.source.storage].packed
    assert packed is not None
    codes, scales = packed(matrix.source, _fetcher(readers), rows)
    if (scales == E8M0_NAN).any():
        row, block = (int(n) for n in np.argwhere(scales == E8M0_NAN)[0])
        error = NonFiniteError(f"scale byte {E8M0_NAN} (NaN)", index=(row, block * BLOCK_SIZE))
        index = (_row_in_matrix(matrix, rows, row), block * BLOCK_SIZE)
        raise _placed(error, index, matrix, readers, "a scale byte of 255 (NaN)")
    return codes, scales


def _requantized(matrix: Matrix, readers: Readers, quantizer: Quantizer) -> Iterator[Band]:
    source = matrix.source
    for rows in row_bands(matrix, readers.slab_bytes // _VALUE_BYTES):
        values = value_rows(matrix, readers, rows)
        try:
            found = quantizer(values.view(np.uint32), "F32")
        except NonFiniteError as error:
            row, column = error.index
            index = (_row_in_matrix(matrix, rows, row), column)
            raise _placed(error, index, matrix, readers) from error
        size = matrix_bytes(source, rows.count)
        yield Band(size, found.codes, found.scales, statistics=found.statistics)


def value_rows(matrix: Matrix, readers: Readers, rows: Rows) -> npt.NDArray[np.float32]:
    """The values of rows of any source that is not plain."""
    if STORAGES[matrix.source.storage].packed is not None:
        codes, scales = packed_rows(matrix, readers, rows)
        return decode_rows(codes, scales, "F32").astype(np.float32, copy=False)
    return STORAGES[matrix.source.storage].values(matrix.source, _fetcher(readers), rows)


def row_bands(matrix: Matrix, element_count: int, multiple: int = 1) -> Iterator[Rows]:
    """The rows of a matrix in runs of about `element_count` elements."""
    view = matrix.view
    step = view.row_stride // view.column_count if view.row_count > 1 else 1
    first = view.offset // view.column_count if view.column_count else 0
    count = max(element_count // max(view.column_count, 1) // multiple, 1) * multiple
    for start in range(0, view.row_count, count):
        yield Rows(first + start * step, min(count, view.row_count - start), step)


def _alternating(
    lanes: tuple[Matrix, ...], readers: Readers, quantizer_of: Callable[[str], Quantizer]
) -> Iterator[Band]:
    """Rows of several matrices in turn."""
    view = lanes[0].view
    quantizers = [quantizer_of(matrix.module) for matrix in lanes]
    count = max(readers.slab_bytes // (_VALUE_BYTES * view.column_count), 1)
    for start in range(0, view.row_count, count):
        rows = min(count, view.row_count - start)
        found = [
            _collect(_part(matrix, start, rows), readers, quantizer)
            for matrix, quantizer in zip(lanes, quantizers, strict=True)
        ]
        total = TensorStatistics()
        for band in found:
            total = total + band.statistics if band.statistics is not None else total
        yield Band(
            sum(band.source_bytes for band in found),
            _woven([band.codes for band in found], rows),
            _woven([band.scales for band in found], rows),
            statistics=total if any(band.statistics for band in found) else None,
        )


def _woven(arrays: list[Bytes | None], rows: int) -> Bytes:
    parts = [array.reshape(rows, -1) for array in arrays if array is not None]
    return np.stack(parts, axis=1).reshape(rows * len(parts), -1)


def _part(matrix: Matrix, start: int, rows: int) -> Matrix:
    view = matrix.view
    offset = view.offset + start * view.row_stride
    return matrix._replace(view=view._replace(row_count=rows, offset=offset))


def _collect(matrix: Matrix, readers: Readers, quantizer: Quantizer) -> Band:
    """All bands of a small matrix as one; plain sources are read into scratch memory."""
    source = matrix.source
    if source.plain:
        reader = readers.open(source.parts[0].shard)
        bands = list(_encoded(reader, matrix, matrix.view, quantizer, readers, readers.scratch()))
    else:
        bands = list(matrix_bands(matrix, readers, quantizer))
    total = TensorStatistics()
    for band in bands:
        total = total + band.statistics if band.statistics is not None else total
    return Band(
        sum(band.source_bytes for band in bands),
        np.concatenate([band.codes.reshape(-1) for band in bands if band.codes is not None]),
        np.concatenate([band.scales.reshape(-1) for band in bands if band.scales is not None]),
        statistics=total if any(band.statistics for band in bands) else None,
    )


def _bf16_bands(task: Task, readers: Readers) -> Iterator[Band]:
    for matrix in task.matrices:
        for rows in row_bands(matrix, readers.slab_bytes // _VALUE_BYTES):
            if STORAGES[matrix.source.storage].packed is not None:
                bits = decode_rows(*packed_rows(matrix, readers, rows), "BF16")
            else:
                bits = bf16_bits(value_rows(matrix, readers, rows))
            size = matrix_bytes(matrix.source, rows.count)
            yield Band(size, values=bits.reshape(-1).view(np.uint8))


def bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Nearest BF16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet = bits | np.uint32(0x400000)
    return (np.where(np.isnan(values), quiet, rounded) >> np.uint32(16)).astype(np.uint16)


def _fp8_bands(task: Task, readers: Readers) -> Iterator[Band]:
    for matrix in task.matrices:
        for rows in row_bands(matrix, readers.slab_bytes // _VALUE_BYTES, FP8_BLOCK):
            encoded = encode_fp8_blocks(value_rows(matrix, readers, rows))
            yield Band(
                matrix_bytes(matrix.source, rows.count),
                values=encoded.values,
                scales=encoded.scales.reshape(-1).view(np.uint8),
                lossy_blocks=encoded.lossy_blocks,
            )


def _transposed(task: Task, readers: Readers) -> Iterator[Band]:
    """[K, N] of every expert, from codes that are held packed."""
    for first in range(0, len(task.matrices), task.lanes):
        lanes = task.matrices[first : first + task.lanes]
        held = [_whole(matrix, readers) for matrix in lanes]
        rows = lanes[0].view.row_count
        codes = _woven([codes for codes, _ in held], rows)
        scales = _woven([scales for _, scales in held], rows)
        size = sum(matrix_bytes(m.source, m.view.row_count) for m in lanes)
        width = max(readers.slab_bytes // (2 * len(codes)) // BLOCK_SIZE, 1) * BLOCK_SIZE
        for start in range(0, codes.shape[1] * 2, width):
            end = min(start + width, codes.shape[1] * 2)
            part = np.ascontiguousarray(codes[:, start // 2 : end // 2])
            some = np.ascontiguousarray(scales[:, start // BLOCK_SIZE : end // BLOCK_SIZE])
            bits = np.ascontiguousarray(decode_rows(part, some, "BF16").T)
            yield Band(size if start == 0 else 0, values=bits.reshape(-1).view(np.uint8))


def _whole(matrix: Matrix, readers: Readers) -> tuple[Bytes, Bytes]:
    found = [packed_rows(matrix, readers, rows) for rows in row_bands(matrix, readers.slab_bytes)]
    return np.concatenate([c for c, _ in found]), np.concatenate([s for _, s in found])


def _fetcher(readers: Readers) -> Callable[[Part, int, Rows], Bytes]:
    def fetch(part: Part, row_bytes: int, rows: Rows) -> Bytes:
        stored: StoredTensor = part.stored
        reader = readers.open(part.shard)
        return reader.rows(stored, row_bytes, rows.first, rows.count, rows.step)

    return fetch


def _row_in_matrix(matrix: Matrix, rows: Rows, row: int) -> int:
    start = matrix.view.offset // matrix.view.column_count
    return (rows.first - start) // rows.step + row


def _placed(
    error: NonFiniteError,
    index: tuple[int, int],
    matrix: Matrix,
    readers: Readers,
    what: str = "",
) -> NonFiniteError:
    message = f"{what} at {list(index)}; MXFP4 has no meaning for it here" if what else ""
    return NonFiniteError(
        message,
        index=index,
        file=readers.name(matrix.source.parts[0].shard),
        tensor=_place(matrix.source, matrix.module),
        hint="repair the checkpoint, leave such tensors in their source dtype with "
        "--on-nonfinite keep, or name this one with --keep",
    )


def _place(source: Source, module: str) -> str:
    name = source.parts[0].info.name
    return name if name.startswith(module) else f"{name} (as {module})"
