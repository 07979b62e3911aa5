"""`mxfp4 compare`: how far one checkpoint's predictions are from another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mxfp4.cli.options import output_flags
from mxfp4.cli.render import Voice, emit_json, reported, table
from mxfp4.cli.text import TextFlags, layer_meter, model_flags, text_file


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option(
    "--text",
    "files",
    type=text_file,
    multiple=True,
    required=True,
    help="Text to predict, one file per domain. Repeatable.",
)
@model_flags
@output_flags
def compare(
    first: Path,
    second: Path,
    files: tuple[Path, ...],
    text: TextFlags,
    voice: Voice,
) -> None:
    """Compare the predictions of checkpoint SECOND with those of FIRST.

    Either may be plain or MXFP4. Tells KL(FIRST || SECOND), how often the most likely token is the
    same, and the perplexity of both, with 95 % intervals over sequences.
    """
    with reported(voice):
        from mxfp4.calibration.compare import compare as run

        silent = voice.silent or not voice.verbose
        found = run(
            first,
            second,
            text.samples(first, files),
            text.model_options(),
            memory_bytes=text.memory,
            on_layer=layer_meter("compare", silent),
        ).to_json()
        if voice.as_json:
            emit_json(found)
        elif not voice.quiet:
            _show(found)


def _show(found: dict[str, Any]) -> None:
    rows = [("", "KL", "same top token", "perplexity", "of the second")]
    for name, figures in [("all", found["all"]), *found["domains"].items()]:
        rows.append(
            (
                name,
                f"{figures['kl']:.5f} ± {figures['kl_interval']:.5f}",
                f"{figures['top1']:.2%} ± {figures['top1_interval']:.2%}",
                f"{figures['perplexity_first']:.3f}",
                f"{figures['perplexity_second']:.3f}",
            )
        )
    click.echo(table(rows))
    click.echo(f"{found['tokens']:,} predicted tokens")
