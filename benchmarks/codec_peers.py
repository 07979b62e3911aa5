"""MXFP4 encoders of other packages behind one signature, for whatever of them is installed.

Each entry makes a function from a BF16 tensor [N, K] to packed codes uint8 [N, K/2] and scale bytes
uint8 [N, K/32] in neighbour packing, and names the options under which this library writes the
same bytes. `GGML_QUANTS` points at a shared library built from ggml's ggml-quants.c.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxfp4.producers import PRODUCERS
from mxfp4.spec import CodecOptions

Encoded = tuple[NDArray[np.uint8], NDArray[np.uint8]]
Encoder = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Peer:
    """One other encoder: `run` is timed, `unpack` turns its result into comparable bytes."""

    name: str
    package: str
    options: CodecOptions
    run: Encoder
    unpack: Callable[[Any], Encoded]


def torchao() -> Peer:
    formats: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
    mode: Any = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode.EVEN

    def run(x: torch.Tensor) -> Any:
        return formats.to_mx(x, torch.float4_e2m1fn_x2, 32, mode)

    def unpack(result: Any) -> Encoded:
        scales, codes = (part.view(torch.uint8).numpy() for part in result)
        return codes, scales

    return Peer("torchao", "torchao", PRODUCERS["torchao-even"], run, unpack)


def compressed_tensors() -> Peer:
    compressor: Any = import_module("compressed_tensors.compressors").MXFP4PackedCompressor
    helpers: Any = import_module("compressed_tensors.quantization.utils.helpers")
    presets: Any = import_module("compressed_tensors.quantization")
    scheme = presets.preset_name_to_scheme("MXFP4A16", ["Linear"])

    def run(x: torch.Tensor) -> Any:
        blocks = x.view(x.shape[0], -1, 32)
        scale, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        return compressor.compress({"weight": x, "weight_scale": scale}, scheme)

    def unpack(result: Any) -> Encoded:
        return result["weight_packed"].numpy(), result["weight_scale"].view(torch.uint8).numpy()

    options = PRODUCERS["compressed-tensors"]
    return Peer("compressed-tensors", "compressed-tensors", options, run, unpack)


def gguf() -> Peer:
    kind: Any = import_module("gguf").GGMLQuantizationType.MXFP4
    quants: Any = import_module("gguf.quants")

    def run(x: torch.Tensor) -> Any:
        return quants.quantize(x.float().numpy(), kind)

    return Peer("gguf (numpy)", "gguf", PRODUCERS["gguf"], run, _from_halves)


def ggml() -> Peer:
    library = ctypes.CDLL(os.environ["GGML_QUANTS"], mode=os.RTLD_LAZY)
    quantize_row = library.quantize_row_mxfp4_ref
    quantize_row.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    quantize_row.restype = None

    def run(x: torch.Tensor) -> Any:
        floats = x.float()
        out = np.empty((x.shape[0], x.shape[1] // 32 * 17), np.uint8)
        quantize_row(floats.data_ptr(), out.ctypes.data, floats.numel())
        return out

    return Peer("ggml (C)", "", PRODUCERS["llama.cpp"], run, _from_halves)


def ml_dtypes() -> Peer:
    """What a few lines of numpy with the dtypes of ml_dtypes give."""
    element: Any = import_module("ml_dtypes").float4_e2m1fn

    def run(x: torch.Tensor) -> Any:
        blocks = x.float().numpy().reshape(x.shape[0], -1, 32)
        amax = np.abs(blocks).max(axis=-1)
        bits = (amax.view(np.uint32) + np.uint32(0x200000)) >> np.uint32(23)
        byte = np.maximum(bits.astype(np.int32) - 2, 0)
        scaled = np.ldexp(blocks, 127 - byte[..., None])
        code = np.clip(scaled, -6, 6).astype(element).view(np.uint8).reshape(x.shape)
        return code[:, 0::2] | (code[:, 1::2] << 4), byte.astype(np.uint8)

    return Peer("numpy + ml_dtypes", "ml_dtypes", PRODUCERS["torchao-even"], run, lambda r: r)


def _from_halves(blocks: NDArray[Any]) -> Encoded:
    """Neighbour packing of gguf's blocks: a scale byte, then elements j and j + 16 in byte j."""
    parts = blocks.reshape(len(blocks), -1, 17)
    code = np.concatenate([parts[..., 1:] & 15, parts[..., 1:] >> 4], axis=-1)
    packed: NDArray[Any] = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed.reshape(len(blocks), -1), parts[..., 0]


PEERS = (torchao, compressed_tensors, gguf, ggml, ml_dtypes)


def installed() -> tuple[list[Peer], dict[str, str], list[str]]:
    """The peers that can run here, their versions, and why the others cannot."""
    found, versions, missing = [], {}, []
    for make in PEERS:
        try:
            peer = make()
        except (ImportError, KeyError, OSError, AttributeError) as error:
            missing.append(f"{make.__name__}: {type(error).__name__} {error}")
            continue
        found.append(peer)
        try:
            versions[peer.name] = version(peer.package) if peer.package else "local build"
        except PackageNotFoundError:
            versions[peer.name] = "unknown"
    return found, versions, missing
