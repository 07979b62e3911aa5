"""The output folder as a resumable state: lock, plan, one record per finished shard.

Everything but the model's own files lives in `OUT/.mxfp4/`:

    plan.json          written once; another plan in the same folder is refused
    lock               held with fcntl while a process works here; the kernel frees it on any death
    tmp/               files in the making, swept by whoever holds the lock
    done/SHARD.json    the record of a finished shard, written after the shard is on the disk

The order data sync, rename, folder sync, record makes every moment a safe one to die in.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mxfp4.converters.plan import PLAN_FORMAT, Plan, first_difference
from mxfp4.converters.writer import sync_folder, write_atomically
from mxfp4.errors import (
    LockedError,
    OutputError,
    OutputExistsError,
    OutputNotWritableError,
    ResumeError,
)

STATE_FOLDER = ".mxfp4"

_HELD: set[Path] = set()
"""Folders locked by this process: POSIX locks do not exclude threads of one process."""
_HELD_GUARD = threading.Lock()


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What is known of a finished output shard."""

    plan: str
    shard: str
    byte_count: int
    sha256: str
    tensors: Mapping[str, str]
    """xxh3_128 of every tensor's bytes."""
    statistics: Mapping[str, Any]
    """Error statistics of every quantized module, and `""` for all of them together."""

    def to_json(self) -> dict[str, Any]:
        """As stored in `done/`."""
        return {
            "plan": self.plan,
            "shard": self.shard,
            "bytes": self.byte_count,
            "sha256": self.sha256,
            "tensors": dict(self.tensors),
            "statistics": dict(self.statistics),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ShardRecord:
        """The inverse of `to_json`."""
        return cls(
            value["plan"],
            value["shard"],
            value["bytes"],
            value["sha256"],
            value["tensors"],
            value["statistics"],
        )


class OutputFolder:
    """One output folder, locked while in use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / STATE_FOLDER
        self._lock_fd: int | None = None

    def __enter__(self) -> OutputFolder:
        try:
            for folder in (self.path, self.state, self.state / "tmp", self.state / "done"):
                folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except (FileExistsError, NotADirectoryError) as error:
            raise OutputError(
                "there is a file where the output folder should be",
                file=str(self.path),
                hint="choose another folder; nothing of yours is overwritten",
            ) from error
        except OSError as error:
            raise OutputNotWritableError(
                f"the output folder cannot be written ({error.strerror})",
                file=str(self.path),
                hint="check its permissions and whether the disk is mounted read-only",
            ) from error
        self._lock(fd)
        self._lock_fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()}\n".encode(), 0)
        self._sweep()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
            with _HELD_GUARD:
                _HELD.discard(self.path.resolve())

    def is_locked(self) -> bool:
        """Whether a process holds the lock now; takes nothing itself."""
        if self.path.resolve() in _HELD:
            return True
        try:
            fd = os.open(self.state / "lock", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def temporary(self, name: str) -> Path:
        """A fresh path for a file in the making, on the same file system as the output."""
        return self.state / "tmp" / f"{Path(name).name}.part-{uuid.uuid4().hex[:12]}"

    def stored_plan(self) -> dict[str, Any] | None:
        """The plan document of this folder, or None."""
        return _read_state(self.state / "plan.json")

    def adopt(self, plan: Plan, owned: Iterable[str], *, overwrite: bool) -> None:
        """Make this folder belong to a plan: start it, or continue the same one.

        `owned` are the names, relative to the folder, that the conversion will write. Raises
        `OutputExistsError` or `ResumeError`; with `overwrite` an earlier output of this tool is
        removed first, file by file as its own plan lists them, and nothing else is touched.
        """
        names = sorted(set(owned))
        old = self.stored_plan()
        document = {**plan.document(), "owned": names}
        if old is not None and old.get("id") == plan.id:
            return
        if old is not None:
            if not overwrite:
                difference = first_difference(old, document) or "the plans differ"
                raise ResumeError(
                    f"this folder belongs to another plan: {difference}",
                    file=str(self.path),
                    hint="use another folder, repeat the earlier options to continue, or pass "
                    "--overwrite to start anew",
                )
            self._remove_earlier_output(old)
        self._require_free(names, overwrite=overwrite)
        self.write_state("plan.json", document)

    def write_state(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file into the state folder atomically."""
        data = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
        write_atomically(self.state / name, data, self.temporary(name))

    def write_file(self, name: str, data: bytes) -> None:
        """Write a small output file atomically; folders in its name are created."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data, self.temporary(name))

    def save_record(self, record: ShardRecord) -> None:
        """Note that a shard is finished; called after its rename is durable."""
        self.write_state(f"done/{record.shard}.json", record.to_json())

    def finished(self, plan_id: str, shard: str) -> ShardRecord | None:
        """The record of a shard if it is finished under this plan and its file has its size."""
        value = _read_state(self.state / "done" / f"{shard}.json")
        if value is None or value.get("plan") != plan_id:
            return None
        try:
            size = (self.path / shard).stat().st_size
        except FileNotFoundError:
            return None
        return ShardRecord.from_json(value) if size == value["bytes"] else None

    def _lock(self, fd: int) -> None:
        """Take the lock on an open file, or close it and raise `LockedError`."""
        with _HELD_GUARD:
            try:
                if self.path.resolve() in _HELD:
                    raise BlockingIOError(errno.EAGAIN, "held by this process")
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
                # Closing would release a lock that this very process holds on the same file.
                if self.path.resolve() not in _HELD:
                    os.close(fd)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise LockedError(
                    f"another process ({holder or 'unknown'}) is converting into this folder",
                    file=str(self.path),
                    hint="wait for it or stop it; the lock ends with that process",
                ) from error
            _HELD.add(self.path.resolve())

    def _sweep(self) -> None:
        """Remove what a dead process left in the making; only the lock holder may."""
        for path in (self.state / "tmp").iterdir():
            path.unlink()

    def _require_free(self, names: Iterable[str], *, overwrite: bool) -> None:
        present = sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))
        if present and not overwrite:
            raise OutputExistsError(
                f"the output folder is not empty: it holds {present[0]}",
                file=str(self.path),
                hint="use an empty folder; --overwrite replaces an earlier output of this tool "
                "and leaves all other files alone",
            )
        taken = [name for name in names if (self.path / name).exists()]
        foreign = taken or [name for name in present if name.endswith(".safetensors")]
        if foreign:
            raise OutputExistsError(
                f"{foreign[0]} was not written by this tool and would be "
                f"{'overwritten' if taken else 'taken for a shard of the output'}",
                file=str(self.path),
                hint="move it away or use another folder; nothing of yours is ever deleted",
            )

    def _remove_earlier_output(self, old: Mapping[str, Any]) -> None:
        owned = old.get("owned")
        if old.get("format") != PLAN_FORMAT or not _are_inside(owned):
            raise ResumeError(
                "the plan of this folder was written by another version of this tool",
                file=str(self.path),
                hint="use another folder",
            )
        for name in sorted(owned, key=lambda name: not name.endswith(".index.json")):
            (self.path / name).unlink(missing_ok=True)
        for record in (self.state / "done").iterdir():
            record.unlink()
        (self.state / "plan.json").unlink()
        sync_folder(self.path)


def _are_inside(names: Any) -> TypeGuard[list[str]]:
    """Whether a stored list holds nothing but paths below the folder."""
    return isinstance(names, list) and all(
        isinstance(name, str) and not name.startswith("/") and ".." not in name.split("/")
        for name in names
    )


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ResumeError(
            f"this state file is damaged ({error})",
            file=str(path),
            hint="start again in another folder, or move this one away",
        ) from error
    if not isinstance(value, dict):
        raise ResumeError("this state file is damaged", file=str(path), hint="use another folder")
    return value
