"""The levels of calibration: from a weight and the moments of its inputs to codes.

`METHODS` maps each `--method` to a function of (weight, H, importance, options). Around it,
`round_stack` adds what keeps data-driven rounding honest with few tokens: shrinkage, damping and a
check on tokens that were not used for the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mxfp4.calibration.descent import descend
from mxfp4.calibration.gptq import gptq
from mxfp4.calibration.moments import (
    HALVES,
    Moments,
    conditional_energy,
    damped,
    damping,
    less_correlated,
    output_error,
    shrunk,
)
from mxfp4.calibration.rounding import Rounded, round_even, round_with, search_scales
from mxfp4.errors import RecipeError


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Every numeric choice of calibration; recorded with the result."""

    method: str = "gptq"
    damping_low: float = 0.05
    expert_damping_low: float = 0.01
    """Where a prior steadies the moments of experts, less is needed."""
    damping_high: float = 0.10
    damping_slope: float = 0.2
    """Damping is slope * K / tokens, at least `damping_low`, at most `damping_high`."""
    doubt_slope: float = 1.0
    doubt_high: float = 0.25
    """Correlations between channels are taken down by slope * K / tokens, at most `doubt_high`."""
    pseudo_tokens: float = 256.0
    """How many tokens the layer-wide moments count for in the moments of each expert..."""
    pseudo_tokens_plenty: float = 64.0
    plenty_tokens_per_column: float = 5.0
    """... and for one that had at least this many tokens per input channel."""
    polish: int = 1
    """Passes of coordinate descent with fixed scales that end `gptq`."""
    sweeps: int = 3
    """Passes of coordinate descent in `gptq+`."""
    move_exponents: bool = True
    fold_norms: bool | None = None
    """Let `gptq+` change norm gains; None does so in models without routers only."""
    refit_routers: bool = False
    """Fit routers to their inputs in the rounded model where that helps (see `refit`)."""
    guard_tokens_per_column: float = 4.0
    """With fewer tokens than this per input channel, a result must win on held-out tokens."""

    def __post_init__(self) -> None:
        """Refuse an unknown method."""
        if self.method not in METHODS:
            raise RecipeError(
                f"unknown calibration method {self.method!r}",
                hint=f"choose one of {', '.join(METHODS)}",
            )

    def to_json(self) -> dict[str, Any]:
        """All choices by name."""
        return asdict(self)


Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, MethodOptions], Rounded]
"""(weight [B, N, K], damped H [B, K, K], importance [B, K], options) to rounded weights."""


def _even(
    weight: torch.Tensor, hessian: torch.Tensor, importance: torch.Tensor, options: MethodOptions
) -> Rounded:
    return round_even(weight)


def _search(
    weight: torch.Tensor, hessian: torch.Tensor, importance: torch.Tensor, options: MethodOptions
) -> Rounded:
    return round_with(weight, search_scales(weight, importance))


def _gptq(
    weight: torch.Tensor, hessian: torch.Tensor, importance: torch.Tensor, options: MethodOptions
) -> Rounded:
    start = _first_guess(weight, hessian)
    return descend(weight, start, hessian, sweeps=options.polish, move_exponents=False)


def _gptq_plus(
    weight: torch.Tensor, hessian: torch.Tensor, importance: torch.Tensor, options: MethodOptions
) -> Rounded:
    return descend(
        weight,
        _first_guess(weight, hessian),
        hessian,
        sweeps=options.sweeps,
        move_exponents=options.move_exponents,
    )


def _first_guess(weight: torch.Tensor, hessian: torch.Tensor) -> Rounded:
    """GPTQ with scales for the error that is left once later columns have taken over theirs."""
    return gptq(weight, hessian, search_scales(weight, conditional_energy(hessian)))


METHODS: Mapping[str, Method] = {
    "even": _even,
    "search": _search,
    "gptq": _gptq,
    "gptq+": _gptq_plus,
}
"""Every level by its command-line name, from least to most work."""

FOLDING_METHODS = frozenset({"gptq+"})
"""Methods that also scale channels before rounding (see `folding`)."""


@dataclass(frozen=True)
class Outcome:
    """What became of a stack: the rounded weights and, for each matrix [B], how it went.

    `error` and `even_error` are output errors relative to the output's energy under all tokens
    seen; `guarded` tells which matrices had to win on held-out tokens, `kept_even` which did not
    and were written as without calibration.
    """

    rounded: Rounded
    error: torch.Tensor
    even_error: torch.Tensor
    damping: torch.Tensor
    guarded: torch.Tensor
    kept_even: torch.Tensor


def round_stack(
    weight: torch.Tensor, moments: Moments, prior: Moments | None, options: MethodOptions
) -> Outcome:
    """Calibrated codes of `weight` float32 [B, N, K].

    `prior` is what the moments of experts are shrunk towards: one entry, or one for each; None for
    a dense layer.
    """
    even = round_even(weight)
    rounded, share = _fit(weight, moments, prior, options)
    scarce = moments.counts < options.guard_tokens_per_column * weight.shape[2]
    guarded = scarce & torch.tensor(options.method not in ("even", "search"))
    kept_even = torch.zeros_like(guarded)
    if guarded.any():
        chosen = guarded.nonzero().flatten()
        lost = _loses_on_held_out(weight[chosen], even, chosen, moments, prior, options)
        kept_even[chosen] = lost
        rounded = even.where(kept_even, rounded)
    hessian = _hessian(moments, prior, options)
    energy = ((weight @ hessian) * weight).sum((-2, -1)).clamp(min=1e-30)
    return Outcome(
        rounded,
        output_error(weight, rounded.values(), hessian) / energy,
        output_error(weight, even.values(), hessian) / energy,
        share,
        guarded,
        kept_even,
    )


def _hessian(moments: Moments, prior: Moments | None, options: MethodOptions) -> torch.Tensor:
    if prior is None:
        return moments.mean()
    return shrunk(moments, prior, _pseudo_tokens(moments, options))


def _pseudo_tokens(moments: Moments, options: MethodOptions) -> torch.Tensor:
    """How many tokens the prior counts for in each entry, float32 [B]."""
    plenty = moments.counts >= options.plenty_tokens_per_column * moments.sums.shape[-1]
    few = torch.tensor(options.pseudo_tokens)
    return torch.where(plenty, torch.tensor(options.pseudo_tokens_plenty), few)


def _fit(
    weight: torch.Tensor, moments: Moments, prior: Moments | None, options: MethodOptions
) -> tuple[Rounded, torch.Tensor]:
    """The method's result and the damping used."""
    hessian = _hessian(moments, prior, options)
    counts = moments.counts
    if prior is not None:
        counts = counts + _pseudo_tokens(moments, options).minimum(prior.counts.float())
    low = options.damping_low if prior is None else options.expert_damping_low
    bounds = (low, options.damping_high)
    columns = weight.shape[2]
    share = damping(counts, columns, bounds, options.damping_slope)
    doubt = damping(counts, columns, (0.0, options.doubt_high), options.doubt_slope)
    importance = hessian.diagonal(dim1=-2, dim2=-1)
    method = METHODS[options.method]
    trusted = damped(less_correlated(hessian, doubt), share)
    return method(weight, trusted, importance, options), share


def _loses_on_held_out(
    weight: torch.Tensor,
    even: Rounded,
    chosen: torch.Tensor,
    moments: Moments,
    prior: Moments | None,
    options: MethodOptions,
) -> torch.Tensor:
    """Whether fits on one half make a larger error on the other than `even`; bool [chosen]."""
    picked = moments.pick(chosen)
    if prior is not None and len(prior.counts) > 1:
        prior = prior.pick(chosen)
    plain = even.values()[chosen]
    fitted_error = torch.zeros(len(chosen))
    even_error = torch.zeros(len(chosen))
    for number in range(HALVES):
        known = picked.half(number)
        rest = _hessian(picked.half(1 - number), _half(prior, 1 - number), options)
        fit, _ = _fit(weight, known, _half(prior, number), options)
        fitted_error += output_error(weight, fit.values(), rest)
        even_error += output_error(weight, plain, rest)
    return fitted_error >= even_error


def _half(prior: Moments | None, number: int) -> Moments | None:
    return None if prior is None else prior.half(number)
