"""Quantize and dequantize on the device, to the bytes of the reference codec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from mxfp4.codec import check_dtype, check_finite, check_scales
from mxfp4.kernels.triton.codec_kernel import dequantize_kernel, quantize_kernel
from mxfp4.kernels.triton.device import INTERPRET, launch
from mxfp4.spec import (
    BLOCK_SIZE,
    E8M0_NAN,
    SCALE_BIAS,
    CodecOptions,
    ScaleRule,
    TieRule,
    ZeroSign,
)
from mxfp4.tensor import MXTensor, block_axis

TIES = (TieRule.EVEN, TieRule.ZERO, TieRule.AWAY)
"""Tie rules by their number in device code."""

ZERO_SIGNS = (ZeroSign.UNDERFLOW, ZeroSign.SOURCE, ZeroSign.DROP, ZeroSign.SET)
"""Zero signs by their number in device code."""


@dataclass(frozen=True)
class CodecLaunch:
    """Blocks and warps of one program."""

    blocks: int
    warps: int


QUANTIZE = CodecLaunch(blocks=128, warps=4)
DEQUANTIZE = CodecLaunch(blocks=128, warps=4)


def quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    rule: str = ScaleRule.EVEN,
    ties: str = TieRule.EVEN,
    zero_sign: str = ZeroSign.UNDERFLOW,
) -> MXTensor:
    """`mxfp4.codec.quantize` on the device; raises like it, so it waits for the device once.

    `encode` is the same without the check.
    """
    axis = block_axis(tuple(x.shape), axis)
    moved = x.detach().movedim(axis, -1)
    options = CodecOptions.named(rule=rule, ties=ties, zero_sign=zero_sign)
    codes, scales = encode(moved, options)
    if bool((scales == E8M0_NAN).any()):
        check_finite(x)
    return MXTensor(codes, scales, tuple(x.shape), axis)


def dequantize(t: MXTensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`mxfp4.codec.dequantize` on the device; waits for it once to check for scale byte 255."""
    check_scales(t.scales)
    return decode(t.codes, t.scales, dtype).movedim(-1, t.axis)


def encode(x: torch.Tensor, options: CodecOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] to codes uint8 [..., K/2] and scales uint8 [..., K/32], without waiting.

    A block with NaN or infinity gets scale byte 255. Raises `DtypeError` and `ShapeError`.
    """
    check_dtype(x.dtype)
    block_axis(tuple(x.shape), -1)
    x = x.contiguous()
    *lead, columns = x.shape
    blocks = x.numel() // BLOCK_SIZE
    codes = x.new_empty(*lead, columns // 2, dtype=torch.uint8)
    scales = x.new_empty(*lead, columns // BLOCK_SIZE, dtype=torch.uint8)
    if blocks:
        launch(
            quantize_kernel,
            (triton.cdiv(blocks, QUANTIZE.blocks),),
            x,
            codes.view(torch.int32),
            scales,
            blocks,
            BIAS=SCALE_BIAS[options.rule],
            SEARCH=options.rule is ScaleRule.SEARCH,
            TIES=TIES.index(options.ties),
            SIGN=ZERO_SIGNS.index(options.zero_sign),
            BLOCKS=QUANTIZE.blocks,
            num_warps=QUANTIZE.warps,
        )
    return codes, scales


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes uint8 [..., K/2] and scales uint8 [..., K/32] to values [..., K]; NaN for byte 255."""
    check_dtype(dtype)
    blocks = scales.numel()
    out = codes.new_empty(*codes.shape[:-1], codes.shape[-1] * 2, dtype=dtype)
    if blocks:
        launch(
            dequantize_kernel,
            (triton.cdiv(blocks, DEQUANTIZE.blocks),),
            codes.contiguous().view(torch.int32),
            scales.contiguous(),
            out,
            blocks,
            BLOCKS=DEQUANTIZE.blocks,
            INTERP=INTERPRET,
            num_warps=DEQUANTIZE.warps,
        )
    return out
