"""Activations of all calibration tokens, in files rather than in memory."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from mxfp4.errors import ResumeError


class SpilledTensor:
    """A tensor in a file of its own, mapped into memory; pages that are not in use go to disk."""

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: torch.dtype, *, new: bool
    ) -> None:
        size = math.prod(shape) * dtype.itemsize
        if new:
            with open(path, "wb") as file:
                file.truncate(size)
        elif not path.is_file() or path.stat().st_size != size:
            raise ResumeError(
                "the activations of an interrupted calibration are missing or cut",
                file=str(path),
                hint="start again with --overwrite",
            )
        self.path = path
        flat = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype)
        self.tensor = flat.reshape(shape)

    def sync(self) -> None:
        """Make what was written durable."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def batches(sequence_count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` sequences."""
    for start in range(0, sequence_count, size):
        yield slice(start, min(start + size, sequence_count))


def batch_size(sequence_length: int, width: int, memory_bytes: int) -> int:
    """Sequences at a time so that a layer's temporaries take about a quarter of the memory.

    A decoder layer holds some thirty float32 values per token and hidden channel while it runs.
    """
    per_sequence = sequence_length * width * 4 * 30
    return max(memory_bytes // 4 // per_sequence, 1)


def release_memory() -> None:
    """Give what the layers behind us used back to the system.

    Tensors in reference cycles wait for the collector, and glibc keeps freed pieces between live
    ones; without this the resident size would follow the number of layers.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
