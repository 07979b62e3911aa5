"""What a checkpoint folder is: format, sizes by role and dtype, quantization, layout problems."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4.converters.checkpoint import Checkpoint, open_checkpoint
from mxfp4.converters.roles import classify
from mxfp4.converters.sources import STORAGES, Part, Source, SourceTensors, read_sources
from mxfp4.converters.sources.types import PLAIN
from mxfp4.errors import CheckpointError


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
    found, unreadable = _sources(checkpoint)
    owner = {part.info.name: source.info.name for source in found.sources for part in source.parts}
    values = [s.info if s.plain else s.info._replace(dtype="BF16") for s in found.sources]
    judged = classify(values, checkpoint.config)
    leftovers = [part.info for part in found.dropped]
    roles = classify(leftovers, checkpoint.config) if leftovers else {}
    roles |= {name: judged[logical] for name, logical in owner.items()}
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
        storage=_storage(checkpoint, found),
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
        problems=(*checkpoint.warnings, *_problems(checkpoint), *unreadable),
    )


def _sources(checkpoint: Checkpoint) -> tuple[SourceTensors, tuple[str, ...]]:
    """What the stored tensors mean; if they do not add up, every one by itself and the reason."""
    try:
        return read_sources(checkpoint), ()
    except CheckpointError as error:
        plain = tuple(
            Source(PLAIN, stored.info, (Part(number, stored),))
            for number, stored in checkpoint.located()
        )
        return SourceTensors(plain, ()), (f"{error.tensor}: {error.message}",)


def _storage(checkpoint: Checkpoint, found: SourceTensors) -> str:
    """A phrase for how the weights are stored, from the tensors and not from the config's word."""
    dtypes = Counter(tensor.dtype for tensor in checkpoint.tensors())
    kinds = Counter(_kind(source) for source in found.sources if not source.plain)
    if kinds:
        method = (checkpoint.quantization or {}).get("format")
        told = f", {method}" if method else ""
        return "; ".join(f"{kind} ({n:,} modules{told})" for kind, n in kinds.most_common())
    return f"unquantized {dtypes.most_common(1)[0][0]}" if dtypes else "no tensors"


def _kind(source: Source) -> str:
    name = source.parts[0].info.name
    if name.endswith("_blocks"):
        return "gpt-oss MXFP4 blocks"
    if source.storage == "mxfp4" and name.endswith(".weight_packed"):
        return "compressed-tensors packed weights"
    label = STORAGES[source.storage].label
    if source.storage != "fp8":
        return label
    rows, columns = source.block
    whole = (rows, columns) == source.info.shape[-2:]
    return f"{label} {'per tensor' if whole else f'with scales of {rows} x {columns}'}"


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
