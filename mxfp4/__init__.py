"""MXFP4 for PyTorch: codec, checkpoint conversion, calibration and kernels behind one import.

Names are looked up on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mxfp4.errors import Mxfp4Error
from mxfp4.version import __version__

if TYPE_CHECKING:
    pass

_HOME: dict[str, str] = {}

__all__ = ["Mxfp4Error", "__version__"]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mxfp4' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
