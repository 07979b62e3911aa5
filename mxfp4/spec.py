"""The numbers of the format and the named choices around it; importable without torch.

An MXFP4 tensor (OCP Microscaling Formats v1.0) stores, for every block of 32 elements along one
axis, sixteen bytes of packed E2M1 codes and one E8M0 byte, the shared scale. Every other file
imports these constants from here.
"""

from __future__ import annotations

from enum import StrEnum

BLOCK_SIZE = 32
"""Elements that share one scale (OCP MX v1.0, section 5.3)."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7; bit 3 of a code is the sign (OCP MX v1.0, table 5)."""

E2M1_MAX = 6.0
E8M0_BIAS = 127
"""Scale byte b means 2^(b - 127)."""

E8M0_NAN = 255
"""The one scale byte that is not a power of two; never written."""

MAX_SCALE_BYTE = 252
"""The largest byte whose block stays finite in float32 and bfloat16: 6 * 2^125 < 2^128."""


class ScaleRule(StrEnum):
    """How the largest magnitude A of a block becomes its scale byte."""

    EVEN = "even"
    FLOOR = "floor"
    RCEIL = "rceil"
    SEARCH = "search"


class TieRule(StrEnum):
    """Which neighbour a value exactly between two elements becomes."""

    EVEN = "even"
    ZERO = "zero"
    AWAY = "away"
