"""E2M1 elements: from scaled values to four-bit codes and back, and how two codes share a byte.

Bit 3 of a code is the sign, bits 0 to 2 index `E2M1_VALUES`. There is no NaN and no infinity.
"""

from __future__ import annotations

import torch

from mxfp4.errors import ShapeError
from mxfp4.spec import E2M1_MIDPOINTS, E2M1_SIGN, E2M1_VALUES, TieRule, ZeroSign


def encode_elements(
    scaled: torch.Tensor,
    *,
    ties: TieRule = TieRule.EVEN,
    zero_sign: ZeroSign = ZeroSign.UNDERFLOW,
    source: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of the nearest elements; magnitudes above 6 become 6.

    `scaled` is float32 of any shape, finite; the result is uint8 of that shape. `source` holds the
    values before scaling, where scaling may have turned one into zero: only its zeros and signs
    are looked at.

    >>> encode_elements(torch.tensor([0.0, 0.25, -0.75, 5.0, -100.0])).tolist()
    [0, 0, 10, 6, 15]
    """
    signed = scaled if source is None else source
    code = nearest_magnitudes(scaled.abs(), ties)
    negative = signed.signbit()
    if zero_sign is ZeroSign.UNDERFLOW:
        negative &= signed != 0
    elif zero_sign is ZeroSign.DROP:
        negative &= code != 0
    elif zero_sign is ZeroSign.SET:
        negative |= signed == 0
    return code | (negative.to(torch.uint8) * E2M1_SIGN)


def nearest_magnitudes(magnitude: torch.Tensor, ties: TieRule) -> torch.Tensor:
    """Codes 0 to 7 (uint8) of the elements nearest to float32 magnitudes."""
    magnitude = magnitude.contiguous()
    midpoints = torch.tensor(E2M1_MIDPOINTS, device=magnitude.device)
    # Strictly between two midpoints both counts agree; on a midpoint they are its two neighbours.
    lower = torch.bucketize(magnitude, midpoints, right=False)
    upper = torch.bucketize(magnitude, midpoints, right=True)
    if ties is TieRule.ZERO:
        code = lower
    elif ties is TieRule.AWAY:
        code = upper
    else:
        code = torch.where(lower % 2 == 0, lower, upper)
    return code.to(torch.uint8)


def decode_elements(codes: torch.Tensor) -> torch.Tensor:
    """Float32 values of unpacked codes (uint8, 0 to 15), same shape.

    >>> decode_elements(torch.tensor([0, 1, 7, 15], dtype=torch.uint8)).tolist()
    [0.0, 0.5, 6.0, -6.0]
    """
    positive = torch.tensor(E2M1_VALUES, device=codes.device)
    return torch.cat([positive, -positive])[codes.long()]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: uint8 [..., K] to uint8 [..., K/2], the even element in the low nibble.

    >>> [hex(byte) for byte in pack_codes(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist()]
    ['0x21', '0x43']
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ShapeError(f"codes must be uint8 [..., even], seen {codes.dtype} {[*codes.shape]}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [..., K/2] to uint8 [..., K]."""
    if packed.dtype != torch.uint8:
        raise ShapeError(f"packed codes must be uint8, seen {packed.dtype}")
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
