"""Calibrate one filled decoder layer: observe, fold, round, put the rounded weights in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mxfp4.calibration import folding
from mxfp4.calibration.methods import FOLDING_METHODS, MethodOptions, Outcome, round_stack
from mxfp4.calibration.moments import Moments
from mxfp4.calibration.rounding import Rounded, round_even
from mxfp4.calibration.streaming.capture import (
    Routes,
    captured,
    expert_function,
    first_moments,
    layer_prior,
    second_moments,
)
from mxfp4.calibration.streaming.layout import Slot
from mxfp4.calibration.streaming.parts import BankPart, LinearPart, Part, matrix
from mxfp4.calibration.streaming.skeleton import place

FOLD_TOLERANCE = 1e-4
"""Largest difference, relative to the layer's output, by which a fold may change a float32 run."""

PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))
"""Names of projections where rows of the first are columns of the second."""


@dataclass(frozen=True)
class ModuleResult:
    """Codes uint8 [N, K/2] and scales uint8 [N, K/32] of one module, and how it went."""

    codes: torch.Tensor
    scales: torch.Tensor
    facts: Mapping[str, Any]


@dataclass
class BlockResult:
    """What calibrating a layer gave: codes by module, kept tensors that a fold changed, notes."""

    modules: dict[str, ModuleResult] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    loads: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that reached each expert, by bank."""


Run = Callable[[slice], torch.Tensor]
"""The layer on the hidden states of some sequences."""


@dataclass
class Block:
    """A filled decoder layer at work.

    `run` computes it on a batch; `batches` and `halves` describe the calibration sequences.
    """

    layer: nn.Module
    prefix: str
    parts: Sequence[Part]
    run: Run
    batches: Sequence[slice]
    halves: Sequence[int]
    options: MethodOptions
    source_dtype: torch.dtype
    head_size: int | None = None
    expert_stack: int = 64
    """Experts that are rounded at once."""
    result: BlockResult = field(default_factory=BlockResult)

    def calibrate(self) -> BlockResult:
        """Round all parts, stage by stage; the layer then computes with the rounded weights."""
        for stage in sorted({part.stage for part in self.parts}):
            linears = [p for p in self.parts if p.stage == stage and isinstance(p, LinearPart)]
            banks = [p for p in self.parts if p.stage == stage and isinstance(p, BankPart)]
            moments, routes = self.observe(linears, banks)
            for part in linears:
                self._round_linear(part, moments[part.key])
            for bank in banks:
                self._round_bank(bank, routes[bank.key])
        return self.result

    def observe(
        self, linears: Sequence[LinearPart], banks: Sequence[BankPart]
    ) -> tuple[dict[str, Moments], dict[str, Routes]]:
        """Run all sequences and return the moments of linears and the routes of banks."""
        with captured(self.layer, linears, banks) as (linear, bank):
            for batch in self.batches:
                linear.halves = self.halves[batch]
                for capture in bank.values():
                    capture.halves = self.halves[batch]
                self.run(batch)
            return linear.moments, {key: capture.routes() for key, capture in bank.items()}

    def _round_linear(self, part: LinearPart, moments: Moments) -> None:
        weight = torch.cat([self._matrix(slot) for slot in part.slots]).float().unsqueeze(0)
        if self.options.method in FOLDING_METHODS:
            if self.options.fold_norms:
                weight, moments = self._fold_norm(part, weight, moments)
            weight, moments = self._fold_rows(part, weight, moments)
        outcome = round_stack(weight, moments, None, self.options)
        self._accept(part.slots, outcome, 0, moments)

    def _round_bank(self, part: BankPart, routes: Routes) -> None:
        experts = sorted(set(part.first) & set(part.second)) or sorted(part.first or part.second)
        through = expert_function(self.layer.get_submodule(part.path), part)
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
        even = round_even(torch.cat([self._matrix(slot) for slot in slots]).float().unsqueeze(0))
        facts = {
            "tokens": int(moments.counts[entry]),
            "tokens_per_channel": float(moments.counts[entry]) / rounded.elements.shape[2],
            "damping": float(outcome.damping[entry]),
            "output_error": float(outcome.error[entry]),
            "output_error_even": float(outcome.even_error[entry]),
            "scales_changed": float((rounded.scales != even.scales).float().mean()),
            "guarded": bool(outcome.guarded[entry]),
            "kept_even": bool(outcome.kept_even[entry]),
        }
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

    def _fold_norm(
        self, part: LinearPart, weight: torch.Tensor, moments: Moments
    ) -> tuple[torch.Tensor, Moments]:
        """Fold channel scales into the norm that this part reads, if nothing else reads it."""
        found = self._norm_of(part)
        if found is None:
            return weight, moments
        name, norm = found
        scale = folding.channel_scales(weight, moments.mean(), powers_of_two=False)[0]
        gain = norm.detach().clone()
        folded, scale = folding.storable_gain(gain.float(), scale, self.source_dtype)
        if torch.equal(folded, gain.float()):
            return weight, moments

        def apply(forward: bool) -> None:
            place(self.layer, name, (folded if forward else gain).to(gain.dtype))
            for slot in part.slots:
                here = self._matrix(slot)
                here.mul_(scale) if forward else here.div_(scale)

        if not self._unchanged(apply, f"norm {name}"):
            return weight, moments
        self.result.changed[f"{self.prefix}.{name}"] = folded.to(self.source_dtype)
        return weight * scale, moments.rescaled(scale)

    def _fold_rows(
        self, part: LinearPart, weight: torch.Tensor, moments: Moments
    ) -> tuple[torch.Tensor, Moments]:
        """Fold powers of two into the rows of the projection whose output this part reads."""
        producer = self._producer_of(part)
        if producer is None:
            return weight, moments
        scale = folding.channel_scales(weight, moments.mean(), powers_of_two=True)[0]
        rows = folding.rows_of_columns(
            producer.view.row_count,
            len(scale),
            self.head_size if part.paths[0].endswith("o_proj") else None,
        )
        exponent = folding.shared_exponents(scale.log2(), rows, producer.view.row_count)
        exponent = folding.limit_shift(self.result.modules[producer.module].scales, exponent)
        if not exponent.any():
            return weight, moments
        per_row, per_column = torch.exp2(exponent), torch.exp2(exponent)[rows]
        slot = part.slots[0]

        def apply(forward: bool) -> None:
            source, target = self._matrix(producer), self._matrix(slot)
            source.div_(per_row.unsqueeze(1)) if forward else source.mul_(per_row.unsqueeze(1))
            target.mul_(per_column) if forward else target.div_(per_column)

        if not self._unchanged(apply, f"rows of {producer.module}"):
            return weight, moments
        self._shift(producer, exponent)
        return weight * per_column, moments.rescaled(per_column)

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

    def _unchanged(self, apply: Callable[[bool], None], what: str) -> bool:
        """Apply a fold and see that the layer still computes the same; undo it if it does not."""
        batch = slice(self.batches[0].start, self.batches[0].start + 1)
        before = self.run(batch)
        apply(True)
        after = self.run(batch)
        change = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
        if change <= FOLD_TOLERANCE:
            return True
        apply(False)
        self.result.notes.append(f"{self.prefix}: {what} not folded, something else reads it")
        return False

    def _norm_of(self, part: LinearPart) -> tuple[str, torch.Tensor] | None:
        """The gain (name, values [K]) of the norm whose output is the input of a part."""
        made: dict[int, str] = {}
        read: list[str | None] = []
        hooks = [
            module.register_forward_hook(
                lambda m, i, o, name=name: made.__setitem__(o.data_ptr(), name)
            )
            for name, module in self.layer.named_modules()
            if isinstance(getattr(module, "weight", None), torch.Tensor) and module.weight.ndim == 1
        ]
        reader = self.layer.get_submodule(part.paths[0])
        hooks.append(
            reader.register_forward_pre_hook(lambda m, i: read.append(made.get(i[0].data_ptr())))
        )
        batch = slice(self.batches[0].start, self.batches[0].start + 1)
        try:
            self.run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        name = read[0] if read else None
        if name is None:
            return None
        return f"{name}.weight", self.layer.get_parameter(f"{name}.weight")

    def _producer_of(self, part: LinearPart) -> Slot | None:
        """The already rounded projection whose rows are this part's input channels."""
        if len(part.slots) != 1:
            return None
        parent, _, leaf = part.slots[0].module.rpartition(".")
        for first, second in PAIRS:
            wanted = f"{parent}.{first}"
            if leaf == second and wanted in self.result.modules:
                return next(slot for slot in self._all_slots() if slot.module == wanted)
        return None

    def _all_slots(self) -> Iterator[Slot]:
        for part in self.parts:
            if isinstance(part, LinearPart):
                yield from part.slots

    def _matrix(self, slot: Slot) -> torch.Tensor:
        return matrix(self.layer, self.prefix, slot)
