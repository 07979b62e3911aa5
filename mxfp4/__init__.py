"""MXFP4 for PyTorch: codec, checkpoint conversion, calibration and kernels behind one import.

Names are looked up on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mxfp4.errors import Mxfp4Error
from mxfp4.version import __version__

if TYPE_CHECKING:
    from mxfp4.elements import pack_codes, unpack_codes
    from mxfp4.kernels.backends import backends, use_backend
    from mxfp4.kernels.codec import dequantize, quantize, quantize_with_statistics
    from mxfp4.spec import BLOCK_SIZE, E2M1_VALUES, ScaleRule, TieRule, ZeroSign
    from mxfp4.statistics import TensorStatistics
    from mxfp4.tensor import MXTensor

_HOME: dict[str, str] = {
    "BLOCK_SIZE": "mxfp4.spec",
    "E2M1_VALUES": "mxfp4.spec",
    "MXTensor": "mxfp4.tensor",
    "ScaleRule": "mxfp4.spec",
    "TensorStatistics": "mxfp4.statistics",
    "TieRule": "mxfp4.spec",
    "ZeroSign": "mxfp4.spec",
    "backends": "mxfp4.kernels.backends",
    "dequantize": "mxfp4.kernels.codec",
    "pack_codes": "mxfp4.elements",
    "quantize": "mxfp4.kernels.codec",
    "quantize_with_statistics": "mxfp4.kernels.codec",
    "unpack_codes": "mxfp4.elements",
    "use_backend": "mxfp4.kernels.backends",
}

__all__ = [
    "BLOCK_SIZE",
    "E2M1_VALUES",
    "MXTensor",
    "Mxfp4Error",
    "ScaleRule",
    "TensorStatistics",
    "TieRule",
    "ZeroSign",
    "__version__",
    "backends",
    "dequantize",
    "pack_codes",
    "quantize",
    "quantize_with_statistics",
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
