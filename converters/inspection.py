"""What a checkpoint folder is: format, sizes by role and dtype, quantization, layout problems."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4.converters.checkpoint import Checkpoint, open_checkpoint
from mxfp4.converters.roles import classify

_FORMAT_MARKS = (
    ("_blocks", "gpt-oss MXFP4 blocks"),
    (".weight_packed", "compressed-tensors packed weights"),
    (".weight_scale_inv", "FP8 with block scales"),
    (".weight_scale", "weights with separate scales"),
    (".scales", "MLX or GPTQ style scales"),
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts about one checkpoint, from its headers alone."""

    folder: str
    model_type: str | None
    architectures: tuple[str, ...]
    storage: str
    shard_count: int
    tensor_count: int
    parameter_count: int
    byte_count: int
    indexed: bool
    by_role: tuple[dict[str, Any], ...]
    by_dtype: tuple[dict[str, Any], ...]
    quantization: dict[str, Any] | None
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {name: getattr(self, name) for name in self.__slots__}


def inspect(folder: str | Path) -> Inspection:
    """Read the headers of a checkpoint; raises a `CheckpointError` if it cannot be opened."""
    checkpoint = open_checkpoint(folder, allow_missing_config=True)
    infos = checkpoint.tensors()
    roles = classify(infos, checkpoint.config)
    by_role: dict[tuple[str, str], Counter[str]] = {}
    by_dtype: dict[str, Counter[str]] = {}
    for info in infos:
        facts = {"tensors": 1, "elements": info.element_count, "bytes": info.byte_count}
        key = (str(roles[info.name].role), info.dtype)
        by_role.setdefault(key, Counter()).update(facts)
        by_dtype.setdefault(info.dtype, Counter()).update(facts)
    config = checkpoint.config or {}
    quantization = checkpoint.quantization
    return Inspection(
        folder=str(folder),
        model_type=config.get("model_type"),
        architectures=tuple(config.get("architectures") or ()),
        storage=_storage(checkpoint),
        shard_count=len(checkpoint.shards),
        tensor_count=len(infos),
        parameter_count=sum(info.element_count for info in infos),
        byte_count=checkpoint.byte_count,
        indexed=checkpoint.indexed,
        by_role=tuple(
            {"role": role, "dtype": dtype, **counts}
            for (role, dtype), counts in sorted(by_role.items(), key=lambda i: -i[1]["bytes"])
        ),
        by_dtype=tuple(
            {"dtype": dtype, **counts}
            for dtype, counts in sorted(by_dtype.items(), key=lambda i: -i[1]["bytes"])
        ),
        quantization=None if quantization is None else dict(quantization),
        problems=(*checkpoint.warnings, *_problems(checkpoint)),
    )


def _storage(checkpoint: Checkpoint) -> str:
    """A phrase for how the weights are stored, from the tensors and not from the config's word."""
    names = [tensor.name for tensor in checkpoint.tensors()]
    dtypes = Counter(tensor.dtype for tensor in checkpoint.tensors())
    for mark, phrase in _FORMAT_MARKS:
        count = sum(1 for name in names if name.endswith(mark))
        if count:
            method = (checkpoint.quantization or {}).get("format")
            return f"{phrase} ({count:,} modules{f', {method}' if method else ''})"
    return f"unquantized {dtypes.most_common(1)[0][0]}" if dtypes else "no tensors"


def _problems(checkpoint: Checkpoint) -> list[str]:
    found = []
    if not checkpoint.indexed and len(checkpoint.shards) > 1:
        found.append("several shards without an index: transformers does not load them")
    bare = [s.name for s in checkpoint.shards if s.header.metadata.get("format") != "pt"]
    if bare:
        found.append(f'{len(bare)} shard(s) lack the metadata {{"format": "pt"}}: {bare[0]}')
    places = checkpoint.config or {}
    nested = places.get("text_config")
    if "quantization_config" in places and "quantization_config" in (nested or {}):
        found.append("quantization_config at the top level and in text_config: engines differ")
    return found
