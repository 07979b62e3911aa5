"""`mxfp4 calibrate`: convert with codes chosen for the text that the model will see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxfp4.cli.options import build_options, build_recipe, output_flags, recipe_flags
from mxfp4.cli.render import Meter, emit_json, reported, size, termination_unwinds
from mxfp4.cli.text import layer_meter, load_samples, model_flags, model_options, text_file
from mxfp4.errors import RecipeError

if TYPE_CHECKING:
    from mxfp4.calibration.calibrate import CalibrationReport
    from mxfp4.calibration.methods import MethodOptions
    from mxfp4.calibration.samples import Samples
    from mxfp4.converters.convert import Progress, RunOptions
    from mxfp4.converters.plan import OutputOptions
    from mxfp4.converters.recipe import Recipe

METHODS = ("even", "search", "gptq", "gptq+")
HTML_NAME = "mxfp4_calibration.html"
ROUTERS_NAME = "mxfp4_routers.json"
_folder = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path), required=False)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    help="even: as convert. search: scales weighted by the inputs. gptq: errors carried on to "
    "later columns. gptq+: and channel folds and coordinate descent.  [default: gptq, unless only "
    "--check-routers is asked]",
)
@click.option(
    "--text",
    "files",
    type=text_file,
    multiple=True,
    help="Text to calibrate on, one file per domain. Repeatable; breadth matters most.",
)
@click.option(
    "--collect", type=_folder, help="Write statistics of SOURCE to this new folder; no OUTPUT."
)
@click.option("--stats", type=_folder, help="Take statistics from this folder; no model is run.")
@click.option(
    "--check-routers",
    is_flag=True,
    help="Compare the routing of SOURCE and OUTPUT layer by layer; alone, OUTPUT is only read.",
)
@click.option(
    "--check-text",
    "check_files",
    type=text_file,
    multiple=True,
    help="Text for --check-routers.  [default: that of --text, other documents]",
)
@click.option(
    "--fold-norms/--no-fold-norms",
    default=None,
    help="Let gptq+ change norm gains.  [default: only in models without routers]",
)
@click.option(
    "--refit-routers",
    is_flag=True,
    help="Fit routers to their inputs in the rounded model, where held-out tokens then reach the "
    "source's experts more often. The only option that changes a router.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier output of this tool.")
@model_flags
@recipe_flags
@output_flags
def calibrate(
    source: Path,
    output: Path | None,
    method: str | None,
    files: tuple[Path, ...],
    collect: Path | None,
    stats: Path | None,
    check_routers: bool,
    check_files: tuple[Path, ...],
    fold_norms: bool | None,
    refit_routers: bool,
    overwrite: bool,
    tokens: int,
    sequence_length: int,
    seed: int,
    memory: int,
    trust_remote_code: bool,
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
    as_json: bool,
    quiet: bool,
    verbose: int,
    debug: bool,
) -> None:
    """Convert SOURCE to MXFP4 in OUTPUT with codes that suit the model's real inputs.

    The output has the tensors, names and sizes of a plain conversion. The model is run one decoder
    layer at a time; the same command continues an interrupted run. Routers are not
    changed, unless --refit-routers asks for it.
    """
    with reported(as_json, debug), termination_unwinds():
        from mxfp4.converters.convert import RunOptions

        recipe = build_recipe(recipe_file, level, keep, quantize, force_role, rule)
        run = RunOptions(overwrite=overwrite, allow_missing_config=allow_missing_config)
        say = _Speech(as_json, quiet)

        def samples(chosen: tuple[Path, ...], number: int) -> Samples:
            return load_samples(source, chosen, tokens, sequence_length, number, trust_remote_code)

        if collect is not None:
            if refit_routers:
                raise RecipeError("--collect changes nothing", hint="leave out --refit-routers")
            _collect(source, collect, samples(files, seed), recipe, memory, trust_remote_code, say)
            return
        if output is None:
            raise RecipeError("there is no OUTPUT", hint="name a folder, or use --collect FOLDER")
        result: dict[str, Any] = {}
        if method is not None or refit_routers or not check_routers:
            chosen = _method(method or "gptq", fold_norms, refit_routers)
            options = build_options(format_name, max_shard_size, layout)
            if stats is not None:
                report = _from_statistics(source, output, stats, recipe, chosen, options, run, say)
            else:
                report = _from_text(
                    source,
                    output,
                    samples(files, seed),
                    recipe,
                    chosen,
                    options,
                    run,
                    memory,
                    trust_remote_code,
                    say,
                )
            result["calibration"] = report.to_json()
        if check_routers:
            checked = samples(check_files or files, seed if check_files else seed + 1)
            result["routers"] = _check(source, output, checked, memory, trust_remote_code, say)
        _write_page(output, result)
        say.end(output, result)


class _Speech:
    """What the command tells while it runs and at its end."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.silent = as_json or quiet

    def layers(self, what: str) -> Any:
        """Layer counts on stderr."""
        return layer_meter(what, self.silent)

    def progress(self) -> tuple[Progress, Meter]:
        """Progress of the conversion behind the calibration."""
        from mxfp4.converters.convert import Progress

        meter = Meter("write", quiet=self.silent)
        return Progress(lambda plan, total, done: meter.start(total, done), meter.advance), meter

    def end(self, output: Path, result: dict[str, Any]) -> None:
        """The result as JSON or in a few lines."""
        if self.as_json:
            emit_json(result)
        elif not self.silent:
            _show(output, result)


def _method(name: str, fold_norms: bool | None, refit_routers: bool) -> MethodOptions:
    from mxfp4.calibration.methods import MethodOptions

    return MethodOptions(name, fold_norms=fold_norms, refit_routers=refit_routers)


def _collect(
    source: Path,
    folder: Path,
    samples: Samples,
    recipe: Recipe,
    memory: int,
    trust_remote_code: bool,
    say: _Speech,
) -> None:
    from mxfp4.calibration.calibrate import collect_statistics

    found = collect_statistics(
        source,
        folder,
        samples,
        recipe,
        model_options(trust_remote_code),
        memory_bytes=memory,
        on_layer=say.layers("collect"),
    )
    total = sum(file.stat().st_size for file in folder.iterdir())
    if say.as_json:
        emit_json({"modules": len(found.modules), "bytes": total, "data": dict(found.facts)})
    elif not say.silent:
        click.echo(f"{folder}: statistics of {len(found.modules):,} modules, {size(total)}")


def _from_text(
    source: Path,
    output: Path,
    samples: Samples,
    recipe: Recipe,
    method: MethodOptions,
    options: OutputOptions,
    run: RunOptions,
    memory: int,
    trust_remote_code: bool,
    say: _Speech,
) -> CalibrationReport:
    from mxfp4.calibration.calibrate import CalibrationOptions
    from mxfp4.calibration.calibrate import calibrate as engine

    progress, meter = say.progress()
    settings = CalibrationOptions(method, model_options(trust_remote_code), memory)
    try:
        return engine(
            source,
            output,
            samples,
            recipe,
            settings,
            options,
            run,
            on_layer=say.layers("calibrate"),
            progress=progress,
        )
    finally:
        meter.close()


def _from_statistics(
    source: Path,
    output: Path,
    folder: Path,
    recipe: Recipe,
    method: MethodOptions,
    options: OutputOptions,
    run: RunOptions,
    say: _Speech,
) -> CalibrationReport:
    from mxfp4.calibration.calibrate import calibrate_from
    from mxfp4.calibration.statistics import Statistics

    progress, meter = say.progress()
    try:
        return calibrate_from(
            source,
            output,
            Statistics(folder),
            recipe,
            method,
            options,
            run,
            on_layer=say.layers("calibrate"),
            progress=progress,
        )
    finally:
        meter.close()


def _check(
    source: Path,
    output: Path,
    samples: Samples,
    memory: int,
    trust_remote_code: bool,
    say: _Speech,
) -> dict[str, Any]:
    from mxfp4.calibration.routers import check_routers

    found = check_routers(
        source,
        output,
        samples,
        model_options(trust_remote_code),
        memory_bytes=memory,
        on_layer=say.layers("check routers"),
    ).to_json()
    (output / ROUTERS_NAME).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def _write_page(output: Path, result: dict[str, Any]) -> None:
    from mxfp4.calibration.report import page
    from mxfp4.converters.compare import CALIBRATION_REPORT

    calibration = result.get("calibration")
    stored = output / CALIBRATION_REPORT
    if calibration is None and stored.is_file():
        calibration = json.loads(stored.read_bytes())
    text = page(calibration, result.get("routers"))
    (output / HTML_NAME).write_text(text, encoding="utf-8")


def _show(output: Path, result: dict[str, Any]) -> None:
    if calibration := result.get("calibration"):
        summary = calibration["summary"]
        click.echo(
            f"codes    {summary['modules']:,} modules, mean output error "
            f"{summary['mean_output_error']:.5f}, without calibration "
            f"{summary['mean_output_error_even']:.5f}"
        )
        click.echo(
            f"tokens   {len(summary['few_tokens']):,} modules saw few, "
            f"{len(summary['kept_even']):,} of them were written as without calibration"
        )
        if calibration["options"]["refit_routers"]:
            count = sum(len(layer["routers"]) for layer in calibration["layers"])
            click.echo(f"routers  {len(summary['refitted_routers']):,} of {count:,} re-fitted")
        for note in summary["notes"]:
            click.echo(f"note     {note}")
    if routers := result.get("routers"):
        summary = routers["summary"]
        first = summary["first_divergence"]
        click.echo(
            f"routing  same experts {summary['same_set']:.2%} (mean over layers), "
            f"{summary['never_changed']:.2%} in all layers; router KL {summary['router_kl']:.5f}"
        )
        where = "nowhere" if first is None else f"first in layer {first}"
        click.echo(f"changes  {where}")
        changed = summary["protected_changed"]
        click.echo(
            f"kept     {summary['protected_tensors']:,} protected tensors, "
            f"{len(changed):,} of them changed"
        )
        if refitted := summary["routers_refitted"]:
            click.echo(f"refitted {len(refitted):,} routers, on request")
    click.echo(f"report   {output / HTML_NAME}")
