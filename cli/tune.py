"""`mxfp4 tune`: measure launch parameters on this GPU and keep the best ones."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from mxfp4.cli.options import output_flags
from mxfp4.cli.render import Voice, emit_json, reported
from mxfp4.errors import BackendUnavailableError

Say = Callable[[str], None]


@click.command()
@click.argument("shapes", nargs=-1, required=True, metavar="NxK...")
@click.option("--device", default="cuda", show_default=True, help="The GPU to measure on.")
@click.option(
    "--regime",
    "regimes",
    multiple=True,
    type=click.Choice(["decode", "small", "medium", "large", "prefill"]),
    help="Only these numbers of tokens; all by default.",
)
@click.option(
    "--prune-only",
    metavar="ARCH",
    help="Measure nothing: list the tiles that would be, for an architecture such as sm_90.",
)
@output_flags
def tune(
    shapes: tuple[str, ...],
    device: str,
    regimes: tuple[str, ...],
    prune_only: str | None,
    voice: Voice,
) -> None:
    """Measure tiles for weights of these shapes, such as 28672x8192, and store the best.

    Results go to a file in the user's cache folder and hold for this GPU, this Triton and these
    kernels; everything else keeps using the built-in tables.
    """
    sizes = [_size(shape) for shape in shapes]
    with reported(voice):
        _require_triton()
        if prune_only:
            found = _prune(prune_only, regimes, voice.say)
        else:
            found = _measure(sizes, device, regimes, voice.say)
        if voice.as_json:
            emit_json(found)


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError(
            "tuning needs Triton, which is not installed",
            hint="pip install triton (Linux; torch's builds for GPUs bring it along)",
        )


def _prune(architecture: str, regimes: Sequence[str], say: Say) -> dict[str, Any]:
    """Count the tiles that a measurement would try."""
    from mxfp4.kernels.triton.configs import Regime, table_of
    from mxfp4.kernels.triton.tuner import candidates, prune

    counts = {}
    for regime in tuple(Regime(name) for name in regimes) or tuple(Regime):
        every = list(candidates(table_of(architecture)[regime]))
        kept = prune(architecture, regime, every)
        counts[str(regime)] = {"measured": len(kept), "of": len(every)}
        say(f"{regime}: {len(kept)} of {len(every)} tiles would be measured")
    return {"architecture": architecture, "tiles": counts}


def _measure(
    sizes: Sequence[tuple[int, int]], device: str, regimes: Sequence[str], say: Say
) -> dict[str, Any]:
    """Measure on a GPU and store the best tiles."""
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            "tuning measures on a GPU, and torch sees none here",
            hint="--prune-only sm_90 lists what would be measured, without a GPU",
        )
    from mxfp4.kernels.triton.configs import Regime
    from mxfp4.kernels.triton.tuner import tune as measure
    from mxfp4.kernels.tuning import cache_path, store

    chosen = tuple(Regime(name) for name in regimes) or tuple(Regime)
    found, rows_of_report = {}, []
    for rows, columns in sizes:
        place = torch.device(device)
        for choice in measure(rows, columns, chosen, device=place, on_progress=say):
            found[choice.key] = choice.config
            gain = choice.shipped_us / choice.median_us
            rows_of_report.append({"key": choice.key, "over_built_in": gain})
            say(f"{choice.key}: {choice.config}, {gain:.2f}x of the built-in tile")
    store(found, cache_path())
    say(f"stored {len(found)} tiles in {cache_path()}")
    return {"stored": str(cache_path()), "tiles": rows_of_report}


def _size(shape: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", shape)
    if not found or int(found[2]) % 32:
        raise click.BadParameter(f"{shape!r} is not NxK with K a multiple of 32")
    return int(found[1]), int(found[2])
