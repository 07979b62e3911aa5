"""The words of this package: what a tensor is for, and how stacked experts lie in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

Arrangement = Literal["single", "concatenated", "interleaved"]


class Role(StrEnum):
    """What a stored tensor does in the model."""

    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    MLP = "mlp"
    ATTENTION = "attention"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    SHARED_EXPERT_GATE = "shared_expert_gate"
    ATTENTION_GATE = "attention_gate"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    BIAS = "bias"
    CONV = "conv"
    SSM_SMALL = "ssm_small"
    INDEXER = "indexer"
    MTP = "mtp"
    VISION = "vision"
    VISION_PROJECTOR = "vision_projector"
    OTHER_LINEAR = "other_linear"
    OTHER = "other"


class Kind(StrEnum):
    """A finer word where one role holds things that are treated differently."""

    PLAIN = ""
    MLA_DOWN = "mla_down"
    MLA_UP = "mla_up"
    LINEAR_ATTENTION = "linear_attention"
    SSM_PROJECTION = "ssm_projection"
    LATENT_MOE = "latent_moe"
    KV_COMPRESSOR = "kv_compressor"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """Several experts in one stored tensor.

    `[E, N, K]` or `[E, K, N]`; with `flattened`, the first two axes are one: `[E*N, K]` or
    `[E*K, N]`. Along N lie the `projections`, one after the other ("concatenated"), row by row in
    turn ("interleaved"), or only one ("single"). `output_axis` is N's axis in the stored tensor.
    """

    expert_count: int
    output_axis: int
    projections: tuple[str, ...]
    arrangement: Arrangement
    expert_axis: int = 0
    flattened: bool = False


class TensorRole(NamedTuple):
    """What one stored tensor is, where it sits, and why we think so.

    `axis` is the contraction axis of the stored tensor (None where no product sums over it, or
    where it cannot be told); `group` names the tensors that engines fuse, which share one
    decision; `inner` is the role that the tensor would have in the trunk, for `Role.MTP`.
    """

    role: Role
    axis: int | None
    layer: int | None
    expert: int | None
    group: str | None
    bank: ExpertBank | None
    evidence: str
    recognised: bool
    kind: Kind = Kind.PLAIN
    inner: Role | None = None

    @property
    def verdict(self) -> tuple[object, ...]:
        """Everything but the place in the model: what all tensors of one kind share."""
        return self[:2] + self[5:]

    def contraction_length(self, shape: Sequence[int]) -> int | None:
        """K of a tensor of this role and `shape`, per expert for a flattened bank."""
        if self.axis is None or not -len(shape) <= self.axis < len(shape):
            return None
        length = shape[self.axis]
        if self.bank is not None and self.bank.flattened and self.axis == self.bank.expert_axis:
            return length // self.bank.expert_count
        return length

    def output_length(self, shape: Sequence[int]) -> int | None:
        """N of a tensor of this role and `shape`, per expert for a bank."""
        length = self.contraction_length(shape)
        if length is None or not length:
            return None
        experts = self.bank.expert_count if self.bank is not None else 1
        return math.prod(shape) // (length * experts)
