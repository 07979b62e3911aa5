"""Where a conversion goes: layouts and engines named on the command line, one folder for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

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


def target_flags(command: Command) -> Command:
    """Which engines and layouts to write for."""
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


def with_preset(
    preset: str | None, level: str | None, layout: str, format_name: str
) -> tuple[str | None, str, str]:
    """Level, shard layout and format, those of a preset where one is named."""
    from mxfp4.converters.presets import PRESETS

    if preset is None:
        return level, layout, format_name
    found = PRESETS[preset]
    if level not in (None, str(found.level)):
        raise click.UsageError(f"--preset {preset} quantizes {found.level}, not {level}")
    return str(found.level), found.layout, found.format


def build_targets(
    source: Path,
    format_name: str,
    emit: str | None,
    engines: Sequence[str],
    activations: str,
    max_shard_size: int,
    layout: str,
) -> list[Target]:
    """One target for every different layout asked for; engines that share one share the target."""
    from mxfp4.converters.engines import choose_layout, options_for
    from mxfp4.converters.formats import output_format
    from mxfp4.converters.plan import OutputOptions

    base = OutputOptions(output_format(format_name).name, max_shard_size, layout, activations)
    found: dict[str, Target] = {}
    config = _config(source) if engines else {}
    for engine in engines:
        options, note = options_for(engine, config, base), choose_layout(engine, config).note
        old = found.get(options.format, Target(options))
        notes = (*old.notes, f"{engine}: {note}") if note else old.notes
        found[options.format] = Target(options, (*old.engines, engine), notes)
    names = [name.strip() for name in (emit or "").split(",") if name.strip()]
    for name in names or ([] if engines else [base.format]):
        options = OutputOptions(output_format(name).name, max_shard_size, layout, activations)
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
