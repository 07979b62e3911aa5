"""`mxfp4 bench`: what measurements say."""

from __future__ import annotations

from pathlib import Path

import click

from mxfp4.cli.options import output_flags
from mxfp4.cli.render import Voice, emit_json, reported


@click.group()
def bench() -> None:
    """Read the results of the benchmarks."""


@bench.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG too.")
@output_flags
def report(results: Path, plot: Path | None, voice: Voice) -> None:
    """Print the table of a JSON file that benchmarks/bench_kernels.py wrote."""
    with reported(voice):
        from mxfp4.kernels import report as make

        found = make.load_results(results)
        if plot is not None:
            plot.write_text(make.plot(found))
        if voice.as_json:
            emit_json(found)
        elif not voice.quiet:
            click.echo(make.table(found))
