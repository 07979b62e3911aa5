"""The numbers of the format and the named choices around it; importable without torch.

An MXFP4 tensor (OCP Microscaling Formats v1.0) stores, for every block of 32 elements along one
axis, sixteen bytes of packed E2M1 codes and one E8M0 byte, the shared scale. Every other file
imports these constants from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from mxfp4.errors import RecipeError

_Choice = TypeVar("_Choice", bound=StrEnum)

BLOCK_SIZE = 32
"""Elements that share one scale (OCP MX v1.0, section 5.3)."""

BLOCK_BYTES = BLOCK_SIZE // 2
"""Bytes of packed codes of one block; two codes a byte, the even element in the low nibble."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7; bit 3 of a code is the sign (OCP MX v1.0, table 5)."""

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway values between neighbouring magnitudes; midpoint i lies between codes i and i + 1."""

E2M1_MAX = 6.0
E2M1_SIGN = 8
"""The sign bit of a code."""

E8M0_BIAS = 127
"""Scale byte b means 2^(b - 127)."""

E8M0_NAN = 255
"""The one scale byte that is not a power of two; never written."""

MAX_SCALE_BYTE = 252
"""The largest byte whose block stays finite in float32 and bfloat16: 6 * 2^125 < 2^128."""


class ScaleRule(StrEnum):
    """How the largest magnitude A of a block becomes its scale byte.

    Every rule but SEARCH is `((bits(A) + bias) >> 23) - 2` on the bits of A as a float32, with the
    bias of `SCALE_BIAS`, limited to 0..252.
    """

    EVEN = "even"
    """Round A to a power of two at 1.75, take floor(log2) - 2. Clips A in (6, 7) * 2^k to 6 and
    gives A in [3.5, 4) * 2^k the coarser grid. compressed-tensors, llm-compressor, Quark."""

    FLOOR = "floor"
    """floor(log2 A) - 2, the text of the OCP standard. Clips A in (6, 8) * 2^k, up to a quarter of
    the largest element. gguf, llama.cpp, AutoRound, torchao FLOOR."""

    RCEIL = "rceil"
    """ceil(log2(A / 6)). Never clips, and pays with a twice coarser grid whenever A is in
    (6, 8) * 2^k. ModelOpt, triton_kernels, MLX, torchao RCEIL."""

    CEIL = "ceil"
    """ceil(log2 A) - 2. Never clips, and leaves the largest code unused in every block: the worst
    error of all rules. Only to reproduce Quark's and torchao's `ceil`."""

    RFLOOR = "rfloor"
    """floor(log2(A / 6)). Clips every block whose A / 6 is no power of two, up to half of the
    largest element. Only to reproduce triton_kernels' ROUND_DOWN."""

    SEARCH = "search"
    """The byte with the least squared error among FLOOR - 1, FLOOR and FLOOR + 1 (equal errors:
    FLOOR first, then the larger). Never worse than EVEN or FLOOR on any block; two to three times
    the work."""


SCALE_BIAS = {
    ScaleRule.EVEN: 0x200000,
    ScaleRule.FLOOR: 0,
    ScaleRule.RCEIL: 0x3FFFFF,
    ScaleRule.CEIL: 0x7FFFFF,
    ScaleRule.RFLOOR: -0x400000,
    ScaleRule.SEARCH: 0,
}
"""What is added to the float32 bits of A before its exponent is read (SEARCH: of the middle)."""


class TieRule(StrEnum):
    """Which neighbour a value exactly between two elements becomes."""

    EVEN = "even"
    """The even code (IEEE 754 roundTiesToEven): compressed-tensors, Quark, torchao."""

    ZERO = "zero"
    """The smaller magnitude: gguf, llama.cpp, ModelOpt, MLX."""

    AWAY = "away"
    """The larger magnitude: triton_kernels."""


class ZeroSign(StrEnum):
    """When an element of magnitude zero has its sign bit set (code 8 instead of code 0)."""

    UNDERFLOW = "underflow"
    """A negative value that rounds to zero; both exact zeros give code 0. compressed-tensors."""

    SOURCE = "source"
    """Whenever the source has it, negative zero too. torchao, triton_kernels."""

    DROP = "drop"
    """Never. gguf, MLX, Quark."""

    SET = "set"
    """Negative values that round to zero and *both* exact zeros. ModelOpt."""


@dataclass(frozen=True)
class CodecOptions:
    """Every numeric choice of the encoder; the default is the canonical rule of this library.

    Strings are accepted for the enums. `RecipeError` names the choices when one is unknown.
    """

    rule: ScaleRule = ScaleRule.EVEN
    ties: TieRule = TieRule.EVEN
    zero_sign: ZeroSign = ZeroSign.UNDERFLOW

    @classmethod
    def named(cls, *, rule: str, ties: str, zero_sign: str) -> CodecOptions:
        """Options from names or enums; `RecipeError` lists the choices when one is unknown."""
        return cls(
            _choice(ScaleRule, rule, "scale rule"),
            _choice(TieRule, ties, "tie rule"),
            _choice(ZeroSign, zero_sign, "zero sign"),
        )

    def __post_init__(self) -> None:
        """Turn names into enums."""
        object.__setattr__(self, "rule", _choice(ScaleRule, self.rule, "scale rule"))
        object.__setattr__(self, "ties", _choice(TieRule, self.ties, "tie rule"))
        object.__setattr__(self, "zero_sign", _choice(ZeroSign, self.zero_sign, "zero sign"))


def _choice(kind: type[_Choice], name: str, what: str) -> _Choice:
    try:
        return kind(name)
    except ValueError:
        known = ", ".join(kind)
        raise RecipeError(f"unknown {what} {name!r}", hint=f"choose one of {known}") from None
