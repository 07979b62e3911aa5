"""What a tensor's device is to the kernels: an architecture, its cores, or the interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton import knobs

from mxfp4.errors import BackendUnavailableError
from mxfp4.kernels.triton.configs import TABLES

INTERPRET: bool = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors; decided when they are defined."""

INTERPRETED_ARCHITECTURE = "sm_90"
"""Whose table the interpreter uses."""


@dataclass(frozen=True)
class Device:
    """`architecture` as in `configs.TABLES`, `cores` that run programs side by side."""

    architecture: str
    cores: int


MISCOMPILED = {"sm_100": (3, 9), "sm_103": (3, 9)}
"""First Triton release without a defect: 3.6 compiles tiles of 128 tokens to a bare trap there."""


def supports(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device."""
    if device.type != "cuda":
        return INTERPRET and device.type == "cpu"
    try:
        return not INTERPRET and describe(device).architecture in TABLES
    except BackendUnavailableError:
        return False


def describe(device: torch.device) -> Device:
    """Facts of the device; `BackendUnavailableError` for a CPU outside the interpreter."""
    if device.type == "cuda":
        return _describe_gpu(torch.cuda.current_device() if device.index is None else device.index)
    if INTERPRET and device.type == "cpu":
        return Device(INTERPRETED_ARCHITECTURE, cores=1)
    raise BackendUnavailableError(
        f"the Triton kernels do not run on {device.type}", hint="use backend='reference'"
    )


@cache
def _describe_gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Device(properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    architecture = f"sm_{properties.major}{properties.minor}"
    check_release(architecture, triton.__version__)
    return Device(architecture, properties.multi_processor_count)


def check_release(architecture: str, release: str) -> None:
    """Raise `BackendUnavailableError` if a Triton release miscompiles for an architecture."""
    needed = MISCOMPILED.get(architecture)
    if needed and tuple(map(int, release.split(".")[:2])) < needed:
        raise BackendUnavailableError(
            f"Triton {release} miscompiles these kernels for {architecture}",
            hint=f"install triton>={needed[0]}.{needed[1]}, or use backend='reference'",
        )


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Start a Triton kernel; a function because the subscript form has no types."""
    kernel[grid](*arguments, **options)
