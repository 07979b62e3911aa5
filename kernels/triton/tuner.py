"""Find the best tile for a weight shape on this device: prune by machine code, then measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product as all_pairs

import torch

from mxfp4.codec import quantize
from mxfp4.errors import BackendUnavailableError
from mxfp4.kernels.triton import gate
from mxfp4.kernels.triton.configs import REGIME_TOKENS, Regime, TileConfig, table_of
from mxfp4.kernels.triton.device import INTERPRET, describe
from mxfp4.kernels.triton.layout import pack
from mxfp4.kernels.triton.product import matmul
from mxfp4.kernels.triton.timing import copies_needed, measure
from mxfp4.kernels.tuning import entry_key

PREFILL_TOKENS = 1024
"""Tokens at which the prefill tile is measured."""

SLACK = 1.3
"""Candidates that issue this much more per weight than the best one are not measured."""


@dataclass(frozen=True)
class Choice:
    """The best tile found for one regime, and how much faster it is than the shipped one."""

    key: str
    config: TileConfig
    median_us: float
    shipped_us: float


def candidates(base: TileConfig) -> Iterator[TileConfig]:
    """The shipped tile first, then its neighbours."""
    yield base
    splits = (0, 2, 4, 8) if base.programs_per_core else (0,)
    for rows, warps, stages, swap, split in all_pairs(
        (64, 128), (4, 8), (2, 3, 4, 5), (False, True), splits
    ):
        config = replace(
            base, rows=rows, warps=warps, stages=stages, swap=swap, programs_per_core=split
        )
        if config != base:
            yield config


def prune(architecture: str, regime: Regime, configs: list[TileConfig]) -> list[TileConfig]:
    """Those that compile without spills, fit in shared memory and issue few instructions."""
    kept: list[tuple[float, TileConfig]] = []
    judged: dict[TileConfig, tuple[float, bool]] = {}
    for config in configs:
        # Launches that differ only in how far K is split share their machine code.
        code = replace(config, programs_per_core=min(config.programs_per_core, 1))
        if code not in judged:
            verdict = gate.check(gate.tuning_case(architecture, regime, code))
            judged[code] = verdict.issue_per_weight, not verdict.failures
        issue, passed = judged[code]
        if passed:
            kept.append((issue, config))
    best = min((issue for issue, _ in kept), default=0.0)
    return [config for issue, config in kept if issue <= best * SLACK]


def tune(
    rows: int,
    columns: int,
    regimes: tuple[Regime, ...],
    *,
    device: torch.device,
    repetitions: int = 12,
    on_progress: Callable[[str], None] = lambda line: None,
) -> list[Choice]:
    """Measure a weight [rows, columns] of random numbers; takes about a minute for each regime."""
    if device.type != "cuda" or INTERPRET:
        raise BackendUnavailableError(
            "tuning measures on a GPU", hint="`mxfp4 tune --prune-only` works without one"
        )
    architecture = describe(device).architecture
    weight = pack(quantize(torch.randn(rows, columns, device=device) / 8))
    copies = copies_needed(weight.nbytes, device)
    weights = [weight] + [weight.to("cpu").to(device) for _ in range(copies - 1)]
    choices = []
    for regime in regimes:
        tokens = REGIME_TOKENS.get(regime, PREFILL_TOKENS)
        x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
        shipped = table_of(architecture)[regime]
        times = {}
        for config in prune(architecture, regime, list(candidates(shipped))):
            calls = [partial(matmul, x, w, config=config) for w in weights]
            times[config] = measure(calls, repetitions=repetitions, device=device).median_us
            on_progress(f"{regime}: {config} {times[config]:.1f} us")
        best = min(times, key=lambda config: times[config])
        key = entry_key(torch.cuda.get_device_name(device), (rows, columns), regime)
        choices.append(Choice(key, best, times[best], times.get(shipped, times[best])))
    return choices
