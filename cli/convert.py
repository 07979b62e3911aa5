"""`mxfp4 convert`: the main command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxfp4.cli.options import Command, RecipeFlags, gathered, output_flags, parse_size, recipe_flags
from mxfp4.cli.plan import plan_json, show_plan
from mxfp4.cli.render import (
    EventLog,
    Meter,
    Voice,
    emit_json,
    reported,
    size,
    termination_unwinds,
)
from mxfp4.cli.targets import (
    Target,
    TargetFlags,
    build_targets,
    show_remarks,
    target_flags,
    with_preset,
)

if TYPE_CHECKING:
    from mxfp4.converters.convert import ConversionReport, Progress, RunOptions
    from mxfp4.converters.plan import Plan
    from mxfp4.converters.recipe import Recipe
    from mxfp4.converters.state import ShardRecord


@dataclass(frozen=True, slots=True)
class RunFlags:
    """How a conversion runs, as `run_flags` took it from the command line."""

    overwrite: bool
    on_nonfinite: str
    on_odd_shape: str
    workers: int | None
    slab_size: int

    def options(self, allow_missing_config: bool) -> RunOptions:
        """The same as `convert` wants it."""
        from mxfp4.converters.convert import RunOptions

        return RunOptions(
            workers=self.workers,
            slab_bytes=self.slab_size,
            overwrite=self.overwrite,
            allow_missing_config=allow_missing_config,
            keep_nonfinite=self.on_nonfinite == "keep",
            keep_odd_shapes=self.on_odd_shape == "keep",
        )


def run_flags(command: Command) -> Command:
    """How the conversion runs; the command's argument `how`."""
    command = gathered(RunFlags, "how", command)
    for option in (
        click.option(
            "--slab-size",
            callback=parse_size,
            default="2MiB",
            show_default=True,
            help="Source bytes a worker holds at a time.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(1),
            help="Shards at a time.  [default: half the cores, and one]",
        ),
        click.option(
            "--on-odd-shape",
            type=click.Choice(["error", "keep"]),
            default="error",
            show_default=True,
            help="What to do with a tensor whose contraction axis is no multiple of 32.",
        ),
        click.option(
            "--on-nonfinite",
            type=click.Choice(["error", "keep"]),
            default="error",
            show_default=True,
            help="What to do with a tensor that holds NaN or infinity.",
        ),
        click.option(
            "--overwrite",
            is_flag=True,
            help="Replace an earlier output of this tool; other files are never touched.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@recipe_flags
@target_flags
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
@run_flags
@click.option(
    "--log-json", type=click.Path(dir_okay=False), help="Append events to this file as JSON lines."
)
@output_flags
def convert(
    source: Path,
    output: Path,
    flags: RecipeFlags,
    aims: TargetFlags,
    dry_run: bool,
    how: RunFlags,
    log_json: str | None,
    voice: Voice,
) -> None:
    """Convert the checkpoint folder SOURCE to MXFP4 in OUTPUT.

    The same command continues an interrupted run. OUTPUT is complete once its index exists. With
    several layouts, each gets a folder of its name inside OUTPUT.
    """
    # numpy starts a BLAS thread per core, which spins beside our own and is never used here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with reported(voice), termination_unwinds():
        flags = with_preset(flags, aims)
        recipe = flags.recipe()
        targets = build_targets(source, flags, aims)
        run = how.options(flags.allow_missing_config)
        if dry_run:
            _dry_run(source, recipe, targets, run, voice)
        else:
            reports = _convert(source, output, recipe, targets, run, log_json, voice)
            _show_results(reports, targets, source, voice)


def _dry_run(
    source: Path, recipe: Recipe, targets: Sequence[Target], run: RunOptions, voice: Voice
) -> None:
    from mxfp4.converters.convert import plan_conversion

    made = [plan_conversion(source, recipe, target.options, run) for target in targets]
    if voice.as_json:
        documents = [plan_json(plan, []) for plan in made]
        emit_json(documents[0] if len(documents) == 1 else {"outputs": documents})
    elif not voice.quiet:
        for plan, target in zip(made, targets, strict=True):
            show_plan(plan)
            show_remarks(target, plan)


def _convert(
    source: Path,
    output: Path,
    recipe: Recipe,
    targets: Sequence[Target],
    run: RunOptions,
    log_json: str | None,
    voice: Voice,
) -> list[ConversionReport]:
    """Run the conversion with a progress meter and the event log."""
    from mxfp4.converters.convert import convert_several

    log = EventLog(log_json)
    meter = Meter("convert", quiet=voice.silent)
    log("start", source=str(source), output=str(output))
    try:
        reports = convert_several(
            source,
            [(target.options, target.folder(output, targets)) for target in targets],
            recipe,
            run,
            progress=_progress(meter, log, targets, voice),
        )
        shards = sum(len(report.records) for report in reports)
        log("end", shards=shards, converted=sum(report.converted_shards for report in reports))
    except BaseException as error:
        log("error", type=type(error).__name__, message=str(error))
        raise
    finally:
        meter.close()
        log.close()
    return reports


def _progress(meter: Meter, log: EventLog, targets: Sequence[Target], voice: Voice) -> Progress:
    from mxfp4.converters.convert import Progress

    def on_plan(made: Plan, total: int, done: int) -> None:
        target = next(t for t in targets if t.options.format == made.options.format)
        if not voice.silent:
            if target is not targets[0]:
                click.echo(f"\nnote     {made.options.format} needs a read of its own")
            show_plan(made)
            show_remarks(target, made)
            click.echo("")
        log("plan", plan=made.id, **made.totals)
        for warning in made.warnings:
            log("warning", message=warning)
        meter.close()
        meter.start(total, done)

    def on_shard(record: ShardRecord) -> None:
        facts: dict[str, Any] = {"shard": record.shard, "bytes": record.byte_count}
        log("shard_done", **facts, sha256=record.sha256)
        if voice.verbose:
            voice.say(f"{record.shard}: {size(record.byte_count)}, sha256 {record.sha256}")

    return Progress(on_plan, meter.advance, on_shard)


def _show_results(
    reports: Sequence[ConversionReport], targets: Sequence[Target], source: Path, voice: Voice
) -> None:
    if voice.as_json:
        documents = [report.to_json() for report in reports]
        emit_json(documents[0] if len(documents) == 1 else {"outputs": documents})
    elif not voice.quiet:
        for report, target in zip(reports, targets, strict=True):
            if report is not reports[0]:
                show_remarks(target, report.plan)
            _show_result(report, source)


def _show_result(report: ConversionReport, source: Path) -> None:
    from mxfp4.converters.report import REPORT_NAME, overall_error

    before = len(report.records) - report.converted_shards
    earlier = f", {before} of them finished before" if before else ""
    click.echo(
        f"done     {report.output}: {len(report.records)} shard(s){earlier}, "
        f"{size(report.plan.totals['bytes_after'])}"
    )
    if error := overall_error(report.records):
        click.echo(
            f"error    relative L2 {error['relative_l2']:.4f}, "
            f"clipped {error['clipped_share']:.3%}, flushed {error['flushed_share']:.3%}"
        )
    click.echo(f"report   {report.output / REPORT_NAME}")
    click.echo(f"next     mxfp4 verify {report.output} --source {source}")
