"""Products on devices whose matrix units take scaled blocks; which ones, and in which formats.

`CAPABILITIES` lists what the compiler was seen to turn into native instructions without spills; the
gate compiles every entry. What is not listed is refused: elsewhere the same code would compile to a
slow emulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import triton

from mxfp4.errors import BackendUnavailableError, ShapeError
from mxfp4.kernels.triton import codec
from mxfp4.kernels.triton.device import INTERPRET, describe, launch
from mxfp4.kernels.triton.native_kernel import native_kernel
from mxfp4.spec import BLOCK_SIZE, E8M0_BIAS, CodecOptions
from mxfp4.tensor import MXTensor

E4M3_MAX_EXPONENT = 8
"""floor(log2(448)), 448 being the largest float8 e4m3 number (OCP MX v1.0, section 6.3)."""


class ActivationFormat(StrEnum):
    """How x enters the product."""

    SAME = "same"
    """As it is: bfloat16 or float16. The weight is converted inside the product."""

    MXFP8 = "mxfp8"
    """Blocks of 32 of float8 e4m3 with a shared scale: rounds x to 4 significant bits."""

    MXFP4 = "mxfp4"
    """Blocks of 32 of E2M1 with a shared scale: rounds x to 2 significant bits."""


@dataclass(frozen=True)
class NativeTile:
    """Tile and launch of one capability, and the matrix instruction that the gate expects.

    `fast` lets the compiler skip its handling of scale byte 255, which is checked for beforehand.
    """

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int
    instruction: str
    fast: bool = False


CAPABILITIES: dict[tuple[str, ActivationFormat], NativeTile] = {
    ("sm_100", ActivationFormat.MXFP8): NativeTile(128, 128, 128, 4, 3, "UTCQMMA"),
    ("sm_100", ActivationFormat.MXFP4): NativeTile(128, 128, 256, 4, 3, "UTCOMMA"),
    ("sm_120", ActivationFormat.MXFP4): NativeTile(128, 128, 128, 8, 2, "OMMA"),
    ("gfx950", ActivationFormat.MXFP8): NativeTile(128, 128, 128, 8, 2, "v_mfma_scale_.*"),
    ("gfx950", ActivationFormat.MXFP4): NativeTile(128, 128, 256, 8, 2, "v_mfma_scale_.*"),
    ("gfx950", ActivationFormat.SAME): NativeTile(16, 64, 128, 4, 2, "v_mfma_f32.*", fast=True),
    ("gfx942", ActivationFormat.SAME): NativeTile(16, 128, 128, 4, 2, "v_mfma_f32.*", fast=True),
}
"""By architecture and activation format. Compiled and gated; none has run on hardware yet."""

INTERPRETED = NativeTile(16, 32, 128, 4, 1, "")


def native_matmul(
    x: torch.Tensor,
    w: MXTensor,
    activations: ActivationFormat,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x w^T + bias for x [M, K] and w [N, K] in checkpoint order, y [M, N] as x.

    The scales of `w` must not hold 255; that is not checked here. Raises `BackendUnavailableError`
    where the device has no native form.
    """
    if x.ndim != 2 or len(w.shape) != 2 or w.axis != 1 or x.shape[1] != w.shape[1]:
        raise ShapeError(
            f"x [M, K] and w [N, K] with blocks along K are needed, seen {list(x.shape)} and "
            f"{list(w.shape)}"
        )
    tile = capability(x.device, activations)
    values, scales, form = as_operand(x, activations)
    out = x.new_empty(x.shape[0], w.shape[0])
    if not out.numel():
        return out
    grid = (triton.cdiv(x.shape[0], tile.tokens), triton.cdiv(w.shape[0], tile.rows))
    launch(
        native_kernel,
        grid,
        values,
        values if scales is None else scales,
        w.codes,
        w.scales,
        out if bias is None else bias,
        out,
        x.shape[0],
        w.shape[0],
        x.shape[1],
        values.stride(0),
        1 if scales is None else scales.stride(0),
        w.codes.stride(0),
        w.scales.stride(0),
        out.stride(0),
        X_FORMAT=form,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        FAST=tile.fast,
        EVEN_K=x.shape[1] % tile.depth == 0,
        HAS_BIAS=bias is not None,
        INTERP=INTERPRET,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def capability(device: torch.device, activations: ActivationFormat) -> NativeTile:
    """The tile for a device and format; `BackendUnavailableError` if it is not in the table."""
    architecture = describe(device).architecture
    if INTERPRET:
        return INTERPRETED
    tile = CAPABILITIES.get((architecture, activations))
    if tile is None:
        able = [f"{name} on {arch}" for arch, name in CAPABILITIES]
        raise BackendUnavailableError(
            f"{architecture} has no native product for {activations.value} activations",
            hint=f"use mxfp4.pack and mxfp4.matmul; native are {', '.join(able)}",
        )
    return tile


def as_operand(
    x: torch.Tensor, activations: ActivationFormat
) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """x as values, scales and the name of its format for `tl.dot_scaled`."""
    if activations is ActivationFormat.SAME:
        return x.contiguous(), None, "bf16" if x.dtype == torch.bfloat16 else "fp16"
    if activations is ActivationFormat.MXFP4:
        codes, scales = codec.encode(x, CodecOptions())
        return codes, scales, "e2m1"
    values, scales = quantize_mxfp8(x)
    return values, scales, "e4m3"


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] as float8 e4m3 [M, K] and scale bytes uint8 [M, K/32], by the rule of the standard.

    The shared exponent is floor(log2 amax) - 8; what is beyond 448 saturates.
    """
    blocks = x.float().reshape(x.shape[0], -1, BLOCK_SIZE)
    amax = blocks.abs().amax(-1)
    byte = ((amax.view(torch.int32) >> 23) - E4M3_MAX_EXPONENT).clamp(0, 2 * E8M0_BIAS)
    scaled = blocks * torch.exp2((E8M0_BIAS - byte).float()).unsqueeze(-1)
    largest = torch.finfo(torch.float8_e4m3fn).max
    values = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn)
    return values.flatten(-2), byte.to(torch.uint8)
