"""Write one output shard: header first, data streamed, then made durable in one rename.

Sizes are known from the plan, so the header can be written before the first weight is read, and
the disk can be reserved at once. The file grows under a temporary name in the state folder and
gets its real name only when it is complete and on the disk; a reader never sees half a shard.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from mxfp4.converters.header import TensorInfo, build_header
from mxfp4.errors import NoSpaceError

SHARD_METADATA: Mapping[str, str] = {"format": "pt"}
"""Older transformers releases refuse a file without it."""

_WRITE_BACK_BYTES = 32 << 20

Buffer = bytes | bytearray | memoryview


class ShardWriter:
    """Streams the tensors of one shard in the order they were announced.

    `write` takes the bytes of the current tensor; `commit` checks that every announced byte came,
    syncs, renames and returns the SHA-256 of the file. Leaving the context without a commit
    removes the temporary file.
    """

    def __init__(
        self,
        final: Path,
        tensors: Sequence[TensorInfo],
        temporary: Path,
        metadata: Mapping[str, str] = SHARD_METADATA,
    ) -> None:
        header = build_header(tensors, metadata)
        self._final = final
        self._temporary = temporary
        self._size = len(header) + sum(tensor.byte_count for tensor in tensors)
        self._position = 0
        self._synced = 0
        self._file_hash = hashlib.sha256()
        self._tensor_hash = xxhash.xxh3_128()
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._open = True
        try:
            reserve(self._fd, self._size, final.name)
            self._put(header)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._discard()

    def write(self, data: Buffer) -> None:
        """Append bytes of the current tensor."""
        self._tensor_hash.update(data)
        self._put(data)

    def end_tensor(self) -> str:
        """Finish the current tensor and return its xxh3_128 (hexadecimal)."""
        digest = self._tensor_hash.hexdigest()
        self._tensor_hash.reset()
        return digest

    def commit(self) -> str:
        """Make the shard durable under its final name; returns the SHA-256 of the file."""
        if self._position != self._size:
            raise AssertionError(f"{self._position} of {self._size} announced bytes were written")
        os.fsync(self._fd)
        self._open = False
        os.close(self._fd)
        os.replace(self._temporary, self._final)
        sync_folder(self._final.parent)
        return self._file_hash.hexdigest()

    @property
    def size(self) -> int:
        """Bytes of the whole file, header included."""
        return self._size

    def _put(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._file_hash.update(view)
        while view:
            try:
                count = os.pwrite(self._fd, view, self._position)
            except OSError as error:
                raise no_space(self._final.name, self._size, error) from error
            self._position += count
            view = view[count:]
        if self._position - self._synced >= _WRITE_BACK_BYTES:
            self._start_write_back()

    def _start_write_back(self) -> None:
        # Linux begins to write dirty pages when told that they are not needed; without this
        # gigabytes of them would pile up until the final fsync.
        if hasattr(os, "posix_fadvise"):
            length = self._position - self._synced
            os.posix_fadvise(self._fd, self._synced, length, os.POSIX_FADV_DONTNEED)
        self._synced = self._position

    def _discard(self) -> None:
        self._open = False
        os.close(self._fd)
        os.unlink(self._temporary)


def reserve(fd: int, size: int, name: str) -> None:
    """Claim disk blocks now, so that a full disk is an error before hours of work, not after."""
    if not hasattr(os, "posix_fallocate") or size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise no_space(name, size, error) from error


def no_space(name: str, size: int, error: OSError) -> OSError:
    """`NoSpaceError` for a full disk or quota; any other error unchanged."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return NoSpaceError(
        f"no room on the disk for its {size:,} bytes",
        file=name,
        hint="free some space and run the same command; finished shards are kept",
    )


def write_atomically(final: Path, data: bytes, temporary: Path) -> None:
    """Write a small file under a temporary name, sync, rename, sync the folder."""
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except OSError as error:
            raise no_space(final.name, len(data), error) from error
        finally:
            os.close(fd)
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
