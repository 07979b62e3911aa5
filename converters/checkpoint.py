"""A source checkpoint seen through its headers: which files, which tensors, which config.

A folder as on the hub: `config.json`, one or many `*.safetensors` with or without an index,
tokenizer and code files; files may be symlinks, as in a hub cache. Nothing but headers is read.
Only the shards that the index names are used; whatever else lies beside them is listed as stray.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mxfp4.converters.header import (
    Header,
    StoredTensor,
    TensorInfo,
    parse_header,
    read_header,
    read_raw_header,
)
from mxfp4.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MissingConfigError,
    MissingShardError,
    SourceChangedError,
    UnsupportedFormatError,
)

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys under which checkpoints describe their quantization, at the top or in `text_config`."""

_SHARD_NUMBER = re.compile(r"^(?P<stem>.*)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors$")
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"}
_SIDECAR = re.compile(r"(mtp|nextn|draft|eagle)([-_.].*)?\.safetensors", re.IGNORECASE)
"""Weights that engines load by this name beside the model, such as a prediction block."""

_SKIPPED_FOLDERS = {"original", "metal", "__pycache__"}
_HEADER_THREADS = 16


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What must not change between planning a file and reading it."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Identity of the file a path leads to, through symlinks."""
        status = os.stat(path)
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class SourceShard:
    """One safetensors file of the checkpoint with its checked header."""

    name: str
    path: Path
    identity: FileIdentity
    header: Header

    def require_unchanged(self) -> None:
        """Raise `SourceChangedError` if the file is no longer the one whose header was read."""
        try:
            now = FileIdentity.of(self.path)
        except OSError as error:
            raise SourceChangedError(
                f"the file can no longer be read ({error.strerror})",
                file=self.name,
                hint="restore it and run the same command again",
            ) from error
        if now != self.identity:
            raise SourceChangedError(
                f"the file changed during the run: {self.identity.size:,} bytes were planned, "
                f"now {now.size:,} with another modification time",
                file=self.name,
                hint="let nothing write to the source, then run again with --overwrite",
            )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Headers, config and companion files of one checkpoint folder; no weight data."""

    folder: Path
    shards: tuple[SourceShard, ...]
    config: Mapping[str, Any] | None
    indexed: bool
    companions: tuple[str, ...]
    """Files to carry over unchanged, relative to the folder, with `/` separators."""
    stray: tuple[str, ...]
    """Weight files that lie in the folder and are not part of the checkpoint."""
    warnings: tuple[str, ...] = ()
    sidecars: tuple[str, ...] = ()
    """Safetensors files outside the index that are part of the model, such as `mtp.safetensors`."""

    def located(self) -> Iterator[tuple[int, StoredTensor]]:
        """Every tensor with the number of its shard, in file order."""
        for number, shard in enumerate(self.shards):
            for tensor in shard.header.tensors:
                yield number, tensor

    def tensors(self) -> list[TensorInfo]:
        """Name, dtype and shape of every tensor, in file order."""
        return [tensor.info for _, tensor in self.located()]

    @property
    def byte_count(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.identity.size for shard in self.shards)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The quantization config wherever the model config keeps it, or None."""
        config = self.config or {}
        for place in (config, config.get("text_config")):
            if isinstance(place, Mapping):
                for key in QUANTIZATION_KEYS:
                    if isinstance(place.get(key), Mapping):
                        return dict(place[key])
        return None


def open_checkpoint(folder: str | Path, *, allow_missing_config: bool = False) -> Checkpoint:
    """Read config, index and all headers of a checkpoint folder, and check that they agree.

    Raises a `CheckpointError` that names the file (and the tensor) for anything missing,
    truncated, contradictory or ambiguous.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            "this is not a folder" if folder.exists() else "there is no such folder",
            file=str(folder),
            hint="give the folder that holds config.json and the *.safetensors files",
        )
    warnings: list[str] = []
    config = _read_config(folder, allow_missing_config, warnings)
    weight_map = _read_index(folder)
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    names = (
        _choose_without_index(folder, present)
        if weight_map is None
        else sorted(set(weight_map.values()))
    )
    _require_present(folder, names)
    shards = tuple(_open_shards(folder, names))
    _check_tensors(shards, weight_map)
    companions, other = _companions(folder, warnings)
    beside = sorted(set(present) - set(names))
    sidecars = tuple(name for name in beside if weight_map and _SIDECAR.fullmatch(name))
    _check_sidecars(folder, sidecars, shards)
    stray = tuple([name for name in beside if name not in sidecars] + other)
    if stray:
        warnings.append(
            f"{len(stray)} weight file(s) beside the checkpoint were not read: {_some(stray)}"
        )
    return Checkpoint(
        folder,
        shards,
        config,
        weight_map is not None,
        tuple(sorted((*companions, *sidecars))),
        stray,
        tuple(warnings),
        sidecars,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"this is not JSON ({error})", file=path.name, hint="download this file again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(
            f"expected a JSON object, found {type(value).__name__}",
            file=path.name,
            hint="download this file again",
        )
    return value


def _read_config(
    folder: Path, allow_missing: bool, warnings: list[str]
) -> Mapping[str, Any] | None:
    path = folder / CONFIG_NAME
    if path.is_file():
        return read_json_object(path)
    if not allow_missing:
        raise MissingConfigError(
            "there is no config.json in this folder, and without it experts, routers and draft "
            "layers cannot be told apart with certainty",
            file=str(folder),
            hint="add the model's config.json, or pass --allow-missing-config to decide by "
            "names and shapes alone",
        )
    warnings.append("no config.json: roles were decided by names and shapes alone")
    return None


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise CorruptCheckpointError(
            "it has no weight_map from tensor names to file names",
            file=INDEX_NAME,
            hint="download the index again, or remove it if there is a single shard",
        )
    if not weight_map:
        raise CorruptCheckpointError(
            "its weight_map is empty", file=INDEX_NAME, hint="download the index again"
        )
    for name in set(weight_map.values()):
        parts = PurePosixPath(name).parts
        if not parts or "\\" in name or name.startswith("/") or ".." in parts:
            raise CorruptCheckpointError(
                f"the index points outside the folder: {name!r}",
                file=INDEX_NAME,
                tensor=next(tensor for tensor, file in weight_map.items() if file == name),
                hint="an index may only name files in its own folder; do not use this checkpoint "
                "unless you trust where it comes from",
            )
    return weight_map


def _choose_without_index(folder: Path, present: list[str]) -> list[str]:
    """Pick the shards of a folder without an index; several complete sets are an error."""
    if not present:
        other = sorted(p.name for p in folder.iterdir() if p.suffix in _OTHER_WEIGHTS)
        if other:
            raise UnsupportedFormatError(
                f"no *.safetensors file, only {_some(other)}",
                file=str(folder),
                hint="save the model as safetensors first (transformers: save_pretrained)",
            )
        raise CheckpointError(
            "no *.safetensors file in this folder",
            file=str(folder),
            hint="give the folder that holds the weights",
        )
    sets: dict[str, list[str]] = {}
    for name in present:
        match = _SHARD_NUMBER.match(name)
        key = f"{match['stem']}-*-of-{match['total']}" if match else name
        sets.setdefault(key, []).append(name)
    for key, members in sets.items():
        numbers = [_SHARD_NUMBER.match(name) for name in members]
        total = int(numbers[0]["total"]) if numbers[0] else 1
        if len(members) != total:
            raise MissingShardError(
                f"{len(members)} of {total} shards of {key} are here and there is no index",
                file=str(folder),
                hint="download the missing shards and the index",
            )
    if len(sets) > 1:
        raise CorruptCheckpointError(
            f"there is no index and several shard sets lie side by side: {_some(sorted(sets))}",
            file=str(folder),
            hint=f"move all but one set away, or restore {INDEX_NAME}",
        )
    return present


def _require_present(folder: Path, names: Iterable[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise MissingShardError(
            f"the index names {len(missing)} shard(s) that are not in the folder: {_some(missing)}",
            file=missing[0],
            hint="download the missing shards, then run the same command",
        )


def _open_shards(folder: Path, names: Iterable[str]) -> Iterator[SourceShard]:
    """Wait for many files at a time, but parse in one thread: parsing holds the GIL."""

    def fetch(name: str) -> tuple[str, Path, FileIdentity, bytes, int]:
        path = folder / name
        identity = FileIdentity.of(path)
        return name, path, identity, *read_raw_header(path)

    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        for name, path, identity, raw, size in pool.map(fetch, names):
            yield SourceShard(name, path, identity, parse_header(raw, size, path))


def _check_tensors(shards: tuple[SourceShard, ...], weight_map: dict[str, str] | None) -> None:
    if weight_map is not None and _all_at_home(shards, weight_map):
        return
    home: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.header.tensors:
            other = home.setdefault(tensor.info.name, shard.name)
            if other != shard.name:
                raise CorruptCheckpointError(
                    f"the tensor is also in {other}",
                    file=shard.name,
                    tensor=tensor.info.name,
                    hint="keep one of the two shards; a merge of two checkpoints looks like this",
                )
    if weight_map is None:
        return
    for name, file in weight_map.items():
        if home.get(name) != file:
            found = f"it is in {home[name]}" if name in home else "no shard holds it"
            raise CorruptCheckpointError(
                f"the index puts this tensor in {file}, but {found}",
                file=INDEX_NAME,
                tensor=name,
                hint="index and shards come from different versions; download both again",
            )
    extra = [name for name in home if name not in weight_map]
    if extra:
        raise CorruptCheckpointError(
            f"{len(extra)} tensor(s) of the shards are not in the index, first of all this one",
            file=home[extra[0]],
            tensor=extra[0],
            hint="index and shards come from different versions; download both again",
        )


def _all_at_home(shards: tuple[SourceShard, ...], weight_map: Mapping[str, str]) -> bool:
    """Whether every tensor is where the index says, and the index names no other.

    A name leads to one shard, so equal counts prove that no two shards share one.
    """
    for shard in shards:
        names = [tensor.info.name for tensor in shard.header.tensors]
        if not {*map(weight_map.get, names)} <= {shard.name}:
            return False
    return sum(len(shard.header.tensors) for shard in shards) == len(weight_map)


def _check_sidecars(folder: Path, names: Sequence[str], shards: tuple[SourceShard, ...]) -> None:
    """A file that goes along unread has a sound header and repeats no tensor of the model."""
    if not names:
        return
    known = {tensor.info.name: shard.name for shard in shards for tensor in shard.header.tensors}
    for name in names:
        for tensor in read_header(folder / name).tensors:
            if tensor.info.name in known:
                raise CorruptCheckpointError(
                    f"the tensor is also in {known[tensor.info.name]}",
                    file=name,
                    tensor=tensor.info.name,
                    hint="remove this file from the source: it repeats a part of the model",
                )


def _companions(folder: Path, warnings: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Files to carry over, and weight files of other formats that are left behind."""
    carried: list[str] = []
    other: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and f[0] != ".")
        for file in sorted(files):
            path = Path(root, file)
            name = path.relative_to(folder).as_posix()
            if file.startswith(".") or name in (CONFIG_NAME, INDEX_NAME):
                continue
            if path.suffix in _OTHER_WEIGHTS:
                other.append(name)
            elif path.suffix == ".safetensors" or file.endswith(".safetensors.index.json"):
                if "/" in name:
                    other.append(name)
            elif not path.exists():
                warnings.append(f"{name} is a symlink to a file that does not exist; not copied")
            elif path.is_file():
                carried.append(name)
    return tuple(carried), other


def _some(names: Iterable[str], limit: int = 4) -> str:
    listed = list(names)
    shown = ", ".join(listed[:limit])
    return f"{shown} and {len(listed) - limit} more" if len(listed) > limit else shown
