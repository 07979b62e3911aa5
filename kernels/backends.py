"""Which implementation of the codec works: choose one, force one, explain the choice.

All of them give the same bytes. The choice holds for the process, not for one thread, because
conversions hand their work to threads.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mxfp4.errors import BackendUnavailableError
from mxfp4.kernels import fallback, native
from mxfp4.spec import CodecOptions
from mxfp4.statistics import TensorStatistics

log = logging.getLogger(__name__)

AUTOMATIC = "auto"
REFERENCE = "reference"


class EncodeBlocks(Protocol):
    """`mxfp4.kernels.fallback.encode_blocks` and what works like it."""

    def __call__(  # noqa: D102
        self,
        source: NDArray[np.generic],
        dtype: str,
        options: CodecOptions,
        codes: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        *,
        importance: NDArray[np.float32] | None = None,
        statistics: bool = False,
    ) -> tuple[int, TensorStatistics | None]: ...


class DecodeBlocks(Protocol):
    """`mxfp4.kernels.fallback.decode_blocks` and what works like it."""

    def __call__(  # noqa: D102
        self,
        codes: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        out: NDArray[np.generic],
        dtype: str,
    ) -> None: ...


@dataclass(frozen=True)
class BlockCodec:
    """The two functions of one implementation."""

    name: str
    encode_blocks: EncodeBlocks
    decode_blocks: DecodeBlocks


@dataclass(frozen=True)
class Backend:
    """One line of `backends()`."""

    name: str
    available: bool
    chosen: bool
    explanation: str


def _c() -> BlockCodec:
    return _c_with(next(iter(native.load().sets)))


def _c_with(instruction_set: str) -> BlockCodec:
    native.load().instruction_set(instruction_set)
    return BlockCodec(
        f"c-{instruction_set}",
        partial(native.encode_blocks, instruction_set=instruction_set),
        partial(native.decode_blocks, instruction_set=instruction_set),
    )


def _numpy() -> BlockCodec:
    return BlockCodec("numpy", fallback.encode_blocks, fallback.decode_blocks)


def _reference() -> BlockCodec:
    from mxfp4.kernels import reference_codec  # imports torch

    return BlockCodec(REFERENCE, reference_codec.encode_blocks, reference_codec.decode_blocks)


_FINDERS: dict[str, tuple[Callable[[], BlockCodec], str]] = {
    "c": (_c, "compiled, fastest instruction set of this machine"),
    **{
        f"c-{name}": (partial(_c_with, name), f"compiled, {name} only")
        for name in ("avx512", "avx2", "sse2", "neon")
    },
    "numpy": (_numpy, "integer arithmetic in numpy, no compiler needed"),
    REFERENCE: (_reference, "torch, written to be read; defines every bit"),
}
"""How each implementation is found, best first, and what it is."""

_forced = AUTOMATIC


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one implementation inside a `with` block, in all threads; "auto" chooses again.

    Names: "c" (or one instruction set of it, such as "c-avx2"), "numpy", "reference". Raises
    `BackendUnavailableError` at once if it cannot run here.
    """
    global _forced
    if name != AUTOMATIC:
        _find(name)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def block_codec() -> BlockCodec:
    """The implementation in use."""
    return _automatic() if _forced == AUTOMATIC else _find(_forced)


def backends() -> tuple[Backend, ...]:
    """Every implementation: whether it can run here, whether it is in use, and why."""
    chosen = block_codec().name
    lines = []
    for name, (find, explanation) in _FINDERS.items():
        try:
            found = find()
        except (BackendUnavailableError, ImportError) as error:
            lines.append(Backend(name, False, False, str(error)))
        else:
            in_use = found.name == chosen and (name == chosen or name == "c")
            lines.append(Backend(name, True, in_use, explanation))
    return tuple(lines)


def _find(name: str) -> BlockCodec:
    if name not in _FINDERS:
        near = difflib.get_close_matches(name, _FINDERS, n=1, cutoff=0)
        raise BackendUnavailableError(
            f"there is no backend {name!r}",
            hint=f"did you mean {near[0]!r}? known: {', '.join(_FINDERS)}",
        )
    return _FINDERS[name][0]()


@cache
def _automatic() -> BlockCodec:
    """C where it was built, else numpy with one notice."""
    try:
        return _c()
    except BackendUnavailableError as error:
        log.warning("using the numpy codec, which is many times slower: %s", error)
        return _numpy()
