"""Calibrate one filled decoder layer: observe, fold, round, put the rounded weights in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from mxfp4.calibration import folding
from mxfp4.calibration.folds import Folds
from mxfp4.calibration.methods import FOLDING_METHODS, MethodOptions, Outcome, round_stack
from mxfp4.calibration.moments import Moments
from mxfp4.calibration.refit import RouterRefit
from mxfp4.calibration.rounding import Rounded, round_even
from mxfp4.calibration.streaming.capture import (
    Routes,
    expert_function,
    first_moments,
    layer_prior,
    observe,
    second_moments,
)
from mxfp4.calibration.streaming.layout import Slot
from mxfp4.calibration.streaming.parts import (
    ATTENTION_STAGE,
    OTHER_STAGE,
    BankPart,
    LinearPart,
    matrix,
)
from mxfp4.calibration.streaming.walk import Visit


@dataclass(frozen=True)
class ModuleResult:
    """Codes uint8 [N, K/2] and scales uint8 [N, K/32] of one module, and how it went."""

    codes: torch.Tensor
    scales: torch.Tensor
    facts: Mapping[str, Any]


@dataclass
class BlockResult:
    """What calibrating a layer gave: codes by module, kept tensors that were changed, notes."""

    modules: dict[str, ModuleResult] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    loads: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that reached each expert, by bank."""
    routers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How the re-fit of each router went, by name."""


@dataclass
class Block:
    """A visited decoder layer at work; `source_dtype` is what kept tensors are stored in.

    `routers` are those to re-fit, with their stored dtypes by name.
    """

    visit: Visit
    options: MethodOptions
    source_dtype: torch.dtype
    routers: Mapping[str, torch.dtype] = field(default_factory=dict)
    expert_stack: int = 64
    """Experts that are rounded at once."""
    result: BlockResult = field(default_factory=BlockResult)

    def calibrate(self) -> BlockResult:
        """Round all parts, stage by stage; the layer then computes with the rounded weights.

        Routers are re-fitted once the attention in front of them is rounded, so that the experts
        are rounded for the tokens that they will get.
        """
        refit = RouterRefit(self.visit, self.routers)
        if self.routers:
            refit.follow_source()
        self._round_stage(ATTENTION_STAGE)
        refit.apply()
        self._round_stage(OTHER_STAGE)
        self.result.routers = refit.facts
        self.result.changed = {**self.folds.changed, **refit.changed}
        self.result.notes = [*self.folds.notes, *refit.notes]
        return self.result

    def _round_stage(self, stage: int) -> None:
        here = [part for part in self.visit.parts if part.stage == stage]
        if not here:
            return
        linears = [part for part in here if isinstance(part, LinearPart)]
        banks = [part for part in here if isinstance(part, BankPart)]
        moments, routes = observe(self.visit, linears, banks)
        if self.options.method in FOLDING_METHODS:
            moments = self.folds.fold(linears, moments)
        for part in linears:
            self._round_linear(part, moments[part.key])
        for bank in banks:
            self._round_bank(bank, routes[bank.key])

    @cached_property
    def folds(self) -> Folds:
        """The folds between linears of this layer."""
        return Folds(self.visit, self.source_dtype, norms=bool(self.options.fold_norms))

    def _round_linear(self, part: LinearPart, moments: Moments) -> None:
        weight = torch.cat([self._matrix(slot) for slot in part.slots]).float().unsqueeze(0)
        outcome = round_stack(weight, moments, None, self.options)
        self._accept(part.slots, outcome, 0, moments)

    def _round_bank(self, part: BankPart, routes: Routes) -> None:
        experts = sorted(set(part.first) & set(part.second)) or sorted(part.first or part.second)
        through = expert_function(self.visit.layer.get_submodule(part.path), part)
        counts = torch.bincount(routes.experts.flatten(), minlength=max(experts) + 1)
        self.result.loads[part.key] = counts.tolist()
        prior = layer_prior(routes)
        for start in range(0, len(experts), self.expert_stack):
            some = experts[start : start + self.expert_stack]
            if part.first:
                moments = first_moments(routes, some)
                self._round_experts(part.first, some, moments, prior)
            if part.second:
                moments, inner_prior = second_moments(routes, some, through)
                self._round_second(part, some, moments, inner_prior)

    def _round_second(
        self, part: BankPart, experts: Sequence[int], moments: Moments, prior: Moments
    ) -> None:
        weight = self._stack(part.second, experts)
        if self.options.method in FOLDING_METHODS and part.first:
            scale = folding.channel_scales(weight, prior.mean(), powers_of_two=True)
            for entry, expert in enumerate(experts):
                scale[entry] = self._scale_producer(part.first[expert][-1], scale[entry])
            weight = weight * scale.unsqueeze(1)
            moments, prior = moments.rescaled(scale), prior.rescaled(scale)
        self._round_experts(part.second, experts, moments, prior, weight)

    def _round_experts(
        self,
        side: Mapping[int, tuple[Slot, ...]],
        experts: Sequence[int],
        moments: Moments,
        prior: Moments,
        weight: torch.Tensor | None = None,
    ) -> None:
        weight = self._stack(side, experts) if weight is None else weight
        outcome = round_stack(weight, moments, prior, self.options)
        for entry, expert in enumerate(experts):
            self._accept(side[expert], outcome, entry, moments)

    def _stack(self, side: Mapping[int, tuple[Slot, ...]], experts: Sequence[int]) -> torch.Tensor:
        rows = [torch.cat([self._matrix(slot) for slot in side[e]]).float() for e in experts]
        return torch.stack(rows)

    def _accept(
        self,
        slots: Sequence[Slot],
        outcome: Outcome,
        entry: int,
        moments: Moments,
    ) -> None:
        """Keep codes and facts of one stack entry, and write the rounded values into the layer."""
        rounded = Rounded(
            outcome.rounded.elements[entry : entry + 1], outcome.rounded.scales[entry : entry + 1]
        )
        packed = rounded.pack()
        sizes = [slot.view.row_count for slot in slots]
        weight = torch.cat([self._matrix(slot) for slot in slots]).float().unsqueeze(0)
        facts = module_facts(outcome, entry, moments, weight)
        pieces = zip(
            slots,
            torch.split(packed.codes[0], sizes),
            torch.split(packed.scales[0], sizes),
            torch.split(rounded.values()[0], sizes),
            strict=True,
        )
        for slot, codes, scales, values in pieces:
            self.result.modules[slot.module] = ModuleResult(codes.clone(), scales.clone(), facts)
            self._matrix(slot).copy_(values)

    def _scale_producer(self, slot: Slot, scale: torch.Tensor) -> torch.Tensor:
        """Divide the rows of an expert's up projection by powers of two; returns those used."""
        done = self.result.modules[slot.module]
        exponent = folding.limit_shift(done.scales, scale.log2())
        self._matrix(slot).div_(torch.exp2(exponent).unsqueeze(1))
        self._shift(slot, exponent)
        return torch.exp2(exponent)

    def _shift(self, slot: Slot, exponent: torch.Tensor) -> None:
        done = self.result.modules[slot.module]
        scales = folding.shift_rows(done.scales, exponent)
        self.result.modules[slot.module] = ModuleResult(done.codes, scales, done.facts)

    def _matrix(self, slot: Slot) -> torch.Tensor:
        return matrix(self.visit.layer, self.visit.prefix, slot)


def module_facts(
    outcome: Outcome, entry: int, moments: Moments, weight: torch.Tensor
) -> dict[str, Any]:
    """What reports tell of one entry of a stack; `weight` float32 [1, N, K] is what was rounded."""
    even = round_even(weight).scales
    tokens = int(moments.counts[entry])
    return {
        "tokens": tokens,
        "tokens_per_channel": tokens / weight.shape[2],
        "damping": float(outcome.damping[entry]),
        "output_error": float(outcome.error[entry]),
        "output_error_even": float(outcome.even_error[entry]),
        "scales_changed": float((outcome.rounded.scales[entry] != even[0]).float().mean()),
        "guarded": bool(outcome.guarded[entry]),
        "kept_even": bool(outcome.kept_even[entry]),
    }
