"""Ways to run units of work; all have one contract, so that results never depend on the choice.

An executor takes the units still to do and yields their records in any order. A unit may run more
than once (after a crash); its result is the same bytes every time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from mxfp4.converters.plan import OutputShard
from mxfp4.converters.state import ShardRecord
from mxfp4.converters.work import Work, convert_shard

Executor = Callable[[Sequence[OutputShard], Work, int], Iterator[ShardRecord]]


def run_inline(units: Sequence[OutputShard], work: Work, workers: int) -> Iterator[ShardRecord]:
    """One unit after the other in the calling thread."""
    for unit in units:
        yield convert_shard(unit, work)


def run_threads(units: Sequence[OutputShard], work: Work, workers: int) -> Iterator[ShardRecord]:
    """Several units at a time; reading, encoding, hashing and writing all release the GIL.

    While a finished unit waits until the disk has it, the next one begins. The first failure stops
    the others at their next slab, so that nothing half-written stays.
    """
    work = replace(work, turns=threading.Semaphore(workers))
    queue = iter(units)
    running: set[Future[ShardRecord]] = set()
    with ThreadPoolExecutor(workers + 1, thread_name_prefix="mxfp4") as pool:
        try:
            while True:
                while len(running) <= workers and (unit := next(queue, None)) is not None:
                    running.add(pool.submit(convert_shard, unit, work))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BaseException:
            work.stop.set()
            raise


EXECUTORS: Mapping[str, Executor] = {"inline": run_inline, "threads": run_threads}
"""Every executor by its command-line name."""


def choose(workers: int | None, unit_count: int) -> tuple[str, int]:
    """The executor and worker count for this machine when the user names none.

    A worker is two threads, so half as many workers as cores; one more, so that no core waits
    where one thread of a worker has less to do than the other.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(workers or (available or 1) // 2 + 1, max(unit_count, 1))
    return ("inline" if unit_count <= 1 else "threads"), count
