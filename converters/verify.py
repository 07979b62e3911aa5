"""Check an output folder, on its own or against its source; every difference is listed.

On its own: index, headers, sizes and metadata agree; every packed module is complete and shaped
right; the ignore list separates quantized from kept modules; with `deep` also all hashes, and no
scale byte stands for NaN. Against the source: every source tensor is accounted for, kept ones are
byte-identical, quantized ones equal a fresh encoding bit for bit, and their error is measured.
Codes chosen by calibration are near their source, hashes and scale bytes checked as with `deep`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mxfp4.converters.checkpoint import Checkpoint, open_checkpoint, read_json_object
from mxfp4.converters.compare import check_against
from mxfp4.converters.findings import Finding, Verification
from mxfp4.converters.formats import (
    DEFAULT_FORMAT,
    Described,
    OutputFormat,
    Payload,
    output_format,
)
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.ignore_check import check_ignore
from mxfp4.converters.planning import module_of
from mxfp4.converters.reader import ShardReader, SlabBuffer
from mxfp4.converters.report import MANIFEST_NAME
from mxfp4.errors import CheckpointError, CorruptCheckpointError, RecipeError
from mxfp4.spec import BLOCK_SIZE, MAX_SCALE_BYTE

__all__ = ["Finding", "Verification", "packed_modules", "verify"]

_READ_BYTES = 8 << 20


def verify(
    output: str | Path,
    source: str | Path | None = None,
    *,
    deep: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Verification:
    """Check a converted folder; differences are findings, not exceptions.

    Raises only when source or output cannot be opened at all as a checkpoint.
    """
    output = Path(output)
    result = Verification(str(output), None if source is None else str(source), deep)
    try:
        checkpoint = open_checkpoint(output, allow_missing_config=True)
    except CheckpointError as error:
        result.add(error.file or str(output), error.message)
        return result
    described = _read_manifest(output, result)
    layout = output_format(described.get("output_format", DEFAULT_FORMAT))
    modules = packed_modules(checkpoint, layout, result)
    _check_folder(checkpoint, layout, result)
    _check_config(checkpoint, layout, modules, result)
    # Calibrated codes cannot be made again, so that their bytes are proven by hashes instead.
    if deep or (source is not None and described.get("codes")):
        _check_hashes(output, described, result, on_bytes)
        _check_scales(checkpoint, modules, layout, result)
    if source is not None:
        check_against(source, checkpoint, described, layout, result, on_bytes)
    return result


def packed_modules(
    checkpoint: Checkpoint, layout: OutputFormat, result: Verification
) -> dict[str, tuple[int, ...]]:
    """Logical shape of every module with codes in the names of a layout; misfits are findings.

    Shapes are [N, K], or [E, N, K] for stacked experts.
    """
    if layout.payload is not Payload.MXFP4:
        return {}
    infos = {tensor.name: tensor for tensor in checkpoint.tensors()}
    found: dict[str, tuple[int, ...]] = {}
    models = layout.tensors("", (1, BLOCK_SIZE))
    leaves = [info.name for info in models]
    partners = {leaves[0]: leaves[-1], leaves[-1]: leaves[0]}
    for name, info in infos.items():
        if (
            name.endswith(leaves[-1])
            and info.dtype == layout.tensors("", (1, BLOCK_SIZE))[-1].dtype
        ):
            partner = name.removesuffix(leaves[-1]) + partners[leaves[-1]]
            if partner not in infos:
                result.add(name, "these scales have no packed codes beside them")
        if not name.endswith(leaves[0]):
            continue
        module = name.removesuffix(leaves[0])
        shape = _module_shape(info, layout, infos, module + leaves[-1])
        if shape is None:
            continue
        expected = layout.tensors(module, shape)
        result.count("packed modules")
        if info != expected[0] or not shape[-1]:
            result.add(name, f"{info.dtype} {list(info.shape)} is not a matrix of packed codes")
        elif (scales := infos.get(expected[-1].name)) is None:
            result.add(name, f"its scales {expected[-1].name} are missing")
        elif scales != expected[-1]:
            result.add(
                scales.name,
                f"{scales.dtype} {list(scales.shape)}, expected {expected[-1].dtype} "
                f"{list(expected[-1].shape)} for these codes",
            )
        else:
            found[module] = shape
    return found


def _module_shape(
    info: TensorInfo, layout: OutputFormat, infos: Mapping[str, TensorInfo], scales: str
) -> tuple[int, ...] | None:
    """Logical shape of codes, judged by their own; None if this is no packed tensor at all.

    Where codes are called `weight`, a tensor of another dtype is a kept one.
    """
    block = layout.tensors("", (1, BLOCK_SIZE))[0]
    if block.name == ".weight" and (info.dtype != block.dtype or scales not in infos):
        return None
    axes = len(block.shape) - 1
    if len(info.shape) <= axes:
        return (0, 0)
    stored = math.prod(info.shape[-axes:])
    return (*info.shape[:-axes], stored // block.element_count * BLOCK_SIZE)


def _read_manifest(output: Path, result: Verification) -> Mapping[str, Any]:
    path = output / MANIFEST_NAME
    if not path.is_file():
        result.notes.append(f"no {MANIFEST_NAME}: hashes and recipe are unknown")
        return {}
    try:
        return read_json_object(path)
    except CorruptCheckpointError as error:
        result.add(MANIFEST_NAME, error.message)
        return {}


def _check_folder(checkpoint: Checkpoint, layout: OutputFormat, result: Verification) -> None:
    if not checkpoint.indexed:
        result.add("model.safetensors.index.json", "there is no index; was the run interrupted?")
    else:
        index = read_json_object(checkpoint.folder / "model.safetensors.index.json")
        total = sum(tensor.byte_count for tensor in checkpoint.tensors())
        claimed = (index.get("metadata") or {}).get("total_size")
        if claimed != total:
            result.add("model.safetensors.index.json", f"total_size {claimed}, tensors {total:,}")
    for name in checkpoint.stray:
        if name.endswith(".safetensors"):
            result.add(name, "this file is not in the index; loaders that glob would read it")
    for shard in checkpoint.shards:
        result.count("shards")
        wanted = layout.metadata["format"]
        if shard.header.metadata.get("format") != wanted:
            text = f'its metadata lack {{"format": "{wanted}"}}; old loaders refuse it'
            result.add(shard.name, text)
    result.count("tensors", len(checkpoint.tensors()))


def _check_config(
    checkpoint: Checkpoint,
    layout: OutputFormat,
    modules: Mapping[str, tuple[int, ...]],
    result: Verification,
) -> None:
    """Lint what engines read: method, group, and an ignore list that cuts exactly."""
    if checkpoint.config is None:
        result.add("config.json", "there is no config.json, so no engine can load this folder")
        return
    config = checkpoint.quantization
    if config is None:
        if modules:
            result.add("config.json", "packed modules, but no quantization_config")
        return
    wanted = layout.config(Described((), (), (), (), {})).quantization
    if wanted is None:
        result.add("config.json", f"a quantization_config in the layout {layout.name}")
        return
    if config.get("quant_method") != wanted.get("quant_method"):
        result.add("config.json", f"quant_method is {config.get('quant_method')!r}")
        return
    if layout.name != DEFAULT_FORMAT:
        return
    groups = config.get("config_groups") or {}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        seen = [weights.get(key) for key in ("num_bits", "type", "group_size", "symmetric")]
        if seen != [4, "float", 32, True]:
            result.add("config.json", f"{name} describes {seen}, not MXFP4 weights")
        if "Linear" not in group.get("targets", []):
            result.add("config.json", f"{name} lacks the target 'Linear' that engines look for")
    kept = {
        module_of(t.name)
        for t in checkpoint.tensors()
        if t.name.endswith(".weight") and len(t.shape) == 2
    }
    try:
        check_ignore(list(config.get("ignore") or []), list(modules), kept)
    except RecipeError as error:
        result.add("config.json", error.message)
    result.count("ignore patterns", len(config.get("ignore") or []))


def _check_hashes(
    output: Path,
    described: Mapping[str, Any],
    result: Verification,
    on_bytes: Callable[[int], None],
) -> None:
    for name, facts in (described.get("files") or {}).items():
        path = output / name
        if not path.is_file():
            result.add(name, "the manifest lists this file, but it is not here")
            continue
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(_READ_BYTES)
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                on_bytes(count)
        result.count("hashed files")
        if digest.hexdigest() != facts["sha256"]:
            result.add(name, "its SHA-256 is not the one in the manifest: the file is damaged")


def _check_scales(
    checkpoint: Checkpoint,
    modules: Iterable[str],
    layout: OutputFormat,
    result: Verification,
) -> None:
    if len(layout.tensors("", (1, BLOCK_SIZE))) < 2:
        return
    wanted = {layout.tensors(module, (1, BLOCK_SIZE))[1].name for module in modules}
    buffer = SlabBuffer()
    for shard in checkpoint.shards:
        with ShardReader(shard, buffer) as reader:
            for tensor in shard.header.tensors:
                if tensor.info.name not in wanted:
                    continue
                largest = max(
                    (int(np.frombuffer(p, np.uint8).max()) for p in reader.pieces(tensor)),
                    default=0,
                )
                if largest > MAX_SCALE_BYTE:
                    what = "NaN" if largest == 255 else "a scale whose largest codes overflow"
                    result.add(tensor.info.name, f"scale byte {largest} stands for {what}")
