"""`mxfp4 sensitivity`: a recipe that spends a size budget where quantization hurts most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxfp4.cli.options import RecipeFlags, output_flags, parse_size, recipe_flags
from mxfp4.cli.render import Voice, emit_json, reported, size, table

if TYPE_CHECKING:
    from mxfp4.calibration.sensitivity import SensitivityReport

_SHOWN = 15


def _optional_size(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    return None if value is None else parse_size(context, parameter, value)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@recipe_flags
@click.option("--bits", type=float, help="Mean bits per weight of all that the level covers.")
@click.option("--max-size", callback=_optional_size, help="Bytes of all tensors of the result.")
@click.option(
    "--stats",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Statistics from `mxfp4 calibrate --collect`; without them weights alone decide.",
)
@click.option(
    "--write",
    "recipe_out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the recipe to this YAML file, for `mxfp4 convert --recipe`.",
)
@output_flags
def sensitivity(
    source: Path,
    flags: RecipeFlags,
    bits: float | None,
    max_size: int | None,
    stats: Path | None,
    recipe_out: Path | None,
    voice: Voice,
) -> None:
    """Rank the fusion groups of SOURCE by output error per byte saved, and keep the worst.

    Kept groups stay in the source dtype. Give one budget, --bits or --max-size.
    """
    with reported(voice):
        from mxfp4.calibration.sensitivity import Budget, recipe_yaml
        from mxfp4.calibration.sensitivity import sensitivity as run
        from mxfp4.calibration.statistics import Statistics
        from mxfp4.converters.convert import RunOptions, plan_conversion

        plan = plan_conversion(
            source,
            flags.recipe(),
            flags.output_options(),
            RunOptions(allow_missing_config=flags.allow_missing_config),
        )
        report = run(plan, Budget(bits, max_size), Statistics(stats) if stats else None)
        if recipe_out is not None:
            recipe_out.write_text(recipe_yaml(report.recipe.to_json()), encoding="utf-8")
        if voice.as_json:
            emit_json(report.to_json())
        elif not voice.quiet:
            _show(report, voice.verbose)


def _show(report: SensitivityReport, verbose: int) -> None:
    kept = {group.name for group in report.kept}
    shown = report.groups if verbose else report.groups[:_SHOWN]
    rows = [("group", "relative error", "bytes saved", "decision")]
    for group in shown:
        decision = "keep" if group.name in kept else "quantize"
        rows.append((group.name, f"{group.error:.5f}", size(group.saved_bytes), decision))
    click.echo(table(rows, left=(0, 3)))
    if len(report.groups) > len(shown):
        click.echo(f"and {len(report.groups) - len(shown):,} more; -v lists all")
    click.echo(
        f"{len(kept):,} of {len(report.groups):,} groups kept: {report.bits:.3f} bits per weight, "
        f"{size(report.byte_count)}"
    )
