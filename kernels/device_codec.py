"""Which implementation of the codec works on tensors that are not on a CPU, and why.

The Triton kernels give the bytes of the reference for every scale rule, tie rule and zero sign.
They do not weigh errors, and statistics are measured from their result in torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from mxfp4.kernels.backends import REFERENCE, block_codec

log = logging.getLogger(__name__)

TRITON = "triton"


@dataclass(frozen=True)
class DeviceCodec:
    """An implementation by name, "triton" or "reference", and why it was chosen."""

    name: str
    explanation: str


def device_codec(device: torch.device, *, weighted: bool = False) -> DeviceCodec:
    """The implementation for tensors of a device; `weighted` for searches with importance.

    `use_backend("reference")` forces the reference here too; other names choose among those of the
    CPU only. Where there are no kernels, the reference works in chunks, and a warning says so once.
    """
    if block_codec().name == REFERENCE:
        return DeviceCodec(REFERENCE, "forced by use_backend")
    if weighted:
        return DeviceCodec(REFERENCE, "the kernels take no importance weights")
    if obstacle := _obstacle(device):
        return DeviceCodec(REFERENCE, obstacle)
    return DeviceCodec(TRITON, "kernels, one pass over the tensor")


@cache
def _obstacle(device: torch.device) -> str:
    """Why the kernels cannot run on a device; empty if they can."""
    try:
        from mxfp4.kernels.triton.device import supports
    except ImportError as error:
        found = f"Triton cannot be imported: {error}"
    else:
        found = "" if supports(device) else f"there are no kernels for {device}"
    if found:
        log.warning("quantizing on %s in torch, which is slower: %s", device, found)
    return found
