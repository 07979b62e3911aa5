"""Read one MXFP4 linear layer of a checkpoint as a module that computes in four bits."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import numpy as np
import torch

from mxfp4.converters.checkpoint import Checkpoint, SourceShard, open_checkpoint
from mxfp4.converters.header import StoredTensor
from mxfp4.errors import CorruptCheckpointError, TensorNotFoundError, UnsupportedFormatError
from mxfp4.kernels.linear import MXFP4Linear
from mxfp4.spec import BLOCK_SIZE
from mxfp4.tensor import MXTensor

WEIGHT_NAMES = (("weight_packed", "weight_scale"), ("weight", "weight_scale"))
"""What layouts with one tensor per module call its codes and its scales."""

_BYTE_DTYPES = {"U8", "F4", "F8_E8M0"}
_FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load_linear(
    checkpoint: str | Path | Checkpoint,
    name: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> MXFP4Linear:
    """The module `name`, such as "model.layers.0.mlp.down_proj", packed for `dtype` activations.

    Reads only its own bytes. Raises `TensorNotFoundError` with the nearest names,
    `UnsupportedFormatError` for a module that is not MXFP4, and the errors of `open_checkpoint`.
    """
    found = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    tensors = {t.info.name: (found.shards[number], t) for number, t in found.located()}
    for codes_name, scales_name in WEIGHT_NAMES:
        codes, scales = tensors.get(f"{name}.{codes_name}"), tensors.get(f"{name}.{scales_name}")
        if codes and scales and codes[1].info.dtype in _BYTE_DTYPES:
            weight = _weight(_read_bytes(*codes), _read_bytes(*scales), name)
            bias = tensors.get(f"{name}.bias")
            values = None if bias is None else _read_float(*bias).to(dtype)
            return MXFP4Linear.from_mxtensor(weight.to(device), values, dtype=dtype).to(device)
    raise _explain(name, tensors)


def _weight(codes: torch.Tensor, scales: torch.Tensor, name: str) -> MXTensor:
    if codes.ndim != 2 or scales.shape != (codes.shape[0], codes.shape[1] * 2 // BLOCK_SIZE):
        raise CorruptCheckpointError(
            f"codes {list(codes.shape)} and scales {list(scales.shape)} are no [N, K] weight",
            tensor=name,
        )
    return MXTensor(codes, scales, (codes.shape[0], codes.shape[1] * 2))


def _explain(
    name: str, tensors: dict[str, tuple[SourceShard, StoredTensor]]
) -> TensorNotFoundError | UnsupportedFormatError:
    """Why there is no such module, and what there is instead."""
    plain = tensors.get(f"{name}.weight")
    if plain is not None:
        return UnsupportedFormatError(
            f"the weight is {plain[1].info.dtype}, not MXFP4",
            tensor=name,
            hint="it was kept in its source dtype; load it as a plain linear layer",
        )
    modules = {tensor.rpartition(".")[0] for tensor in tensors}
    near = difflib.get_close_matches(name, sorted(modules), n=3, cutoff=0.4)
    return TensorNotFoundError(
        "there is no such module",
        tensor=name,
        hint=f"near it: {', '.join(near)}" if near else "see `mxfp4 inspect` for the names",
    )


def _read(shard: SourceShard, tensor: StoredTensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    shard.require_unchanged()
    data = np.empty(tensor.info.byte_count, np.uint8)
    with open(shard.path, "rb") as file:
        done = 0
        while done < data.nbytes:
            count = os.preadv(file.fileno(), [data[done:].data], tensor.offset + done)
            if not count:
                raise CorruptCheckpointError(
                    "the file ended early", file=shard.name, tensor=tensor.info.name
                )
            done += count
    return data


def _read_bytes(shard: SourceShard, tensor: StoredTensor) -> torch.Tensor:
    """uint8; a four-bit dtype counts elements, of which there are two in a byte."""
    shape = list(tensor.info.shape)
    if tensor.info.dtype == "F4":
        shape[-1] //= 2
    return torch.from_numpy(_read(shard, tensor)).view(*shape)


def _read_float(shard: SourceShard, tensor: StoredTensor) -> torch.Tensor:
    dtype = _FLOAT_DTYPES.get(tensor.info.dtype)
    if dtype is None:
        raise UnsupportedFormatError(f"a bias of dtype {tensor.info.dtype}", file=shard.name)
    return torch.from_numpy(_read(shard, tensor)).view(dtype).view(*tensor.info.shape)
