"""A background iterator keeps order, keeps its bound, and never outlives its consumer."""

import threading
import time

import pytest

from mxfp4.converters.ahead import ahead


def test_items_come_in_order():
    with ahead(iter(range(1000)), 3) as items:
        assert list(items) == list(range(1000))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_more_than_depth_items_wait(depth):
    made: list[int] = []

    def source():
        for number in range(50):
            made.append(number)
            yield number

    with ahead(source(), depth) as items:
        for taken in items:
            time.sleep(0.001)
            # One is with the consumer, `depth` wait, one is being made.
            assert len(made) <= taken + 1 + depth + 1


def test_an_error_comes_at_its_place():
    def source():
        yield 1
        yield 2
        raise KeyError("three")

    with ahead(source(), 2) as items:
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(KeyError, match="three"):
            next(items)


def test_leaving_early_ends_the_thread():
    closed = threading.Event()

    def source():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    before = threading.active_count()
    generator = source()
    with ahead(generator, 2) as items:
        next(items)
    assert threading.active_count() == before
    generator.close()
    assert closed.is_set()
