"""The words of this package: what an output format has to say about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from mxfp4.converters.header import TensorInfo
from mxfp4.converters.roles import Role
from mxfp4.spec import BLOCK_SIZE

Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]


class Payload(StrEnum):
    """What a format writes for a quantized matrix."""

    MXFP4 = "mxfp4"
    BF16 = "bf16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one expert matrix in a stacked output tensor.

    The rows of `lanes` matrices alternate within an expert.
    """

    stack: str
    expert: int
    lane: int = 0
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Described:
    """What a config entry is made from: names of modules, and facts of the source.

    `unquantized` are the kept modules with a weight matrix; `fp8` those kept as FP8, with the
    block size that they share.
    """

    ignore: Sequence[str]
    quantized: Sequence[str]
    unquantized: Sequence[str]
    fp8: Sequence[str]
    model: Mapping[str, Any]
    activations: str = "none"
    block: tuple[int, int] = (128, 128)


@dataclass(frozen=True, slots=True)
class ConfigEdit:
    """The `quantization_config` to write (None: there is none), and other keys of config.json."""

    quantization: dict[str, Any] | None
    top: Mapping[str, Any] = field(default_factory=dict)


def neighbour_streams(codes: Bytes, scales: Bytes) -> tuple[Bytes, ...]:
    """Codes and scales as they are: the order of everyone but GGUF."""
    return codes, scales


def unstacked(module: str) -> Slot | None:
    """Every matrix has tensors of its own."""
    return None


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """One on-disk layout.

    `tensors(module, shape)` are the tensors of a quantized module with a logical [N, K] weight, or
    [E, N, K] where `slot` stacks experts; the first is written while the source is read, the
    second after it. `streams` turns codes uint8 [n, K/2] and scales uint8 [n, K/32] into rows of
    those tensors. `roles` limits what the layout can hold quantized. `fp8_scale` is the leaf for
    the scales of weights that stay FP8, None if FP8 weights have to be decoded.
    """

    name: str
    summary: str
    tensors: Callable[[str, Shape], tuple[TensorInfo, ...]]
    config: Callable[[Described], ConfigEdit]
    payload: Payload = Payload.MXFP4
    streams: Callable[[Bytes, Bytes], tuple[Bytes, ...]] = neighbour_streams
    slot: Callable[[str], Slot | None] = unstacked
    roles: frozenset[Role] | None = None
    ignores: bool = False
    """Whether the config has patterns for the modules that are not quantized."""
    fp8_scale: str | None = None
    fp8_scale_dtypes: frozenset[str] = frozenset()
    model_types: frozenset[str] | None = None
    """Architectures (`model_type`) that the layout exists for; None for any."""
    activations: frozenset[str] = frozenset({"none"})
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})


def pair_of_leaves(
    codes: tuple[str, str], scales: tuple[str, str], codes_per_unit: int = 2
) -> Callable[[str, Shape], tuple[TensorInfo, ...]]:
    """`tensors` of a layout with (leaf, dtype) of codes and scales of any rank."""

    def tensors(module: str, shape: Shape) -> tuple[TensorInfo, ...]:
        lead, columns = shape[:-1], shape[-1]
        return (
            TensorInfo(module + codes[0], codes[1], (*lead, columns // codes_per_unit)),
            TensorInfo(module + scales[0], scales[1], (*lead, columns // BLOCK_SIZE)),
        )

    return tensors
