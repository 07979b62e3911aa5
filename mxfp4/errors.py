"""Every error of the library, in one tree under `Mxfp4Error`.

Each error keeps its facts as attributes, builds its message from them (what and where, what was
seen, how to go on) and survives pickling, because conversions run in worker processes.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailableError",
    "CheckpointError",
    "CorruptCheckpointError",
    "DtypeError",
    "InterruptedConversionError",
    "LockedError",
    "MissingConfigError",
    "MissingExtraError",
    "MissingShardError",
    "Mxfp4Error",
    "NoSpaceError",
    "NonFiniteError",
    "OutputError",
    "OutputExistsError",
    "OutputNotWritableError",
    "RecipeError",
    "ResumeError",
    "ShapeError",
    "SourceChangedError",
    "TensorNotFoundError",
    "UnsupportedFormatError",
]


class Mxfp4Error(Exception):
    """Base of all errors raised on purpose by this library.

    `message` says what is wrong and where; `hint` says how to go on; `file` and `tensor` name the
    place where they are known.
    """

    def __init__(self, message: str, *, hint: str = "", file: str = "", tensor: str = "") -> None:
        self.message = message
        self.hint = hint
        self.file = file
        self.tensor = tensor
        super().__init__(message)

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.file, self.tensor) if part)
        text = f"{place}: {self.message}" if place else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(kind: type[Mxfp4Error], message: str, facts: dict[str, object]) -> Mxfp4Error:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(facts)
    return error


class ShapeError(Mxfp4Error, ValueError):
    """A shape, an axis or a block multiple is wrong."""


class DtypeError(Mxfp4Error, TypeError):
    """A dtype that the operation does not take."""


class NonFiniteError(Mxfp4Error, ValueError):
    """NaN or infinity in values to quantize; `index` is the first, `count` how many if known."""

    def __init__(
        self,
        message: str = "",
        *,
        index: tuple[int, ...] = (),
        count: int | None = None,
        hint: str = "",
        file: str = "",
        tensor: str = "",
    ) -> None:
        self.index = index
        self.count = count
        if not message:
            found = "a NaN or an infinity" if count is None else f"{count:,} NaN or infinite values"
            message = f"{found}, first at index {list(index)}; MXFP4 elements cannot hold them"
        super().__init__(message, hint=hint, file=file, tensor=tensor)


class RecipeError(Mxfp4Error, ValueError):
    """What the user asked contradicts itself or matches nothing."""


class CheckpointError(Mxfp4Error):
    """A checkpoint on disk is not what it should be."""


class TensorNotFoundError(CheckpointError, LookupError):
    """A tensor that should be there is not."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """Headers, sizes and index do not agree."""


class MissingShardError(CheckpointError, FileNotFoundError):
    """The index names a shard that is not in the folder."""


class MissingConfigError(CheckpointError, FileNotFoundError):
    """There is no readable `config.json`."""


class UnsupportedFormatError(CheckpointError, ValueError):
    """The checkpoint is sound, but in a format this operation does not read or write."""


class SourceChangedError(CheckpointError, RuntimeError):
    """A source file is no longer the one that was planned."""


class OutputError(Mxfp4Error):
    """The output folder cannot be used as asked."""


class OutputExistsError(OutputError, FileExistsError):
    """The output folder already holds something that would be overwritten."""


class OutputNotWritableError(OutputError, PermissionError):
    """The output folder cannot be created or written."""


class ResumeError(OutputError, RuntimeError):
    """The output folder belongs to another plan."""


class LockedError(OutputError, RuntimeError):
    """Another process is working in the output folder."""


class NoSpaceError(OutputError, OSError):
    """The disk is too small for the output."""


class InterruptedConversionError(Mxfp4Error):
    """The conversion was stopped on request; the same command continues it."""


class MissingExtraError(Mxfp4Error, ImportError):
    """An optional dependency is missing; `extra` is the one that brings it."""

    def __init__(self, module: str, extra: str) -> None:
        self.module = module
        self.extra = extra
        super().__init__(
            f"this needs the package {module!r}, which is not installed",
            hint=f"pip install 'mxfp4[{extra}]'",
        )


class BackendUnavailableError(Mxfp4Error, RuntimeError):
    """The requested implementation cannot run on this machine."""
