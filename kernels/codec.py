"""Quantize and dequantize tensors with the fastest implementation; the bytes are the reference's.

Tensors on a CPU go through the row codec as arrays, in place and without copies where they are
contiguous. Tensors elsewhere go through the Triton kernels, or where those cannot work (see
`device_codec`) through the reference in chunks, which bounds its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from mxfp4 import codec as reference
from mxfp4.elements import pack_codes, unpack_codes
from mxfp4.errors import NonFiniteError
from mxfp4.kernels.backends import REFERENCE, block_codec
from mxfp4.kernels.device_codec import TRITON, device_codec
from mxfp4.kernels.rows import decode_rows, encode_rows
from mxfp4.spec import BLOCK_SIZE, E8M0_NAN, CodecOptions, ScaleRule, TieRule, ZeroSign
from mxfp4.statistics import TensorStatistics
from mxfp4.tensor import MXTensor, block_axis

_Result = TypeVar("_Result")

ROW_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

PARALLEL_ELEMENTS = 1 << 22
"""Tensors are shared among threads in parts of at least this many elements."""

DEVICE_ELEMENTS = 1 << 24
"""Elements that torch handles at a time on other devices; it needs some 60 bytes for each."""


def quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    rule: str = ScaleRule.EVEN,
    ties: str = TieRule.EVEN,
    zero_sign: str = ZeroSign.UNDERFLOW,
    importance: torch.Tensor | None = None,
) -> MXTensor:
    """Quantize `x` (bfloat16, float16 or float32, any shape) in blocks of 32 along `axis`.

    See `mxfp4.spec` for the choices of `rule`, `ties` and `zero_sign`. `importance` (float, [K])
    weighs the squared error of each position along `axis`; only the rule "search" takes it. Uses up
    to `torch.get_num_threads()` threads. Raises `ShapeError`, `DtypeError`, `RecipeError` for an
    unknown choice, and `NonFiniteError` with the first NaN or infinity.
    """
    options = CodecOptions.named(rule=rule, ties=ties, zero_sign=zero_sign)
    return _quantize(x, axis, options, importance, statistics=False)[0]


def quantize_with_statistics(
    x: torch.Tensor,
    *,
    axis: int = -1,
    rule: str = ScaleRule.EVEN,
    ties: str = TieRule.EVEN,
    zero_sign: str = ZeroSign.UNDERFLOW,
    importance: torch.Tensor | None = None,
) -> tuple[MXTensor, TensorStatistics]:
    """`quantize`, together with what it lost, from the same pass."""
    options = CodecOptions.named(rule=rule, ties=ties, zero_sign=zero_sign)
    return _quantize(x, axis, options, importance, statistics=True)


def dequantize(
    t: MXTensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    nan_scale: Literal["raise", "nan"] = "raise",
) -> torch.Tensor:
    """The values of `t` in its logical shape, as bfloat16, float16 or float32.

    bfloat16 and float32 hold every element exactly, except that codes 4 to 7 under scale bytes 253
    and 254 (which this library never writes) can be beyond their range and become infinite;
    float16 is rounded. Scale byte 255 raises `NonFiniteError` unless `nan_scale` is "nan", which
    makes all elements of its block NaN.
    """
    reference.check_dtype(dtype)
    if t.device.type != "cpu":
        return _decode_on_device(t, dtype, nan_scale)
    if block_codec().name == REFERENCE:
        return reference.dequantize(t, dtype=dtype, nan_scale=nan_scale)
    if nan_scale == "raise":
        reference.check_scales(t.scales)
    columns = t.shape[t.axis]
    rows = t.numel() // columns if columns else 0
    name = ROW_DTYPES[dtype]
    out = torch.empty(rows, columns, dtype=dtype)
    codes, scales = _array(t.codes, rows), _array(t.scales, rows)
    target = _bits(out)

    def decode(part: slice) -> None:
        decode_rows(codes[part], scales[part], name, nan_scale="nan", out=target[part])

    _in_parts(decode, rows, columns)
    shape = [length for i, length in enumerate(t.shape) if i != t.axis]
    return out.view(*shape, columns).movedim(-1, t.axis)


def _quantize(
    x: torch.Tensor,
    axis: int,
    options: CodecOptions,
    importance: torch.Tensor | None,
    statistics: bool,
) -> tuple[MXTensor, TensorStatistics]:
    """Codes, scales and (empty unless asked for) statistics."""
    axis = block_axis(tuple(x.shape), axis)
    reference.check_dtype(x.dtype)
    columns = x.shape[axis]
    if importance is not None:
        reference.check_importance(importance, columns, options)
    moved = x.detach().movedim(axis, -1).contiguous()
    rows = moved.reshape(math.prod(moved.shape[:-1]), columns)
    encode = _encode_array if x.device.type == "cpu" else _encode_on_device
    try:
        codes, scales, found = encode(rows, options, importance, statistics)
    except NonFiniteError:
        reference.check_finite(x)  # raises with the index in x instead of that in its rows
        raise
    shape = moved.shape[:-1]
    codes, scales = codes.view(*shape, codes.shape[-1]), scales.view(*shape, scales.shape[-1])
    return MXTensor(codes, scales, tuple(x.shape), axis), found


def _encode_array(
    rows: torch.Tensor,
    options: CodecOptions,
    importance: torch.Tensor | None,
    statistics: bool,
) -> tuple[torch.Tensor, torch.Tensor, TensorStatistics]:
    """Codes, scales and statistics of [N, K] on the CPU."""
    count, columns = rows.shape
    codes = torch.empty(count, columns // 2, dtype=torch.uint8)
    scales = torch.empty(count, columns // BLOCK_SIZE, dtype=torch.uint8)
    name = ROW_DTYPES[rows.dtype]
    source = _bits(rows)
    code_array, scale_array = codes.numpy(), scales.numpy()
    weights = None if importance is None else importance.detach().float().cpu().numpy()

    def encode(part: slice) -> TensorStatistics:
        done = encode_rows(
            source[part],
            name,
            options,
            codes=code_array[part],
            scales=scale_array[part],
            statistics=statistics,
            importance=weights,
        )
        return done.statistics or TensorStatistics()

    return codes, scales, sum(_in_parts(encode, count, columns), TensorStatistics())


def _encode_on_device(
    rows: torch.Tensor,
    options: CodecOptions,
    importance: torch.Tensor | None,
    statistics: bool,
) -> tuple[torch.Tensor, torch.Tensor, TensorStatistics]:
    """Codes, scales and statistics of [N, K] on its own device."""
    if device_codec(rows.device, weighted=importance is not None).name == TRITON:
        return _encode_by_kernel(rows, options, statistics)
    return _encode_in_chunks(rows, options, importance, statistics)


def _encode_by_kernel(
    rows: torch.Tensor, options: CodecOptions, statistics: bool
) -> tuple[torch.Tensor, torch.Tensor, TensorStatistics]:
    """The same by the Triton kernels; they mark what is not finite, and torch measures."""
    from mxfp4.kernels.triton import codec as kernels

    codes, scales = kernels.encode(rows, options)
    if bool((scales == E8M0_NAN).any()):
        reference.check_finite(rows)
    total = TensorStatistics()
    if statistics:
        count, columns = rows.shape
        for part in _parts(count, max(1, DEVICE_ELEMENTS // max(columns, 1))):
            blocks = rows[part].float().reshape(-1, columns // BLOCK_SIZE, BLOCK_SIZE)
            found = unpack_codes(codes[part]).reshape(blocks.shape)
            total += reference.measure(blocks, found, scales[part].int())
    return codes, scales, total


def _encode_in_chunks(
    rows: torch.Tensor,
    options: CodecOptions,
    importance: torch.Tensor | None,
    statistics: bool,
) -> tuple[torch.Tensor, torch.Tensor, TensorStatistics]:
    """The same by the reference."""
    count, columns = rows.shape
    codes = rows.new_empty(count, columns // 2, dtype=torch.uint8)
    scales = rows.new_empty(count, columns // BLOCK_SIZE, dtype=torch.uint8)
    weights = None
    if importance is not None:
        weights = importance.detach().float().to(rows.device).reshape(-1, BLOCK_SIZE)
    total = TensorStatistics()
    for part in _parts(count, max(1, DEVICE_ELEMENTS // max(columns, 1))):
        reference.check_finite(rows[part])
        blocks = rows[part].float().reshape(-1, columns // BLOCK_SIZE, BLOCK_SIZE)
        found, byte = reference.encode_blocks(blocks, options, weights)
        codes[part] = pack_codes(found.flatten(-2))
        scales[part] = byte.to(torch.uint8)
        if statistics:
            total += reference.measure(blocks, found, byte)
    return codes, scales, total


def _decode_on_device(
    t: MXTensor, dtype: torch.dtype, nan_scale: Literal["raise", "nan"]
) -> torch.Tensor:
    """`dequantize` on the device of `t`."""
    if device_codec(t.device).name != TRITON:
        return reference.dequantize(t, dtype=dtype, nan_scale=nan_scale)
    from mxfp4.kernels.triton import codec as kernels

    if nan_scale == "raise":
        reference.check_scales(t.scales)
    return kernels.decode(t.codes, t.scales, dtype).movedim(-1, t.axis)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _in_parts(work: Callable[[slice], _Result], rows: int, columns: int) -> list[_Result]:
    """`work` on parts of the rows, in threads if there is enough for more than one."""
    threads = min(torch.get_num_threads(), rows * columns // PARALLEL_ELEMENTS)
    if threads <= 1:
        return [work(slice(0, rows))]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, _parts(rows, -(-rows // threads))))


def _array(part: torch.Tensor, rows: int) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = part.detach().contiguous().view(rows, part.shape[-1]).numpy()
    return array


def _bits(rows: torch.Tensor) -> NDArray[np.generic]:
    """The memory of a tensor as uint16 or float32."""
    if rows.dtype == torch.float32:
        return rows.numpy()
    return rows.view(torch.int16).numpy().view(np.uint16)
