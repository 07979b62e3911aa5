"""Where a conversion goes: layouts and engines named on the command line, one folder for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mxfp4.cli.options import RecipeFlags, gathered

if TYPE_CHECKING:
    from mxfp4.converters.plan import OutputOptions, Plan

Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE_NAMES = ("vllm", "sglang", "tokenspeed", "transformers", "trtllm", "llama.cpp", "mlx")
PRESET_NAMES = ("kimi-k3",)


@dataclass(frozen=True, slots=True)
class Target:
    """One output: its options, and the engines that it is meant for with what they say."""

    options: OutputOptions
    engines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def folder(self, output: Path, targets: Sequence[Target]) -> Path:
        """The folder of this output: OUTPUT itself if it is the only one."""
        return output if len(targets) == 1 else output / self.options.format


@dataclass(frozen=True, slots=True)
class TargetFlags:
    """Engines and layouts to write for, as `target_flags` took them from the command line."""

    activations: str
    engines: tuple[str, ...]
    emit: str | None
    preset: str | None


def target_flags(command: Command) -> Command:
    """Which engines and layouts to write for; the command's argument `aims`."""
    command = gathered(TargetFlags, "aims", command)
    for option in (
        click.option(
            "--preset",
            type=click.Choice(PRESET_NAMES),
            help="Settings for a published model: level, shard names and layout together.",
        ),
        click.option(
            "--activations",
            type=click.Choice(["none", "mxfp4", "fp8"]),
            default="none",
            show_default=True,
            help="What the config tells engines to do with activations; the tensors are the same.",
        ),
        click.option(
            "--emit",
            metavar="FORMATS",
            help="Write several layouts from one read, such as compressed-tensors,quark.",
        ),
        click.option(
            "--for",
            "engines",
            type=click.Choice(ENGINE_NAMES),
            multiple=True,
            help="Pick the layout that this engine loads, and say what it will not load. "
            "Repeatable.",
        ),
    ):
        command = option(command)
    return command


def with_preset(flags: RecipeFlags, aims: TargetFlags) -> RecipeFlags:
    """The flags with level, shard layout and format of a preset, where one is named."""
    from mxfp4.converters.presets import PRESETS

    if aims.preset is None:
        return flags
    found = PRESETS[aims.preset]
    if flags.level not in (None, str(found.level)):
        raise click.UsageError(f"--preset {aims.preset} quantizes {found.level}, not {flags.level}")
    return replace(flags, level=str(found.level), layout=found.layout, format_name=found.format)


def build_targets(source: Path, flags: RecipeFlags, aims: TargetFlags) -> list[Target]:
    """One target for every different layout asked for; engines that share one share the target."""
    from mxfp4.converters.engines import choose_layout, options_for
    from mxfp4.converters.formats import output_format

    base = flags.output_options(aims.activations)
    found: dict[str, Target] = {}
    config = _config(source) if aims.engines else {}
    for engine in aims.engines:
        options, note = options_for(engine, config, base), choose_layout(engine, config).note
        old = found.get(options.format, Target(options))
        notes = (*old.notes, f"{engine}: {note}") if note else old.notes
        found[options.format] = Target(options, (*old.engines, engine), notes)
    names = [name.strip() for name in (aims.emit or "").split(",") if name.strip()]
    for name in names or ([] if aims.engines else [base.format]):
        options = replace(base, format=output_format(name).name)
        found.setdefault(options.format, Target(options))
    return list(found.values())


def _config(source: Path) -> dict[str, Any]:
    """The model's config; what is wrong with the folder is said when it is opened."""
    from mxfp4.converters.checkpoint import CONFIG_NAME, read_json_object

    path = source / CONFIG_NAME
    return read_json_object(path) if path.is_file() else {}


def show_remarks(target: Target, plan: Plan) -> None:
    """What the engines of a target will not load."""
    from mxfp4.converters.engines import engine_remarks

    for note in target.notes:
        click.echo(f"layout   {target.options.format} for {note}")
    for engine in target.engines:
        remarks = engine_remarks(engine, plan)
        for remark in remarks:
            click.echo(f"warning  {engine} will not load: {remark}")
        if not remarks:
            click.echo(f"loads    {engine} takes the layout {target.options.format}")
