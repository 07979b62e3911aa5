"""MXFP4 for PyTorch: codec, checkpoint conversion, calibration and kernels behind one import.

Names are looked up on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mxfp4.errors import Mxfp4Error
from mxfp4.version import __version__

if TYPE_CHECKING:
    from mxfp4.converters.load_linear import load_linear
    from mxfp4.elements import pack_codes, unpack_codes
    from mxfp4.kernels.backends import backends, use_backend
    from mxfp4.kernels.codec import dequantize, quantize, quantize_with_statistics
    from mxfp4.kernels.experts import MXFP4Experts
    from mxfp4.kernels.linear import MXFP4Linear
    from mxfp4.kernels.products import grouped_matmul, matmul
    from mxfp4.kernels.triton.layout import PackedWeight, pack, unpack
    from mxfp4.spec import BLOCK_SIZE, E2M1_VALUES, ScaleRule, TieRule, ZeroSign
    from mxfp4.statistics import TensorStatistics
    from mxfp4.tensor import MXTensor

_HOME: dict[str, str] = {
    "BLOCK_SIZE": "mxfp4.spec",
    "E2M1_VALUES": "mxfp4.spec",
    "MXFP4Experts": "mxfp4.kernels.experts",
    "MXFP4Linear": "mxfp4.kernels.linear",
    "MXTensor": "mxfp4.tensor",
    "PackedWeight": "mxfp4.kernels.triton.layout",
    "ScaleRule": "mxfp4.spec",
    "TensorStatistics": "mxfp4.statistics",
    "TieRule": "mxfp4.spec",
    "ZeroSign": "mxfp4.spec",
    "backends": "mxfp4.kernels.backends",
    "dequantize": "mxfp4.kernels.codec",
    "grouped_matmul": "mxfp4.kernels.products",
    "load_linear": "mxfp4.converters.load_linear",
    "matmul": "mxfp4.kernels.products",
    "pack": "mxfp4.kernels.triton.layout",
    "pack_codes": "mxfp4.elements",
    "quantize": "mxfp4.kernels.codec",
    "quantize_with_statistics": "mxfp4.kernels.codec",
    "unpack": "mxfp4.kernels.triton.layout",
    "unpack_codes": "mxfp4.elements",
    "use_backend": "mxfp4.kernels.backends",
}

__all__ = [
    "BLOCK_SIZE",
    "E2M1_VALUES",
    "MXFP4Experts",
    "MXFP4Linear",
    "MXTensor",
    "Mxfp4Error",
    "PackedWeight",
    "ScaleRule",
    "TensorStatistics",
    "TieRule",
    "ZeroSign",
    "__version__",
    "backends",
    "dequantize",
    "grouped_matmul",
    "load_linear",
    "matmul",
    "pack",
    "pack_codes",
    "quantize",
    "quantize_with_statistics",
    "unpack",
    "unpack_codes",
    "use_backend",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mxfp4' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
