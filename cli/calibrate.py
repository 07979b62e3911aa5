"""`mxfp4 calibrate`: convert with codes chosen for the text that the model will see."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxfp4.cli.options import RecipeFlags, output_flags, recipe_flags
from mxfp4.cli.render import Meter, Voice, emit_json, reported, size, termination_unwinds
from mxfp4.cli.text import TextFlags, layer_meter, model_flags, text_file
from mxfp4.errors import RecipeError

if TYPE_CHECKING:
    from mxfp4.calibration.calibrate import CalibrationReport
    from mxfp4.calibration.methods import MethodOptions
    from mxfp4.converters.convert import Progress, RunOptions

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
    text: TextFlags,
    flags: RecipeFlags,
    voice: Voice,
) -> None:
    """Convert SOURCE to MXFP4 in OUTPUT with codes that suit the model's real inputs.

    The output has the tensors, names and sizes of a plain conversion. The model is run one decoder
    layer at a time; the same command continues an interrupted run. Routers are not changed, unless
    --refit-routers asks for it.
    """
    with reported(voice), termination_unwinds():
        job = _Job(source, flags, text, overwrite, voice)
        if collect is not None:
            if refit_routers:
                raise RecipeError("--collect changes nothing", hint="leave out --refit-routers")
            _collect(job, collect, files)
            return
        if output is None:
            raise RecipeError("there is no OUTPUT", hint="name a folder, or use --collect FOLDER")
        result: dict[str, Any] = {}
        if method is not None or refit_routers or not check_routers:
            chosen = _method(method or "gptq", fold_norms, refit_routers)
            if stats is not None:
                report = _from_statistics(job, output, stats, chosen)
            else:
                report = _from_text(job, output, files, chosen)
            result["calibration"] = report.to_json()
        if check_routers:
            seed = text.seed if check_files else text.seed + 1
            result["routers"] = _check(job, output, check_files or files, seed)
        _write_page(output, result)
        if voice.as_json:
            emit_json(result)
        elif not voice.quiet:
            _show(output, result)


@dataclass(frozen=True, slots=True)
class _Job:
    """What every step of the command needs."""

    source: Path
    flags: RecipeFlags
    text: TextFlags
    overwrite: bool
    voice: Voice

    def run_options(self) -> RunOptions:
        """How the conversion behind the calibration runs."""
        from mxfp4.converters.convert import RunOptions

        allow = self.flags.allow_missing_config
        return RunOptions(overwrite=self.overwrite, allow_missing_config=allow)

    def layers(self, what: str) -> Callable[[int, int], None]:
        """Layer counts on stderr."""
        return layer_meter(what, self.voice.silent)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Progress of the conversion behind the calibration."""
        from mxfp4.converters.convert import Progress

        meter = Meter("write", quiet=self.voice.silent)
        try:
            yield Progress(lambda plan, total, done: meter.start(total, done), meter.advance)
        finally:
            meter.close()


def _method(name: str, fold_norms: bool | None, refit_routers: bool) -> MethodOptions:
    from mxfp4.calibration.methods import MethodOptions

    return MethodOptions(name, fold_norms=fold_norms, refit_routers=refit_routers)


def _collect(job: _Job, folder: Path, files: Sequence[Path]) -> None:
    from mxfp4.calibration.calibrate import collect_statistics

    found = collect_statistics(
        job.source,
        folder,
        job.text.samples(job.source, files),
        job.flags.recipe(),
        job.text.model_options(),
        memory_bytes=job.text.memory,
        on_layer=job.layers("collect"),
    )
    total = sum(file.stat().st_size for file in folder.iterdir())
    if job.voice.as_json:
        emit_json({"modules": len(found.modules), "bytes": total, "data": dict(found.facts)})
    job.voice.say(f"{folder}: statistics of {len(found.modules):,} modules, {size(total)}")


def _from_text(
    job: _Job, output: Path, files: Sequence[Path], method: MethodOptions
) -> CalibrationReport:
    from mxfp4.calibration.calibrate import CalibrationOptions
    from mxfp4.calibration.calibrate import calibrate as engine

    with job.progress() as progress:
        return engine(
            job.source,
            output,
            job.text.samples(job.source, files),
            job.flags.recipe(),
            CalibrationOptions(method, job.text.model_options(), job.text.memory),
            job.flags.output_options(),
            job.run_options(),
            on_layer=job.layers("calibrate"),
            progress=progress,
        )


def _from_statistics(
    job: _Job, output: Path, folder: Path, method: MethodOptions
) -> CalibrationReport:
    from mxfp4.calibration.calibrate import calibrate_from
    from mxfp4.calibration.statistics import Statistics

    with job.progress() as progress:
        return calibrate_from(
            job.source,
            output,
            Statistics(folder),
            job.flags.recipe(),
            method,
            job.flags.output_options(),
            job.run_options(),
            on_layer=job.layers("calibrate"),
            progress=progress,
        )


def _check(job: _Job, output: Path, files: Sequence[Path], seed: int) -> dict[str, Any]:
    from mxfp4.calibration.routers import check_routers

    found = check_routers(
        job.source,
        output,
        job.text.samples(job.source, files, seed),
        job.text.model_options(),
        memory_bytes=job.text.memory,
        on_layer=job.layers("check routers"),
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
