"""Find the tensors that cannot be quantized because they hold a NaN or an infinity.

Runs before the plan is final, and only on request: a tensor that stays in its source dtype changes
the header of its output shard, so this must be known before the first byte is written.
"""

from __future__ import annotations

import numpy as np

from mxfp4.converters.plan import Plan, PlannedTensor
from mxfp4.converters.reader import Bits, MatrixView, ShardReader, SlabBuffer

_EXPONENT_MASK = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


def find_nonfinite(plan: Plan, slab_bytes: int) -> dict[str, str]:
    """Read every tensor to quantize once; returns the reason to keep each that is not finite."""
    buffer = SlabBuffer(slab_bytes)
    found: dict[str, str] = {}
    for number, shard in enumerate(plan.checkpoint.shards):
        tensors = [tensor for tensor in plan.quantized if tensor.shard == number]
        if tensors:
            with ShardReader(shard, buffer) as reader:
                for tensor in tensors:
                    if reason := _reason(reader, tensor):
                        found[tensor.info.name] = reason
    return found


def is_nonfinite(bits: Bits, dtype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Elementwise: all exponent bits set, which in every IEEE layout means NaN or infinity."""
    mask = bits.dtype.type(_EXPONENT_MASK[dtype])
    return np.asarray((bits & mask) == mask)


def _reason(reader: ShardReader, tensor: PlannedTensor) -> str:
    view = MatrixView.plain(1, tensor.info.element_count)
    count, first = 0, -1
    for slab in reader.slabs(tensor.stored, view):
        bad = is_nonfinite(slab.bits, tensor.info.dtype).reshape(-1)
        here = int(np.count_nonzero(bad))
        if here and not count:
            first = slab.first_element + int(np.argmax(bad))
        count += here
    if not count:
        return ""
    index = [int(i) for i in np.unravel_index(first, tensor.info.shape)]
    return f"holds {count:,} NaN or infinite value(s), first at {index}"
