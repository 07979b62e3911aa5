"""`mxfp4 tune`: measure launch parameters on this GPU and keep the best ones."""

from __future__ import annotations

import re

import click


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
def tune(shapes: tuple[str, ...], device: str, regimes: tuple[str, ...], prune_only: str) -> None:
    """Measure tiles for weights of these shapes, such as 28672x8192, and store the best.

    Results go to a file in the user's cache folder and hold for this GPU, this Triton and these
    kernels; everything else keeps using the built-in tables.
    """
    sizes = [_size(shape) for shape in shapes]
    from mxfp4.kernels.triton.configs import Regime, table_of

    chosen = tuple(Regime(name) for name in regimes) or tuple(Regime)
    if prune_only:
        from mxfp4.kernels.triton.tuner import candidates, prune

        for regime in chosen:
            every = list(candidates(table_of(prune_only)[regime]))
            kept = prune(prune_only, regime, every)
            click.echo(f"{regime}: {len(kept)} of {len(every)} tiles would be measured")
        return
    import torch

    from mxfp4.kernels.triton.tuner import tune as measure
    from mxfp4.kernels.tuning import cache_path, store

    found = {}
    for rows, columns in sizes:
        place = torch.device(device)
        for choice in measure(rows, columns, chosen, device=place, on_progress=click.echo):
            found[choice.key] = choice.config
            gain = choice.shipped_us / choice.median_us
            click.echo(f"{choice.key}: {choice.config}, {gain:.2f}x of the built-in tile")
    store(found, cache_path())
    click.echo(f"stored {len(found)} tiles in {cache_path()}")


def _size(shape: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", shape)
    if not found or int(found[2]) % 32:
        raise click.BadParameter(f"{shape!r} is not NxK with K a multiple of 32")
    return int(found[1]), int(found[2])
