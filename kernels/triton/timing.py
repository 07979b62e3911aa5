"""Measure launches on a device: graph replays over copies of the data that do not fit its cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CACHE_MULTIPLE = 4
"""Copies of the operands together are this many times as large as the L2 cache."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, least and most of the repetitions."""

    median_us: float
    least_us: float
    most_us: float


def copies_needed(byte_count: int, device: torch.device) -> int:
    """Copies of `byte_count` bytes to rotate through so that none is found in the cache."""
    if device.type != "cuda":
        return 1
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(64, -(-CACHE_MULTIPLE * cache // max(byte_count, 1))))


def measure(
    calls: Sequence[Callable[[], object]], *, repetitions: int, device: torch.device
) -> Timing:
    """Time of one of `calls`, which do the same on different copies; run in turns.

    On a GPU all of them are captured in one graph, which is replayed; elsewhere they are called,
    which only rehearses the measurement.
    """
    if device.type != "cuda":
        return _rehearse(calls)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The operands may still be being made.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        samples = []
        for _ in range(repetitions):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return Timing(statistics.median(samples), min(samples), max(samples))


def _rehearse(calls: Sequence[Callable[[], object]]) -> Timing:
    start = time.perf_counter()
    for call in calls:
        call()
    spent = (time.perf_counter() - start) * 1e6 / len(calls)
    return Timing(spent, spent, spent)
