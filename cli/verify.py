"""`mxfp4 verify`: check a converted folder, alone or against its source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxfp4.cli.options import output_flags
from mxfp4.cli.render import EXIT_DIFFERENT, Meter, Voice, emit_json, reported

if TYPE_CHECKING:
    from mxfp4.converters.verify import Verification

_SHOWN = 50


@click.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    help="Compare with this checkpoint: kept tensors byte by byte, quantized ones by encoding "
    "them again, or by their nearness and hashes where calibration chose the codes.",
)
@click.option("--deep", is_flag=True, help="Also read everything: all hashes, all scale bytes.")
@output_flags
def verify(
    output: Path,
    source: Path | None,
    deep: bool,
    voice: Voice,
) -> None:
    """Check OUTPUT; exit code 5 if anything differs.

    Without options only headers, sizes, index and config are read.
    """
    with reported(voice):
        from mxfp4.converters.verify import verify as check

        meter = Meter("verify", quiet=voice.silent)
        meter.start(_bytes_to_read(output, source, deep))
        try:
            result = check(output, source, deep=deep, on_bytes=meter.advance)
        finally:
            meter.close()
        if voice.as_json:
            emit_json(result.to_json())
        elif not voice.quiet or not result.ok:
            _show(result, voice.verbose)
        if not result.ok:
            raise click.exceptions.Exit(EXIT_DIFFERENT)


def _bytes_to_read(output: Path, source: Path | None, deep: bool) -> int:
    folders = [source] if source is not None else []
    folders += [output] if deep else []
    return sum(file.stat().st_size for f in folders for file in f.glob("*.safetensors"))


def _show(result: Verification, verbose: int) -> None:
    checked = ", ".join(f"{count:,} {what}" for what, count in result.checked.items())
    for finding in result.findings[:_SHOWN]:
        click.echo(f"{finding.place}: {finding.problem}")
    if len(result.findings) > _SHOWN:
        click.echo(f"and {len(result.findings) - _SHOWN:,} more; --json lists all")
    for note in result.notes:
        click.echo(f"note: {note}")
    if result.modules:
        statistics = result.statistics
        if statistics.elements:
            click.echo(
                f"relative error {statistics.relative_l2:.4f}, "
                f"largest {statistics.max_abs_error:.4g}, clipped {statistics.clipped_share:.3%}"
            )
        else:
            click.echo("relative errors of calibrated modules, worst first:")
        for module, error in result.worst(10 if verbose else 3):
            click.echo(f"  {error:.4f}  {module}")
    verdict = "no differences" if result.ok else f"{len(result.findings):,} difference(s)"
    click.echo(f"{result.output}: {verdict} ({checked})")
    if result.source is None and not result.deep:
        click.echo("only headers, sizes, index and config were read; --deep reads all bytes")
