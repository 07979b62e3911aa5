"""Run an iterator in a background thread, a bounded number of items ahead of its consumer.

Reading and encoding on one side, hashing and writing on the other, keep two cores busy with one
shard. Neither side holds more than the agreed number of items.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _End:
    """The source is exhausted, or failed with an error that belongs to the consumer."""

    error: BaseException | None


class _Channel(Generic[Item]):
    """A bounded queue whose producer notices when nobody listens any more."""

    def __init__(self, depth: int) -> None:
        self._items: queue.Queue[Item | _End] = queue.Queue(depth)
        self.closed = threading.Event()

    def put(self, item: Item | _End) -> bool:
        """Hand over an item; false if the consumer is gone."""
        while not self.closed.is_set():
            try:
                self._items.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[Item]:
        while not isinstance(item := self._items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error


@contextmanager
def ahead(source: Iterator[Item], depth: int) -> Iterator[Iterator[Item]]:
    """Iterate `source` in a thread, at most `depth` finished items ahead.

    At any time `depth` items wait, one is being made and one is with the consumer. An exception of
    the source is raised in the consumer at its place; leaving the context ends the thread.
    """
    channel: _Channel[Item] = _Channel(depth)

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                if not channel.put(item):
                    return
        except BaseException as caught:  # re-raised where the items are consumed
            error = caught
        channel.put(_End(error))

    thread = threading.Thread(target=produce, name="mxfp4-ahead", daemon=True)
    thread.start()
    try:
        yield iter(channel)
    finally:
        channel.closed.set()
        thread.join()
