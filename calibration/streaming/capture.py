"""Collect moments while a decoder layer runs: hooks on linears, an own loop over experts.

Fused experts multiply all their matrices in one call that no hook on a linear can see, so tokens
and routes are taken where they enter the container, and each expert's inputs follow from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mxfp4.calibration.moments import Moments
from mxfp4.calibration.streaming.parts import BankPart, LinearPart
from mxfp4.calibration.streaming.walk import Visit
from mxfp4.errors import UnsupportedFormatError

PRIOR_TOKENS = 4096
"""Tokens sent through every expert for the prior of its down projection."""


@dataclass(frozen=True)
class Routes:
    """What entered a bank: `hidden` [M, H], `experts` int64 [M, k], `gates` [M, k], `half` [M]."""

    hidden: torch.Tensor
    experts: torch.Tensor
    gates: torch.Tensor
    half: torch.Tensor

    def of(self, expert: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [m, H] routed to an expert in one half, and their squared gates [m]."""
        mine = (self.experts == expert) & (self.half == half).unsqueeze(1)
        token, place = mine.nonzero(as_tuple=True)
        return self.hidden[token], self.gates[token, place].float() ** 2


class AllSeenError(Exception):
    """Every input that is wanted was seen; the rest of the layer need not be computed."""


class Countdown:
    """Ends the run of a layer once every capture has seen its inputs."""

    def __init__(self, captures: Sequence[LinearCapture | BankCapture]) -> None:
        self._captures = captures
        self._waiting: set[str] = set()
        for capture in captures:
            capture.seen = self._seen

    def start(self, halves: Sequence[int]) -> None:
        """Begin a batch; `halves` is the half that each of its sequences belongs to."""
        self._waiting = {key for capture in self._captures for key in capture.keys}
        for capture in self._captures:
            capture.halves = halves

    def _seen(self, key: str) -> None:
        self._waiting.discard(key)
        if not self._waiting:
            raise AllSeenError


class LinearCapture:
    """Moments of the inputs of several linear parts."""

    def __init__(self, layer: nn.Module, parts: Sequence[LinearPart]) -> None:
        self.moments: dict[str, Moments] = {}
        self.halves: Sequence[int] = ()
        """Half of each sequence of the batch that runs now."""
        self.keys = [part.key for part in parts]
        self.seen: Callable[[str], None] = lambda key: None
        self._hooks = [
            layer.get_submodule(part.paths[0]).register_forward_pre_hook(self._hook(part.key))
            for part in parts
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, key: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            tokens = inputs[0].detach()
            columns = tokens.shape[-1]
            moments = self.moments.setdefault(key, Moments.empty(1, columns))
            if tokens.shape[0] == len(self.halves):
                for row, half in zip(tokens, self.halves, strict=True):
                    moments.add(0, row.reshape(-1, columns), half)
            else:  # tokens in an order of the module's own: halves by turns
                flat = tokens.reshape(-1, columns)
                for half in (0, 1):
                    moments.add(0, flat[half::2], half)
            self.seen(key)

        return note


class BankCapture:
    """Everything that enters one bank of experts, batch after batch."""

    def __init__(self, layer: nn.Module, part: BankPart) -> None:
        self.halves: Sequence[int] = ()
        self.keys = [part.key]
        self.seen: Callable[[str], None] = lambda key: None
        self._pieces: list[Routes] = []
        container = layer.get_submodule(part.path)
        self._hook = container.register_forward_pre_hook(self._note, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def routes(self) -> Routes:
        """All batches together; the pieces are let go."""
        pieces, self._pieces = self._pieces, []
        return Routes(
            torch.cat([piece.hidden for piece in pieces]),
            torch.cat([piece.experts for piece in pieces]),
            torch.cat([piece.gates for piece in pieces]),
            torch.cat([piece.half for piece in pieces]),
        )

    def _note(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden, experts, gates = routed_inputs((*inputs, *keywords.values()))
        half = torch.tensor(self.halves).repeat_interleave(len(hidden) // len(self.halves))
        self._pieces.append(Routes(hidden, experts, gates, half))
        self.seen(self.keys[0])


def routed_inputs(
    inputs: Sequence[Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [M, H], chosen experts [M, k] and their gates [M, k] of a container's call.

    Told by dtype and order: hidden states come first, indices are integers. Gates over all experts
    [M, E] are reduced to the chosen ones.
    """
    tensors = [value.detach() for value in inputs if isinstance(value, torch.Tensor)]
    indices = [t for t in tensors if not t.is_floating_point()]
    floats = [t for t in tensors if t.is_floating_point()]
    if len(indices) != 1 or len(floats) != 2:
        raise UnsupportedFormatError(
            "the experts of this model are not called with hidden states, indices and gates",
            hint="calibrate attention and dense layers only: --keep '*experts*'",
        )
    hidden, gates = floats
    experts = indices[0].reshape(-1, indices[0].shape[-1])
    hidden = hidden.reshape(-1, hidden.shape[-1])
    gates = gates.reshape(-1, gates.shape[-1])
    if gates.shape[-1] != experts.shape[-1]:
        gates = gates.gather(1, experts)
    return hidden, experts, gates


def watch_router(router: nn.Module, note: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Tell `note` what enters a router each time it runs, as [M, H]."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        hidden = inputs[0].detach()
        note(hidden.reshape(-1, hidden.shape[-1]))

    return router.register_forward_pre_hook(hook)


def watch_experts(layer: nn.Module, note: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
    """Tell `note` the experts [M, k] that tokens are sent to, for each container in a layer.

    A container is a module with stacked matrices of its own; the list is empty without any.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        note(routed_inputs((*inputs, *keywords.values()))[1])

    return [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in layer.modules()
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
    ]


def observe(
    visit: Visit, linears: Sequence[LinearPart], banks: Sequence[BankPart]
) -> tuple[dict[str, Moments], dict[str, Routes]]:
    """Run a layer on all sequences: moments of the linears, routes of the banks, by part."""
    with captured(visit.layer, linears, banks) as (linear, bank):
        waiting = Countdown([linear, *bank.values()])
        for batch in visit.batches:
            waiting.start(visit.halves[batch])
            with suppress(AllSeenError):
                visit.run(batch)
        return linear.moments, {key: capture.routes() for key, capture in bank.items()}


def first_moments(routes: Routes, experts: Sequence[int]) -> Moments:
    """Moments of what enters some experts, weighted by the squared gate."""
    moments = Moments.empty(len(experts), routes.hidden.shape[-1])
    for entry, expert in enumerate(experts):
        for half in (0, 1):
            moments.add(entry, *_with_half(routes.of(expert, half), half))
    return moments


def second_moments(
    routes: Routes, experts: Sequence[int], through: Callable[[int, torch.Tensor], torch.Tensor]
) -> tuple[Moments, Moments]:
    """Moments of what the down projections of some experts read, and their priors.

    `through` computes it from an expert and its tokens. The prior of an expert sees an even choice
    of all tokens.
    """
    sample, sample_half = _sample(routes)
    columns = through(experts[0], routes.hidden[:1]).shape[-1]
    moments = Moments.empty(len(experts), columns)
    prior = Moments.empty(len(experts), columns)
    for entry, expert in enumerate(experts):
        inner = through(expert, sample)
        for half in (0, 1):
            tokens, weight = routes.of(expert, half)
            moments.add(entry, through(expert, tokens), half, weight)
            prior.add(entry, inner[sample_half == half], half)
    return moments, prior


def layer_prior(routes: Routes) -> Moments:
    """Unweighted moments of all tokens that enter a bank: one entry."""
    prior = Moments.empty(1, routes.hidden.shape[-1])
    for half in (0, 1):
        prior.add(0, routes.hidden[routes.half == half], half)
    return prior


def expert_function(container: Any, part: BankPart) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """What an expert computes before its down projection, from the container's own parameters."""
    slots = next(iter(part.first.values()))
    leaf = slots[0].parameter.rpartition(".")[2]
    stacked = getattr(container, leaf)
    bias = getattr(container, f"{leaf}_bias", None)
    gated = len(slots) > 1
    transposed = slots[0].view.column_stride != 1

    def through(expert: int, tokens: torch.Tensor) -> torch.Tensor:
        weight = stacked[expert]
        with torch.no_grad():
            inner = tokens @ (weight if transposed else weight.T)
            if bias is not None:
                inner = inner + bias[expert]
            if not gated:
                return container.act_fn(inner)  # type: ignore[no-any-return]
            if hasattr(container, "_apply_gate"):
                return container._apply_gate(inner)  # type: ignore[no-any-return]
            gate, up = inner.chunk(2, dim=-1)
            return container.act_fn(gate) * up  # type: ignore[no-any-return]

    return through


@contextmanager
def captured(
    layer: nn.Module, linears: Sequence[LinearPart], banks: Sequence[BankPart]
) -> Iterator[tuple[LinearCapture, dict[str, BankCapture]]]:
    """Hooks on a layer for as long as the context lasts."""
    linear = LinearCapture(layer, linears)
    bank = {part.key: BankCapture(layer, part) for part in banks}
    try:
        yield linear, bank
    finally:
        linear.close()
        for capture in bank.values():
            capture.close()


def _with_half(
    found: tuple[torch.Tensor, torch.Tensor], half: int
) -> tuple[torch.Tensor, int, torch.Tensor]:
    tokens, weight = found
    return tokens, half, weight


def _sample(routes: Routes) -> tuple[torch.Tensor, torch.Tensor]:
    step = max(len(routes.hidden) // PRIOR_TOKENS, 1)
    return routes.hidden[::step], routes.half[::step]
