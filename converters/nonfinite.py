"""Find the tensors that cannot be quantized because they hold a NaN or an infinity.

Runs before the plan is final, and only on request: a tensor that stays in its source dtype changes
the header of its output shard, so this must be known before the first byte is written.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from mxfp4.converters.plan import Plan, PlannedTensor
from mxfp4.converters.reader import Bits, MatrixView, ShardReader, SlabBuffer
from mxfp4.converters.sources import STORAGES, Part
from mxfp4.converters.sources.types import Bytes, Rows

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
                    reason = (
                        _reason(reader, tensor)
                        if tensor.source.plain
                        else _decoded_reason(plan, tensor, slab_bytes)
                    )
                    if reason:
                        found[tensor.info.name] = reason
    return found


def _decoded_reason(plan: Plan, tensor: PlannedTensor, slab_bytes: int) -> str:
    """The same for a source whose values are products with scales of other shards."""
    source = tensor.source
    buffer = SlabBuffer(1)
    with ExitStack() as stack:
        readers = {
            part.shard: stack.enter_context(ShardReader(plan.checkpoint.shards[part.shard], buffer))
            for part in source.parts
        }

        def fetch(part: Part, row_bytes: int, rows: Rows) -> Bytes:
            reader = readers[part.shard]
            return reader.rows(part.stored, row_bytes, rows.first, rows.count, rows.step)

        columns = source.info.shape[-1]
        total = source.info.element_count // columns
        step = max(slab_bytes // (4 * columns), 1)
        count, first = 0, -1
        for start in range(0, total, step):
            rows = Rows(start, min(step, total - start))
            bad = ~np.isfinite(STORAGES[source.storage].values(source, fetch, rows))
            here = int(np.count_nonzero(bad))
            if here and not count:
                first = start * columns + int(np.argmax(bad))
            count += here
    return _sentence(count, first, source.info.shape)


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
    return _sentence(count, first, tensor.info.shape)


def _sentence(count: int, first: int, shape: tuple[int, ...]) -> str:
    if not count:
        return ""
    index = [int(i) for i in np.unravel_index(first, shape)]
    return f"holds {count:,} NaN or infinite value(s), first at {index}"
