"""Codes of calibrated modules on disk, one file per decoder layer, until the checkpoint is written.

A layer counts as done once its record exists, which is written last. The record names the settings
and the data, so that a calibration is continued only as the one that was begun.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mxfp4.calibration.block import BlockResult
from mxfp4.codec import measure
from mxfp4.converters.reader import Bits
from mxfp4.converters.work import Quantizer
from mxfp4.elements import unpack_codes
from mxfp4.errors import ResumeError
from mxfp4.kernels.fallback import float_values
from mxfp4.kernels.rows import EncodedRows
from mxfp4.spec import BLOCK_BYTES, BLOCK_SIZE

_SETTINGS = "settings.json"


class CodeStore:
    """A folder of layer files; serves them to a conversion as its substitutes.

    `settings` is everything that decides the codes. Raises `ResumeError` when the folder holds a
    calibration with other settings and `overwrite` is not set.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        self.folder = folder
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        self._identity = hashlib.sha256(text.encode()).hexdigest()
        path = folder / _SETTINGS
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            if not overwrite:
                raise ResumeError(
                    "an unfinished calibration with other settings or other text is in this folder",
                    file=str(folder),
                    hint="repeat the earlier options to continue it, or pass --overwrite",
                )
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, text.encode())
        self._layer_of: dict[str, int] = {}
        self._changed: dict[str, bytes] = {}
        self._records: dict[int, dict[str, Any]] = {}
        while (record := self._read_record(len(self._records))) is not None:
            self._adopt(len(self._records), record)

    @property
    def identity(self) -> str:
        """SHA-256 of the settings."""
        return self._identity

    @property
    def done_layers(self) -> int:
        """How many layers, from the first, are finished."""
        return len(self._records)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Facts of every finished layer, in order."""
        return [self._records[number] for number in sorted(self._records)]

    def save(self, number: int, result: BlockResult) -> None:
        """Write a layer's codes, then its record."""
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for module, found in result.modules.items():
            arrays[f"{module}|codes"] = found.codes.numpy()
            arrays[f"{module}|scales"] = found.scales.numpy()
        for name, tensor in result.changed.items():
            arrays[f"{name}|bytes"] = tensor.contiguous().view(torch.uint8).numpy()
        path = self._file(number)
        partial = path.with_suffix(".part")
        with open(partial, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        record = {
            "layer": number,
            "bytes": path.stat().st_size,
            "modules": {name: dict(found.facts) for name, found in result.modules.items()},
            "changed": sorted(result.changed),
            "notes": list(result.notes),
            "tokens_per_expert": dict(result.loads),
            "routers": result.routers,
        }
        _write(self._record(number), json.dumps(record).encode())
        self._adopt(number, record)

    def quantizer(self, module: str) -> Quantizer | None:
        """Serves the stored codes of a module slab by slab; None for one not calibrated."""
        number = self._layer_of.get(module)
        if number is None:
            return None
        with np.load(self._file(number)) as arrays:
            return StoredCodes(arrays[f"{module}|codes"], arrays[f"{module}|scales"])

    def content(self, tensor: str) -> bytes | None:
        """The new bytes of a kept tensor that a fold or a re-fit changed."""
        return self._changed.get(tensor)

    def values(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        """All arrays of a finished layer."""
        with np.load(self._file(number)) as arrays:
            return dict(arrays)

    def remove(self) -> None:
        """Delete the folder; the checkpoint is complete."""
        shutil.rmtree(self.folder)

    def _adopt(self, number: int, record: dict[str, Any]) -> None:
        self._records[number] = record
        self._layer_of.update(dict.fromkeys(record["modules"], number))
        if record["changed"]:
            with np.load(self._file(number)) as arrays:
                for name in record["changed"]:
                    self._changed[name] = arrays[f"{name}|bytes"].tobytes()

    def _read_record(self, number: int) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = json.loads(self._record(number).read_bytes())
            size = self._file(number).stat().st_size
        except FileNotFoundError:
            return None
        return record if size == record["bytes"] else None

    def _file(self, number: int) -> Path:
        return self.folder / f"layer-{number:05d}.npz"

    def _record(self, number: int) -> Path:
        return self.folder / f"layer-{number:05d}.json"


class StoredCodes:
    """A quantizer that returns known codes: called with the slabs of one module, in order."""

    def __init__(self, codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> None:
        self._codes = codes.reshape(-1, BLOCK_BYTES)
        self._scales = scales.reshape(-1)
        self._position = 0

    def __call__(self, source: Bits, dtype: str, /) -> EncodedRows:
        """The next codes uint8 [n, K/2] and scales uint8 [n, K/32], with their statistics."""
        count = source.size // BLOCK_SIZE
        window = slice(self._position, self._position + count)
        self._position += count
        codes, scales = self._codes[window], self._scales[window]
        blocks = torch.from_numpy(float_values(source.reshape(-1, BLOCK_SIZE), dtype).copy())
        unpacked = unpack_codes(torch.from_numpy(codes.copy()))
        statistics = measure(blocks, unpacked, torch.from_numpy(scales.astype(np.int32)))
        rows = source.shape[0]
        return EncodedRows(codes.reshape(rows, -1), scales.reshape(rows, -1), statistics)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".part")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
