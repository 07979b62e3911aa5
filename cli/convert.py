"""`mxfp4 convert`: the main command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxfp4.cli.options import build_recipe, output_flags, parse_size, recipe_flags
from mxfp4.cli.plan import plan_json, show_plan
from mxfp4.cli.render import (
    EventLog,
    Meter,
    emit_json,
    reported,
    size,
    speaker,
    termination_unwinds,
)
from mxfp4.cli.targets import Target, build_targets, show_remarks, target_flags, with_preset

if TYPE_CHECKING:
    from mxfp4.converters.convert import ConversionReport, Progress
    from mxfp4.converters.plan import Plan
    from mxfp4.converters.state import ShardRecord


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@recipe_flags
@target_flags
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace an earlier output of this tool; other files are never touched.",
)
@click.option(
    "--on-nonfinite",
    type=click.Choice(["error", "keep"]),
    default="error",
    show_default=True,
    help="What to do with a tensor that holds NaN or infinity.",
)
@click.option(
    "--on-odd-shape",
    type=click.Choice(["error", "keep"]),
    default="error",
    show_default=True,
    help="What to do with a tensor whose contraction axis is no multiple of 32.",
)
@click.option(
    "--workers", type=click.IntRange(1), help="Shards at a time.  [default: one for two cores]"
)
@click.option(
    "--slab-size",
    callback=parse_size,
    default="2MiB",
    show_default=True,
    help="Source bytes a worker holds at a time.",
)
@click.option(
    "--log-json", type=click.Path(dir_okay=False), help="Append events to this file as JSON lines."
)
@output_flags
def convert(
    source: Path,
    output: Path,
    recipe_file: Path | None,
    level: str | None,
    keep: tuple[str, ...],
    quantize: tuple[str, ...],
    force_role: tuple[str, ...],
    rule: str | None,
    format_name: str,
    max_shard_size: int,
    layout: str,
    allow_missing_config: bool,
    activations: str,
    engines: tuple[str, ...],
    emit: str | None,
    preset: str | None,
    dry_run: bool,
    overwrite: bool,
    on_nonfinite: str,
    on_odd_shape: str,
    workers: int | None,
    slab_size: int,
    log_json: str | None,
    as_json: bool,
    quiet: bool,
    verbose: int,
    debug: bool,
) -> None:
    """Convert the checkpoint folder SOURCE to MXFP4 in OUTPUT.

    The same command continues an interrupted run. OUTPUT is complete once its index exists. With
    several layouts, each gets a folder of its name inside OUTPUT.
    """
    # numpy starts a BLAS thread per core, which spins beside our own and is never used here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with reported(as_json, debug), termination_unwinds():
        from mxfp4.converters import convert as engine

        level, layout, format_name = with_preset(preset, level, layout, format_name)
        recipe = build_recipe(recipe_file, level, keep, quantize, force_role, rule)
        targets = build_targets(
            source, format_name, emit, engines, activations, max_shard_size, layout
        )
        run = engine.RunOptions(
            workers=workers,
            slab_bytes=slab_size,
            overwrite=overwrite,
            allow_missing_config=allow_missing_config,
            keep_nonfinite=on_nonfinite == "keep",
            keep_odd_shapes=on_odd_shape == "keep",
        )
        if dry_run:
            made = [engine.plan_conversion(source, recipe, t.options, run) for t in targets]
            _dry_run(made, targets, as_json, quiet)
            return
        log = EventLog(log_json)
        meter = Meter("convert", quiet=quiet or as_json)
        log("start", source=str(source), output=str(output))
        try:
            reports = engine.convert_several(
                source,
                [(target.options, target.folder(output, targets)) for target in targets],
                recipe,
                run,
                progress=_progress(meter, log, targets, silent=quiet or as_json, verbose=verbose),
            )
        except BaseException as error:
            log("error", type=type(error).__name__, message=str(error))
            log.close()
            raise
        finally:
            meter.close()
        shards = sum(len(report.records) for report in reports)
        log("end", shards=shards, converted=sum(report.converted_shards for report in reports))
        log.close()
        if as_json:
            documents = [report.to_json() for report in reports]
            emit_json(documents[0] if len(documents) == 1 else {"outputs": documents})
        elif not quiet:
            for report, target in zip(reports, targets, strict=True):
                if report is not reports[0]:
                    show_remarks(target, report.plan)
                _show_result(report, source)


def _dry_run(made: list[Plan], targets: list[Target], as_json: bool, quiet: bool) -> None:
    if as_json:
        documents = [plan_json(plan, []) for plan in made]
        emit_json(documents[0] if len(documents) == 1 else {"outputs": documents})
    elif not quiet:
        for plan, target in zip(made, targets, strict=True):
            show_plan(plan)
            show_remarks(target, plan)


def _progress(
    meter: Meter, log: EventLog, targets: list[Target], *, silent: bool, verbose: int
) -> Progress:
    from mxfp4.converters.convert import Progress

    say = speaker(silent, False)

    def on_plan(made: Plan, total: int, done: int) -> None:
        target = next(t for t in targets if t.options.format == made.options.format)
        if not silent:
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
        if verbose:
            say(f"{record.shard}: {size(record.byte_count)}, sha256 {record.sha256}")

    return Progress(on_plan, meter.advance, on_shard)


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
