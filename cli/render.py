"""What people see: sizes, tables, progress, and errors as a message and an exit code."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

import click

from mxfp4 import errors

EXIT_FAILED = 1
EXIT_DIFFERENT = 5
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.InterruptedConversionError, EXIT_INTERRUPTED),
    (errors.LockedError, 6),
    (errors.NoSpaceError, 7),
    (errors.OutputNotWritableError, EXIT_FAILED),
    (errors.OutputError, 2),
    (errors.RecipeError, 2),
    (errors.CheckpointError, 3),
    (errors.NonFiniteError, 3),
    (errors.ShapeError, 3),
    (errors.DtypeError, 3),
    (errors.Mxfp4Error, EXIT_FAILED),
)
"""Exit code of each error; the first row that fits counts."""

_PLAIN_SECONDS = 30.0
_ROWS_AT_A_TIME = 4096
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True)
class Voice:
    """How a command speaks: `--json`, `-q`, `-v`, `--debug`."""

    as_json: bool
    quiet: bool
    verbose: int
    debug: bool

    @property
    def silent(self) -> bool:
        """Whether people get nothing to read but errors."""
        return self.quiet or self.as_json

    def say(self, text: str) -> None:
        """A line for people on stdout; nothing when quiet or when stdout carries JSON."""
        if not self.silent:
            click.echo(text)


class Terminated(BaseException):
    """SIGTERM arrived; like KeyboardInterrupt, it unwinds and leaves a resumable state."""


def size(byte_count: float) -> str:
    """Bytes for people: 5.60 TB."""
    power = 0
    while byte_count >= 1000 and power < len(_UNITS) - 1:
        byte_count /= 1000
        power += 1
    return f"{byte_count:.0f} B" if power == 0 else f"{byte_count:.2f} {_UNITS[power]}"


def table(rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,)) -> str:
    """Aligned columns; those in `left` are flush left, all others flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    flush_left = set(left)
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in flush_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def emit_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def emit_object(
    before: Mapping[str, Any], name: str, rows: Iterable[str], after: Mapping[str, Any]
) -> None:
    """Like `emit_json`, for an object with one long list `name`, a part at a time.

    The keys of `before` and `after` stand around it; the first is not empty. `rows` are JSON.
    """
    encode = json.JSONEncoder(ensure_ascii=False).encode
    left = iter(rows)
    sys.stdout.write(f"{encode(before)[:-1]}, {encode(name)}: [")
    sys.stdout.write(", ".join(itertools.islice(left, _ROWS_AT_A_TIME)))
    while part := ", ".join(itertools.islice(left, _ROWS_AT_A_TIME)):
        sys.stdout.write(f", {part}")
    rest = f", {encode(after)[1:-1]}" if after else ""
    sys.stdout.write(f"]{rest}}}\n")
    sys.stdout.flush()


@contextmanager
def reported(voice: Voice) -> Iterator[None]:
    """Turn errors of the body into one message on stderr (or JSON on stdout) and an exit code."""
    try:
        yield
    except errors.Mxfp4Error as error:
        code = next(code for kind, code in EXIT_CODES if isinstance(error, kind))
        _report(error, str(error), code, voice)
        raise click.exceptions.Exit(code) from error
    except KeyboardInterrupt as error:
        _report(error, "interrupted; the same command continues", EXIT_INTERRUPTED, voice)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from error
    except Terminated as error:
        _report(error, "terminated; the same command continues", EXIT_TERMINATED, voice)
        raise click.exceptions.Exit(EXIT_TERMINATED) from error
    except BrokenPipeError:
        raise  # nobody reads on, as after `| head`; click ends without a word
    except OSError as error:
        _report(error, f"{error.filename or ''}: {error.strerror or error}", EXIT_FAILED, voice)
        raise click.exceptions.Exit(EXIT_FAILED) from error


def _report(error: BaseException, text: str, code: int, voice: Voice) -> None:
    if voice.debug:
        traceback.print_exception(error)
    if voice.as_json:
        facts = {name: getattr(error, name, "") for name in ("message", "hint", "file", "tensor")}
        facts["message"] = facts["message"] or text
        emit_json({"error": {"type": type(error).__name__, **facts, "exit_code": code}})
    click.echo(f"error: {text}", err=True)


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Let SIGTERM unwind the stack like Ctrl-C, so that half-written files are removed."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Meter:
    """Bytes done: a bar on a terminal, a plain line every half minute elsewhere, or silence."""

    def __init__(self, description: str, *, quiet: bool, stream: TextIO | None = None) -> None:
        self._description = description
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._guard = threading.Lock()
        self._bar: Any = None
        self._total = self._done = self._earlier = 0
        self._started = self._said = time.monotonic()

    def start(self, total: int, already: int = 0) -> None:
        """Begin with a total, of which some was done by an earlier run."""
        self._total, self._done, self._earlier = total, already, already
        self._started = self._said = time.monotonic()
        if self._quiet:
            return
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=already,
                desc=self._description,
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                file=self._stream,
            )
        elif already:
            self._line(f"{self._description}: continuing, {size(already)} were done before")

    def advance(self, count: int) -> None:
        """Add bytes; called from several threads."""
        with self._guard:
            self._done += count
            if self._bar is not None:
                self._bar.update(count)
            elif not self._quiet and time.monotonic() - self._said >= _PLAIN_SECONDS:
                self._said = time.monotonic()
                rate = (self._done - self._earlier) / (self._said - self._started)
                left = (self._total - self._done) / rate if rate else 0.0
                self._line(
                    f"{self._description}: {size(self._done)} of {size(self._total)}, "
                    f"{size(rate)}/s, {left:.0f} s left"
                )

    def close(self) -> None:
        """Stop showing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class EventLog:
    """JSON lines of what a run does, for `--log-json`; without a file it does nothing."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115
        self._guard = threading.Lock()

    def __call__(self, event: str, **facts: Any) -> None:
        """Append one event with the time in seconds since the epoch."""
        if self._file is not None:
            with self._guard:
                line = {"event": event, "ts": round(time.time(), 3), **facts}
                self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
