"""`mxfp4 bench`: what measurements say."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def bench() -> None:
    """Read the results of the benchmarks."""


@bench.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG too.")
def report(results: Path, plot: Path | None) -> None:
    """Print the table of a JSON file that benchmarks/bench_kernels.py wrote."""
    from mxfp4.kernels import report as make

    found = make.load_results(results)
    click.echo(make.table(found))
    if plot is not None:
        plot.write_text(make.plot(found))
