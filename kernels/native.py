"""The compiled codec, loaded with ctypes, which releases the interpreter lock during every call.

The library has no Python in it: it takes pointers and holds one variant per instruction set. It is
built by `python -m mxfp4.kernels.build` or when the package is installed.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mxfp4.errors import BackendUnavailableError
from mxfp4.spec import BLOCK_SIZE, SCALE_BIAS, CodecOptions, ScaleRule, TieRule, ZeroSign
from mxfp4.statistics import TensorStatistics

LIBRARY = Path(__file__).with_name("_codec.dylib" if sys.platform == "darwin" else "_codec.so")

STATISTICS_BLOCKS = 1 << 26
"""Most blocks of one call that gathers statistics, so that its 64-bit sums cannot overflow."""

_SUMS = struct.Struct("=256q")
"""Makes a tuple of an array of `_Statistics`; iterating over it takes ten times as long."""

DTYPES = {"BF16": 0, "F16": 1, "F32": 2}
_TIES = {TieRule.EVEN: 0, TieRule.ZERO: 1, TieRule.AWAY: 2}
_ZERO_SIGNS = {
    ZeroSign.UNDERFLOW: 0,
    ZeroSign.SOURCE: 1,
    ZeroSign.DROP: 2,
    ZeroSign.SET: 3,
}


class _Options(ctypes.Structure):
    """`mx_options` of codec.h."""

    _fields_ = (
        ("bias", ctypes.c_int32),
        ("ties", ctypes.c_int32),
        ("zero_sign", ctypes.c_int32),
        ("search", ctypes.c_int32),
        ("importance", ctypes.c_void_p),
        ("period", ctypes.c_uint64),
    )


class _Statistics(ctypes.Structure):
    """`mx_statistics` of codec.h."""

    _fields_ = (
        ("zero_blocks", ctypes.c_int64),
        ("clipped", ctypes.c_int64),
        ("flushed", ctypes.c_int64),
        ("max_abs", ctypes.c_double),
        ("max_abs_error", ctypes.c_double),
        ("histogram", ctypes.c_int64 * 256),
        ("signal", ctypes.c_int64 * 256),
        ("error", ctypes.c_int64 * 256),
    )


@dataclass(frozen=True)
class Library:
    """The loaded library and the instruction sets that this machine can run, fastest first."""

    handle: ctypes.CDLL
    sets: dict[str, int]

    def instruction_set(self, name: str | None) -> int:
        """Number of the instruction set `name`, or of the fastest."""
        if name is None:
            return next(iter(self.sets.values()))
        if name not in self.sets:
            raise BackendUnavailableError(
                f"the C codec has no instruction set {name!r} on this machine",
                hint=f"one of {', '.join(self.sets)}",
            )
        return self.sets[name]


@cache
def load() -> Library:
    """Load the library once; `BackendUnavailableError` says why it cannot be."""
    try:
        handle = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise BackendUnavailableError(
            f"the C codec is not built or cannot be loaded: {error}",
            hint="run `python -m mxfp4.kernels.build` (needs cc, gcc or clang)",
        ) from None
    pointer, int32, uint64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64
    handle.mxfp4_set_name.argtypes = [int32]
    handle.mxfp4_set_name.restype = ctypes.c_char_p
    handle.mxfp4_set_supported.argtypes = [int32]
    handle.mxfp4_encode.argtypes = [int32, int32, *[pointer] * 3, uint64, pointer, pointer]
    handle.mxfp4_encode.restype = ctypes.c_int64
    handle.mxfp4_decode.argtypes = [int32, int32, *[pointer] * 3, uint64]
    handle.mxfp4_decode.restype = None
    sets = {
        handle.mxfp4_set_name(number).decode(): number
        for number in range(handle.mxfp4_set_count())
        if handle.mxfp4_set_supported(number)
    }
    return Library(handle, sets)


def encode_blocks(
    source: NDArray[np.generic],
    dtype: str,
    options: CodecOptions,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    *,
    importance: NDArray[np.float32] | None = None,
    statistics: bool = False,
    instruction_set: str | None = None,
) -> tuple[int, TensorStatistics | None]:
    """`mxfp4.kernels.fallback.encode_blocks` in C; all arrays must be C-contiguous."""
    library = load()
    assert all(array.flags.c_contiguous for array in (source, codes, scales))
    plan = _Options(
        bias=SCALE_BIAS[options.rule] >> 16,
        ties=_TIES[options.ties],
        zero_sign=_ZERO_SIGNS[options.zero_sign],
        search=options.rule is ScaleRule.SEARCH,
    )
    period = 1
    if importance is not None:
        plan.importance, plan.period = importance.ctypes.data, len(importance)
        period = len(importance)
    blocks = len(source)
    # Parts begin where the weights begin anew.
    step = max(STATISTICS_BLOCKS // period, 1) * period if statistics else max(blocks, 1)
    number = library.instruction_set(instruction_set)
    total: TensorStatistics | None = None
    for start in range(0, blocks, step):
        count = min(step, blocks - start)
        found = _Statistics() if statistics else None
        bad: int = library.handle.mxfp4_encode(
            number,
            DTYPES[dtype],
            source[start:].ctypes.data,
            codes[start:].ctypes.data,
            scales[start:].ctypes.data,
            count,
            ctypes.byref(plan),
            None if found is None else ctypes.byref(found),
        )
        if bad >= 0:
            return start + bad, None
        if found is not None:
            part = _statistics(found, count)
            total = part if total is None else total + part
    return -1, total or (TensorStatistics() if statistics else None)


def _statistics(found: _Statistics, blocks: int) -> TensorStatistics:
    return TensorStatistics(
        elements=blocks * BLOCK_SIZE,
        zero_blocks=found.zero_blocks,
        clipped=found.clipped,
        flushed=found.flushed,
        max_abs=found.max_abs,
        max_abs_error=found.max_abs_error,
        scale_histogram=_SUMS.unpack(found.histogram),
        signal=_SUMS.unpack(found.signal),
        error=_SUMS.unpack(found.error),
    )


def decode_blocks(
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    out: NDArray[np.generic],
    dtype: str,
    *,
    instruction_set: str | None = None,
) -> None:
    """`mxfp4.kernels.fallback.decode_blocks` in C; all arrays must be C-contiguous."""
    library = load()
    assert all(array.flags.c_contiguous for array in (codes, scales, out))
    library.handle.mxfp4_decode(
        library.instruction_set(instruction_set),
        DTYPES[dtype],
        codes.ctypes.data,
        scales.ctypes.data,
        out.ctypes.data,
        len(scales),
    )
