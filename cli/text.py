"""Options of the commands that run a model on text, and the values they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mxfp4.cli.options import gathered, parse_size

if TYPE_CHECKING:
    from mxfp4.calibration.samples import Samples
    from mxfp4.calibration.streaming.skeleton import ModelOptions

Command = TypeVar("Command", bound=Callable[..., Any])

text_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class TextFlags:
    """How much text is taken and how the model is run, as `model_flags` took it."""

    tokens: int
    sequence_length: int
    seed: int
    memory: int
    trust_remote_code: bool

    def samples(self, folder: Path, files: Sequence[Path], seed: int | None = None) -> Samples:
        """Token sequences from text files with the tokenizer of a checkpoint folder."""
        from mxfp4.calibration.samples import SampleOptions, load_tokenizer, read_samples

        tokenizer = load_tokenizer(folder, trust_remote_code=self.trust_remote_code)
        number = self.seed if seed is None else seed
        return read_samples(
            files, tokenizer, SampleOptions(self.tokens, self.sequence_length, number)
        )

    def model_options(self) -> ModelOptions:
        """How the model is built."""
        from mxfp4.calibration.streaming.skeleton import ModelOptions

        return ModelOptions(trust_remote_code=self.trust_remote_code)


def model_flags(command: Command) -> Command:
    """How much text is taken and how the model is run; the command's argument `text`."""
    command = gathered(TextFlags, "text", command)
    for option in (
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Run model code from the checkpoint folder. Only for folders you trust.",
        ),
        click.option(
            "--memory",
            callback=parse_size,
            default="4GiB",
            show_default=True,
            help="Bound for the temporaries of one layer; activations are in files.",
        ),
        click.option("--seed", default=0, show_default=True, help="Which documents are drawn."),
        click.option(
            "--sequence-length",
            type=click.IntRange(32),
            default=512,
            show_default=True,
            help="Tokens of a sequence; fewer when the budget would leave a file out.",
        ),
        click.option(
            "--tokens",
            type=click.IntRange(32),
            default=32_768,
            show_default=True,
            help="Tokens taken from all files together.",
        ),
    ):
        command = option(command)
    return command


def layer_meter(description: str, silent: bool) -> Callable[[int, int], None]:
    """Tell on stderr how many layers are done."""

    def tell(done: int, total: int) -> None:
        if not silent:
            click.echo(f"{description}: layer {done} of {total}", err=True)

    return tell
