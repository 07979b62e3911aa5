"""Every kind of source that is not plain, by name."""

from __future__ import annotations

from collections.abc import Mapping

from mxfp4.converters.sources import mxfp4, scaled
from mxfp4.converters.sources.types import Storage

STORAGES: Mapping[str, Storage] = {
    "mxfp4": mxfp4.STORAGE,
    "mxfp4-gguf": mxfp4.GGUF_STORAGE,
    "fp8": scaled.FP8_STORAGE,
    "int4": scaled.INT4_STORAGE,
    "nvfp4": scaled.NVFP4_STORAGE,
}
"""How each kind becomes values, or codes where it holds MXFP4."""

PACKED = frozenset(name for name, storage in STORAGES.items() if storage.packed is not None)
"""The kinds that hold MXFP4; nothing but their shape decides how many bytes they have."""
