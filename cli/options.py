"""Options that several commands share, and the values they become."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from mxfp4.cli.render import Voice

if TYPE_CHECKING:
    from mxfp4.converters.plan import OutputOptions
    from mxfp4.converters.recipe import Recipe

Command = TypeVar("Command", bound=Callable[..., Any])

LEVELS = ("experts", "moe", "linear", "all")
RULES = ("even", "floor", "rceil", "search")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*$", re.IGNORECASE)


def parse_size(ctx: click.Context, parameter: click.Parameter, value: str) -> int:
    """Bytes from `5GB`, `512MiB` or a plain number."""
    match = _SIZE.match(value)
    unit = match[2].lower() if match else None
    if match is None or unit not in _UNITS:
        raise click.BadParameter(f"{value!r} is not a size; write 5GB or 512MiB")
    return int(float(match[1]) * _UNITS[unit])


@dataclass(frozen=True, slots=True)
class RecipeFlags:
    """What to quantize and how, as `recipe_flags` took it from the command line."""

    recipe_file: Path | None
    level: str | None
    keep: tuple[str, ...]
    quantize: tuple[str, ...]
    force_role: tuple[str, ...]
    rule: str | None
    format_name: str
    max_shard_size: int
    layout: str
    allow_missing_config: bool

    def recipe(self) -> Recipe:
        """The recipe that file and flags describe together; flags win, patterns add up."""
        from mxfp4.converters.recipe import Level, Recipe, parse_forced
        from mxfp4.spec import ScaleRule

        base = Recipe.load(self.recipe_file) if self.recipe_file else Recipe()
        return replace(
            base,
            level=Level(self.level) if self.level else base.level,
            keep=(*base.keep, *self.keep),
            quantize=(*base.quantize, *self.quantize),
            force_roles=base.force_roles | parse_forced(self.force_role),
            rule=ScaleRule(self.rule) if self.rule else base.rule,
        )

    def output_options(self, activations: str = "none") -> OutputOptions:
        """The layout of the output and its shards."""
        from mxfp4.converters.formats import output_format
        from mxfp4.converters.plan import OutputOptions

        name = output_format(self.format_name).name
        return OutputOptions(name, self.max_shard_size, self.layout, activations)


def gathered(kind: type[Any], name: str, command: Command) -> Command:
    """Hand a command the options that are fields of a dataclass as one argument `name`."""
    names = [field.name for field in fields(kind)]

    @functools.wraps(command)
    def call(*arguments: Any, **values: Any) -> Any:
        values[name] = kind(**{each: values.pop(each) for each in names})
        return command(*arguments, **values)

    return cast(Command, call)


def output_flags(command: Command) -> Command:
    """How a command speaks: `--json`, `-q`, `-v`, `--debug`; its argument `voice`."""
    command = gathered(Voice, "voice", command)
    for option in (
        click.option("--debug", is_flag=True, help="Show a traceback with an error."),
        click.option("-v", "--verbose", count=True, help="Say more; twice for every tensor."),
        click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors."),
        click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
    ):
        command = option(command)
    return command


def recipe_flags(command: Command) -> Command:
    """What to quantize and how; the command's argument `flags`."""
    command = gathered(RecipeFlags, "flags", command)
    for option in (
        click.option(
            "--allow-missing-config",
            is_flag=True,
            help="Decide by names and shapes alone when there is no config.json.",
        ),
        click.option(
            "--layout",
            type=click.Choice(["pack", "same"]),
            default="pack",
            show_default=True,
            help="Fill shards up to the size limit, or keep the source's shards and names.",
        ),
        click.option(
            "--max-shard-size",
            callback=parse_size,
            default="5GB",
            show_default=True,
            help="Largest output shard; a larger single module gets its own.",
        ),
        click.option(
            "--format",
            "format_name",
            default="compressed-tensors",
            show_default=True,
            help="Layout of the output.",
        ),
        click.option(
            "--rule",
            type=click.Choice(RULES),
            help="How a block's largest magnitude becomes its scale.  [default: even]",
        ),
        click.option(
            "--force-role",
            multiple=True,
            metavar="ROLE=quantize",
            help="Quantize a protected role after all, such as router=quantize.",
        ),
        click.option(
            "--quantize",
            multiple=True,
            metavar="PATTERN",
            help="Also quantize these: a name, a glob, or re:REGEX. Repeatable.",
        ),
        click.option(
            "--keep",
            multiple=True,
            metavar="PATTERN",
            help="Leave these in the source dtype: a name, a glob, or re:REGEX. Repeatable.",
        ),
        click.option(
            "--level",
            type=click.Choice(LEVELS),
            help="What to quantize.  [default: experts for MoE models, linear for dense ones]",
        ),
        click.option(
            "--recipe",
            "recipe_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A YAML file with the same settings; flags add to it.",
        ),
    ):
        command = option(command)
    return command
