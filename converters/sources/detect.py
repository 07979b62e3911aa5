"""Find out what every stored tensor of a checkpoint is: weight, companion, leftover, or plain.

Names, dtypes and shapes decide; the config only contributes the block size of FP8. A one-byte
tensor is never taken for FP8, and a packed weight without its scale is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxfp4.converters.checkpoint import Checkpoint
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.sources import mxfp4, scaled_names
from mxfp4.converters.sources.types import PLAIN, Part, Recogniser, Source
from mxfp4.errors import CorruptCheckpointError, TensorNotFoundError, UnsupportedFormatError

RECOGNISERS: tuple[tuple[Recogniser, frozenset[str] | None], ...] = (
    (scaled_names.recognise_fp8, scaled_names.FP8_DTYPES),
    (scaled_names.recognise_int4, frozenset({"I32"})),
    (scaled_names.recognise_nvfp4, frozenset({"F8_E4M3"})),
    (mxfp4.recognise, None),
)
"""Asked in this order about every stored tensor that is not made of floats or wide integers; each
only if the checkpoint has a tensor of one of its dtypes, where it names any."""

_FLOATS = frozenset({"BF16", "F16", "F32", "F64", "I64", "BOOL"})
_PACKED_LEAVES = (".weight", ".weight_packed", "_blocks", mxfp4.GGUF_LEAF, ".qweight")
_SCALE_LEAVES = ("_scale", ".scale", "_scales", ".scales", "_scale_inv", "_scale_2")
"""Names that are never a weight; half of the tensors of a packed checkpoint have one."""
_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scale", "scales")
_PACKED_DTYPES = frozenset({"U8", "I8", "U32", "I32", "F4"})

LEFTOVER_LEAVES = frozenset(
    {
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "weight_shape",
        "input_scale",
        "input_global_scale",
        "output_scale",
        "k_scale",
        "v_scale",
        "q_scale",
    }
)
"""What only a quantized checkpoint holds, and what no output needs."""

_FOREIGN = {
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "absmax": "bitsandbytes",
}
_FOREIGN_LEAVES = tuple(_FOREIGN)


@dataclass(frozen=True, slots=True)
class SourceTensors:
    """All logical tensors in file order, and the stored ones that lead nowhere."""

    sources: tuple[Source, ...]
    dropped: tuple[Part, ...]

    @property
    def quantized(self) -> bool:
        """Whether any weight is stored in fewer bits than its values have."""
        return any(not source.plain for source in self.sources)


def read_sources(checkpoint: Checkpoint) -> SourceTensors:
    """Group the stored tensors of a checkpoint by what they mean.

    Raises a `CheckpointError` that names the tensor: for a packed or FP8 weight without scale, for
    companions of a wrong shape, for two forms of one weight, and for layouts that are not read.
    """
    listed = [
        Part(number, stored)
        for number, shard in enumerate(checkpoint.shards)
        for stored in shard.header.tensors
    ]
    parts = dict(zip([part.stored.info.name for part in listed], listed, strict=True))
    found = _recognised(parts, _block_sizes(checkpoint.quantization))
    # By identity: the hash of a part is one of all its contents.
    taken = {id(part) for item in found if isinstance(item, Source) for part in item.parts[1:]}
    heads = any(isinstance(item, Source) for item in found)
    quantized = heads or checkpoint.quantization is not None
    sources: list[Source] = []
    dropped: list[Part] = []
    for item in found:
        if isinstance(item, Source):
            sources.append(item)
        elif id(item) in taken:
            continue
        elif quantized and _is_leftover(item.info, parts):
            dropped.append(item)
        else:
            _refuse_unreadable(item.info, parts)
            sources.append(Source(PLAIN, item.info, (item,)))
    _refuse_doubles(sources)
    return SourceTensors(tuple(sources), tuple(dropped))


def _recognised(
    parts: Mapping[str, Part], blocks: tuple[tuple[int, int], ...]
) -> list[Part | Source]:
    """All parts in order, with sources in the place of those that head one."""
    dtypes = {part.stored.info.dtype for part in parts.values()}
    asked = [recogniser for recogniser, own in RECOGNISERS if own is None or own & dtypes]
    found: list[Part | Source] = []
    for part in parts.values():
        name, dtype, _ = part.stored.info
        source = None
        if dtype not in _FLOATS and not name.endswith(_SCALE_LEAVES):
            for recogniser in asked:
                source = recogniser(part, parts.get, blocks)
                if source is not None:
                    break
        found.append(part if source is None else source)
    return found


def _block_sizes(quantization: Mapping[str, Any] | None) -> tuple[tuple[int, int], ...]:
    """Block sizes of FP8 scales that a config names, in any spelling."""
    found = (quantization or {}).get("weight_block_size")
    if isinstance(found, list) and len(found) == 2 and all(type(n) is int and n > 0 for n in found):
        return ((found[0], found[1]),)
    return ()


def _is_leftover(info: TensorInfo, parts: Mapping[str, Part]) -> bool:
    """A scale that no packed weight needs, or a number that only a quantized model has."""
    base, _, leaf = info.name.rpartition(".")
    if leaf not in LEFTOVER_LEAVES:
        return False
    owned = f"{base}.weight" in parts or f"{base}.weight_packed" in parts
    if not owned and leaf in ("weight_scale", "weight_scale_inv"):
        raise CorruptCheckpointError(
            f"these scales {info.dtype} {list(info.shape)} have no weight beside them",
            tensor=info.name,
            hint="download the checkpoint again, or remove this tensor",
        )
    return True


def _refuse_unreadable(info: TensorInfo, parts: Mapping[str, Part]) -> None:
    """Raise for what looks like a weight and would be copied as if it were plain numbers."""
    if info.dtype in _FLOATS and not info.name.endswith(_FOREIGN_LEAVES):
        return
    base, _, leaf = info.name.rpartition(".")
    affine = leaf == "weight" and info.dtype == "U32" and f"{base}.biases" in parts
    if leaf in _FOREIGN or affine:
        raise UnsupportedFormatError(
            f"{'MLX affine' if affine else _FOREIGN[leaf]} weights are not read",
            tensor=info.name,
            hint="start from the unquantized checkpoint",
        )
    packed = info.dtype in _PACKED_DTYPES and len(info.shape) >= 2
    if not packed or not info.name.endswith(_PACKED_LEAVES):
        return
    scale = next((parts[n] for end in _SCALE_NAMES if (n := f"{base}.{end}") in parts), None)
    if scale is not None:
        raise UnsupportedFormatError(
            f"{info.dtype} {list(info.shape)} with {scale.info.name} {scale.info.dtype} "
            f"{list(scale.info.shape)} is no layout that is read here",
            tensor=info.name,
            hint="start from the unquantized checkpoint",
        )
    raise TensorNotFoundError(
        f"this packed {info.dtype} weight {list(info.shape)} has no scale beside it",
        tensor=info.name,
        hint="a one-byte tensor is never taken for FP8; download the checkpoint again, or "
        "start from the unquantized one",
    )


def _refuse_doubles(sources: list[Source]) -> None:
    if len({source.info.name for source in sources}) == len(sources):
        return
    seen: dict[str, str] = {}
    for source in sources:
        stored = source.parts[0].info.name
        if source.info.name in seen:
            raise CorruptCheckpointError(
                f"{seen[source.info.name]} and {stored} both hold this weight",
                tensor=source.info.name,
                hint="keep one of the two; a merge of two checkpoints looks like this",
            )
        seen[source.info.name] = stored
