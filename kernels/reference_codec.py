"""The torch reference behind the array interface of the other implementations."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mxfp4 import codec
from mxfp4.elements import pack_codes
from mxfp4.kernels.fallback import float_values
from mxfp4.spec import BLOCK_SIZE, CodecOptions
from mxfp4.statistics import TensorStatistics
from mxfp4.tensor import MXTensor


def encode_blocks(
    source: NDArray[np.generic],
    dtype: str,
    options: CodecOptions,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    *,
    importance: NDArray[np.float32] | None = None,
    statistics: bool = False,
) -> tuple[int, TensorStatistics | None]:
    """`mxfp4.kernels.fallback.encode_blocks` with the reference."""
    values = torch.from_numpy(float_values(source, dtype).copy())
    bad = (~values.isfinite()).any(-1)
    if bad.any():
        return int(bad.int().argmax()), None
    weights = None
    if importance is not None:
        rows = np.arange(len(source)) % len(importance)
        weights = torch.from_numpy(importance[rows])
    found, byte = codec.encode_blocks(values, options, weights)
    codes[...] = pack_codes(found).numpy()
    scales[...] = byte.numpy()
    return -1, codec.measure(values, found, byte) if statistics else None


def decode_blocks(
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    out: NDArray[np.generic],
    dtype: str,
) -> None:
    """`mxfp4.kernels.fallback.decode_blocks` with the reference."""
    packed, byte = torch.from_numpy(codes.copy()), torch.from_numpy(scales.copy())
    tensor = MXTensor(packed, byte[:, None], (len(scales), BLOCK_SIZE))
    kind = torch.bfloat16 if dtype == "BF16" else torch.float32
    values = codec.dequantize(tensor, dtype=kind, nan_scale="nan")
    out[...] = (
        values.view(torch.int16 if dtype == "BF16" else torch.float32).numpy().view(out.dtype)
    )
