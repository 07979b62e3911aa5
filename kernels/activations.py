"""What joins the gate and up halves of an expert's first product."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """The kinds of activation."""

    NONE = "none"
    """Nothing: the rows of the weight are the outputs."""

    SWIGLU = "swiglu"
    """silu(gate) * up."""

    SWIGLU_OAI = "swiglu-oai"
    """With gate at most `limit` and up within +-`limit`: gate * sigmoid(alpha * gate) * (up + 1).
    The activation of gpt-oss."""


@dataclass(frozen=True)
class ActivationOptions:
    """The activation and its two constants, which only SWIGLU_OAI reads."""

    kind: Activation = Activation.SWIGLU
    limit: float = 7.0
    alpha: float = 1.702


NO_ACTIVATION = ActivationOptions(Activation.NONE)
