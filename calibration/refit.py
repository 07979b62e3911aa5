"""Re-fit routers to what they read in the rounded model, so that they decide as in the source.

A router that keeps its bytes can still decide otherwise, because the layers in front of it were
rounded and its inputs x' are no longer the source's x. The weight W' [E, K] with the least

    sum |W' x' - W x|^2 + r |W' - W|^2

over the tokens of the text is W' = W + C^T (G + r I)^-1 with G = sum x' x'^T and
C = sum x' (W x - W x')^T: ridge regression, in closed form. Nothing else of a router is touched,
and the result is stored in the dtype of the source.

This changes what calibration otherwise protects, so a layer's router is re-fitted only where that
is seen to help: weights fitted on one half of the text must send more tokens of the other half to
the very experts that the source chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from mxfp4.calibration.moments import HALVES
from mxfp4.calibration.streaming.capture import AllSeenError, watch_experts, watch_router
from mxfp4.calibration.streaming.walk import Visit

RIDGES = (0.001, 0.01, 0.1, 1.0)
"""Values of r that are tried, as shares of the mean diagonal of G."""


@dataclass(frozen=True)
class Regression:
    """Sums over tokens in two halves: `gram` float64 [2, K, K], `cross` float64 [2, K, E].

    `energy` float64 [2] is the sum of the squared residuals of the logits, |W x - W x'|^2.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    energy: torch.Tensor

    @classmethod
    def empty(cls, columns: int, experts: int) -> Regression:
        """No tokens yet."""
        return cls(
            torch.zeros(HALVES, columns, columns, dtype=torch.float64),
            torch.zeros(HALVES, columns, experts, dtype=torch.float64),
            torch.zeros(HALVES, dtype=torch.float64),
        )

    def add(self, inputs: torch.Tensor, residual: torch.Tensor, half: torch.Tensor) -> None:
        """Add inputs x' [M, K] with residuals [M, E] of tokens in halves int64 [M], in place."""
        for number in range(HALVES):
            mine = half == number
            some, rest = inputs[mine].double(), residual[mine].double()
            self.gram[number].addmm_(some.T, some)
            self.cross[number].addmm_(some.T, rest)
            self.energy[number] += rest.square().sum()

    def solve(self, halves: Sequence[int], ridge: float) -> torch.Tensor:
        """W' - W float64 [E, K] from some halves; zero where there was no input at all."""
        gram, cross = self.gram[list(halves)].sum(0), self.cross[list(halves)].sum(0)
        mean = gram.diagonal().mean()
        if mean == 0:
            return torch.zeros_like(cross.T)
        steadied = gram + ridge * mean * torch.eye(len(gram), dtype=gram.dtype)
        return torch.cholesky_solve(cross, torch.linalg.cholesky(steadied)).T

    def error(self, change: torch.Tensor, half: int) -> float:
        """Sum of squared logit residuals of one half that `change` float64 [E, K] leaves."""
        explained = 2 * (change.T * self.cross[half]).sum()
        return float(self.energy[half] - explained + ((change @ self.gram[half]) * change).sum())

    def held_out_error(self, ridge: float) -> float:
        """The same over both halves, each with what the other one teaches."""
        return sum(self.error(self.solve([1 - half], ridge), half) for half in range(HALVES))


@dataclass
class RouterRefit:
    """Re-fits the routers of one visited layer; `routers` are stored dtypes by full name.

    `facts` tells of every router what was found, `changed` holds new weights by full name, `notes`
    what could not be done.
    """

    visit: Visit
    routers: Mapping[str, torch.dtype]
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _logits: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _experts: list[torch.Tensor] = field(default_factory=list)

    def follow_source(self) -> None:
        """Run the source through the layer, as yet unchanged, and keep what its routers say."""
        run_source = self.visit.run_source
        assert run_source is not None, "the walk does not follow the source"
        self._logits = {name: [] for name in self._here()}
        hooks = [
            watch_router(router, partial(self._note_source, name, router))
            for name, router in self._here().items()
        ]
        self._experts = self._run(run_source, hooks)

    def apply(self) -> None:
        """Re-fit each router of the layer to its inputs as they are now, where that helps."""
        for name, router in self._here().items():
            if not self._experts:
                self.notes.append(
                    f"{name}: not re-fitted, its experts are not called with their numbers, so "
                    "that nothing shows whether it helps"
                )
                continue
            self._refit(name, router)

    def _note_source(self, name: str, router: nn.Module, inputs: torch.Tensor) -> None:
        self._logits[name].append(_logits(router, inputs))

    def _refit(self, name: str, router: nn.Module) -> None:
        weight = router.get_parameter("weight").detach().clone()
        regression, plain = self._learn(name, router)
        ridge = min(RIDGES, key=regression.held_out_error)

        def stored(halves: Sequence[int]) -> torch.Tensor:
            new = weight.double() + regression.solve(halves, ridge)
            return new.to(self.routers[name])

        before, after = self._agreement(plain), 0.0
        for half in range(HALVES):
            router.get_parameter("weight").data.copy_(stored([1 - half]))
            after += self._agreement(self._run(self.visit.run, early=True), half)
        helps = after > before
        chosen = stored(range(HALVES)) if helps else weight
        router.get_parameter("weight").data.copy_(chosen)
        if helps:
            self.changed[name] = chosen
        tokens = sum(len(piece) for piece in self._experts)
        self.facts[name] = {
            "refitted": helps,
            "ridge": ridge,
            "same_experts": before / tokens,
            "same_experts_refitted": after / tokens,
            "logit_error": float(regression.energy.sum()) / tokens,
            "logit_error_refitted": regression.held_out_error(ridge) / tokens,
        }

    def _learn(self, name: str, router: nn.Module) -> tuple[Regression, list[torch.Tensor]]:
        """The regression of one router over all tokens, and the experts that it chooses as yet."""
        experts, columns = router.get_parameter("weight").shape
        regression = Regression.empty(columns, experts)
        wanted = iter(zip(self._logits[name], self._halves(), strict=True))

        def note(inputs: torch.Tensor) -> None:
            logits, half = next(wanted)
            regression.add(inputs, logits - _logits(router, inputs), half)

        return regression, self._run(self.visit.run, [watch_router(router, note)], early=True)

    def _run(
        self,
        forward: Callable[[slice], Any],
        hooks: Sequence[Any] = (),
        *,
        early: bool = False,
    ) -> list[torch.Tensor]:
        """The experts chosen for all tokens, while `forward` takes them through the layer.

        With `early` a batch ends once its experts are known; `hooks` are removed at the end.
        """
        chosen: list[torch.Tensor] = []

        def note(experts: torch.Tensor) -> None:
            chosen.append(experts)
            if early and len(chosen) % len(watched) == 0:
                raise AllSeenError

        watched = watch_experts(self.visit.layer, note)
        try:
            for batch in self.visit.batches:
                with suppress(AllSeenError):
                    forward(batch)
        finally:
            for hook in (*hooks, *watched):
                hook.remove()
        return chosen

    def _agreement(self, chosen: Sequence[torch.Tensor], only: int | None = None) -> float:
        """Tokens, of one half or of all, that go to the same experts as in the source."""
        same = [same_sets(a, b) for a, b in zip(self._experts, chosen, strict=True)]
        if only is None:
            return float(sum(piece.sum() for piece in same))
        containers = len(same) // len(self.visit.batches)
        halves = [half for half in self._halves() for _ in range(containers)]
        return float(sum((s & (h == only)).sum() for s, h in zip(same, halves, strict=True)))

    def _halves(self) -> list[torch.Tensor]:
        """The half of every token, batch by batch, int64 [M]."""
        length = self.visit.sequence_length
        return [
            torch.tensor(self.visit.halves[batch]).repeat_interleave(length)
            for batch in self.visit.batches
        ]

    def _here(self) -> dict[str, nn.Module]:
        """The routers of this layer by full name."""
        found = {}
        for name, _ in self.visit.layer.named_parameters():
            if (full := f"{self.visit.prefix}.{name}") in self.routers:
                found[full] = self.visit.layer.get_submodule(name.rpartition(".")[0])
        return found


def same_sets(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Whether two choices of experts [M, k] are the same sets: bool [M]."""
    return (first.sort(-1).values == second.sort(-1).values).all(-1)


def _logits(router: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """W x float32 [M, E] without bias, which no difference of logits shows."""
    return nn.functional.linear(inputs.float(), router.get_parameter("weight").float())
