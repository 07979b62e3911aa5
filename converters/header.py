"""The safetensors header: parse and check it before trusting a byte, and build it for a new shard.

A file is eight bytes of length, a JSON header and the tensor data without holes. The parser makes
every check of the reference loader and one more: a name given twice is refused, because the
reference silently keeps the last one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import operator
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mxfp4.errors import CorruptCheckpointError

DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits per element of every dtype name that safetensors 0.8 accepts."""

MAX_HEADER_BYTES = 100_000_000
"""The reference loader refuses longer headers."""

DATA_ALIGNMENT = 4096
"""Our shards start their data on a page boundary, which direct readers need."""

_LENGTH = struct.Struct("<Q")
_FIRST_READ_BYTES = 1 << 16
_FIELDS = operator.itemgetter("dtype", "shape", "data_offsets")


class TensorInfo(NamedTuple):
    """What a header says about one tensor: its name, safetensors dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def byte_count(self) -> int:
        """Bytes of the data, which a checked header makes whole."""
        return _bit_count(self.dtype, self.shape) // 8


@functools.lru_cache(maxsize=65536)
def _bit_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Cached: a checkpoint has hundreds of thousands of tensors and a few dozen shapes."""
    return math.prod(shape) * DTYPE_BITS[dtype]


@functools.lru_cache(maxsize=65536)
def _form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """The same dtype and shape, one object each for all tensors that have them, and the bits."""
    return dtype, shape, _bit_count(dtype, shape)


class StoredTensor(NamedTuple):
    """A tensor and the absolute offset of its first byte in the file."""

    info: TensorInfo
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: its metadata, its tensors in file order, and the SHA-256 of its JSON."""

    metadata: Mapping[str, str]
    tensors: tuple[StoredTensor, ...]
    file_size: int
    sha256: str


def read_header(path: Path) -> Header:
    """Read and check the header of one shard.

    Raises `CorruptCheckpointError` for anything that the reference loader refuses, for duplicate
    names, and for a file whose size differs from what the header covers.
    """
    raw, size = read_raw_header(path)
    return parse_header(raw, size, path)


def read_raw_header(path: Path) -> tuple[bytes, int]:
    """The JSON of a header, not yet parsed, and the size of its file."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head = os.pread(file.fileno(), _FIRST_READ_BYTES, 0)
        if len(head) < _LENGTH.size:
            raise _corrupt(path, f"{size} bytes are too few for a safetensors file")
        (length,) = _LENGTH.unpack_from(head)
        if length > MAX_HEADER_BYTES or length + _LENGTH.size > size:
            raise _corrupt(path, f"the header claims {length:,} bytes, the whole file has {size:,}")
        while len(head) < _LENGTH.size + length:
            more = os.pread(file.fileno(), _LENGTH.size + length - len(head), len(head))
            if not more:
                raise _corrupt(path, "the file ends inside its header")
            head += more
    return head[_LENGTH.size : _LENGTH.size + length], size


def parse_header(raw: bytes, file_size: int, path: Path) -> Header:
    """Check the JSON of a header against the size of its file (see `read_header`)."""
    entries = _entries(raw, path)
    metadata = _parse_metadata(entries.pop("__metadata__", {}), path)
    base = _LENGTH.size + len(raw)
    tensors = _sound_entries(entries, base)
    if tensors is None:
        tensors = _each_entry(entries, base, path)
    end = tensors[-1].offset + tensors[-1].info.byte_count if tensors else base
    if end != file_size:
        kind = "truncated" if file_size < end else "longer than its header says"
        raise _corrupt(
            path, f"the file is {kind}: the header covers {end:,} bytes, it has {file_size:,}"
        )
    return Header(metadata, tensors, file_size, hashlib.sha256(raw).hexdigest())


def build_header(tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Length, JSON and padding for tensors stored in the given order.

    The bytes depend on the arguments alone; the data section starts on `DATA_ALIGNMENT`.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.byte_count
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % DATA_ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _entries(raw: bytes, path: Path) -> dict[str, Any]:
    """The top-level names of a header with their values; a name given twice is refused."""
    try:
        header = json.loads(raw)
        if not isinstance(header, dict):
            raise _corrupt(path, "the header is not a JSON object")
        # `json` keeps the last of equal names. Every entry has one data_offsets, so equal counts
        # prove that nothing was lost; else the slow way finds the name.
        tensor_count = len(header) - ("__metadata__" in header)
        if raw.count(b'"data_offsets"') != tensor_count or raw.count(b'"__metadata__"') > 1:
            _refuse_duplicates(json.loads(raw, object_pairs_hook=_Pairs), path)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _corrupt(path, f"the header is not JSON ({error})") from error
    return header


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as the pairs it was written with, so that duplicates stay visible."""


def _refuse_duplicates(pairs: _Pairs, path: Path) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _corrupt(path, "the header has this name twice", tensor=name)
        seen.add(name)


def _parse_metadata(value: object, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise _corrupt(path, "__metadata__ must map strings to strings")
    return value


def _sound_entries(entries: Mapping[str, Any], base: int) -> tuple[StoredTensor, ...] | None:
    """All tensors of a header that lists sound entries in file order; None if in any doubt.

    Checks whole columns at a time, which takes half as long as one entry after the other.
    """
    try:
        dtypes, shapes, offsets = zip(*map(_FIELDS, entries.values()), strict=True)
        if {*map(type, shapes), *map(type, offsets)} != {list} or {*map(len, offsets)} != {2}:
            return None
        edges = [*itertools.chain.from_iterable(offsets)]
        if {*map(type, edges), *map(type, itertools.chain.from_iterable(shapes))} != {int}:
            return None
        dtypes, shapes, bits = zip(*map(_form, dtypes, map(tuple, shapes)), strict=True)
    except (KeyError, TypeError, ValueError):
        return None
    starts, ends = edges[::2], edges[1::2]
    if (
        min(itertools.chain.from_iterable({*shapes}), default=0) < 0
        or starts != [0, *ends[:-1]]
        or [*bits] != [8 * size for size in map(operator.sub, ends, starts)]
    ):
        return None
    infos = map(TensorInfo, entries, dtypes, shapes)
    return tuple(map(StoredTensor, infos, [base + start for start in starts]))


def _each_entry(entries: Mapping[str, Any], base: int, path: Path) -> tuple[StoredTensor, ...]:
    """The same for any header, in file order; says what is wrong with which tensor."""
    # By start and size: empty tensors share their start with a neighbour and come first.
    found = sorted(_parse_entry(name, value, base, path) for name, value in entries.items())
    position = base
    for start, size, tensor in found:
        if start != position:
            raise _corrupt(
                path,
                f"its data start at byte {start - base:,}, expected {position - base:,}: "
                "a hole or an overlap",
                tensor=tensor.info.name,
            )
        position += size
    return tuple(tensor for _, _, tensor in found)


def _parse_entry(name: str, value: object, base: int, path: Path) -> tuple[int, int, StoredTensor]:
    """Start in the file, size in bytes, and the tensor."""
    entry = value if isinstance(value, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if (
        type(dtype) is not str
        or type(shape) is not list
        or type(offsets) is not list
        or len(offsets) != 2
        or not _are_counts(shape + offsets)
    ):
        raise _corrupt(path, "its entry lacks a dtype, a shape or two offsets", tensor=name)
    if dtype not in DTYPE_BITS:
        raise _corrupt(
            path,
            f"unknown dtype {dtype!r}",
            tensor=name,
            hint="known dtypes: " + ", ".join(sorted(DTYPE_BITS)),
        )
    info = TensorInfo(name, dtype, tuple(shape))
    bits, (start, end) = _bit_count(dtype, info.shape), offsets
    if bits % 8:
        raise _corrupt(path, f"{dtype} {shape} does not fill whole bytes", tensor=name)
    if bits // 8 != end - start:
        raise _corrupt(
            path,
            f"{dtype} {shape} needs {bits // 8:,} bytes, its offsets give {end - start:,}",
            tensor=name,
        )
    start += base
    return start, bits // 8, StoredTensor(info, start)


def _are_counts(values: list[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _corrupt(
    path: Path, message: str, *, tensor: str = "", hint: str = "download or copy this file again"
) -> CorruptCheckpointError:
    return CorruptCheckpointError(message, file=path.name, tensor=tensor, hint=hint)
