"""`mxfp4 status`: how far a conversion is."""

from __future__ import annotations

from pathlib import Path

import click

from mxfp4.cli.options import output_flags
from mxfp4.cli.render import Voice, emit_json, reported, size


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
@output_flags
def status(output: Path, voice: Voice) -> None:
    """Show how much of OUTPUT is done; exit code 4 while it is incomplete."""
    with reported(voice):
        from mxfp4.converters.status import status as read_status

        found = read_status(output)
        if voice.as_json:
            emit_json(found.to_json())
        elif not voice.quiet:
            state = "complete" if found.complete else "running" if found.running else "stopped"
            click.echo(
                f"{output}: {state}, {found.shards_done} of {found.shards_total} shards, "
                f"{size(found.bytes_done)} of {size(found.bytes_total)}"
            )
            if voice.verbose:
                click.echo(f"plan {found.plan}")
        if not found.complete:
            raise click.exceptions.Exit(4)
