"""`mxfp4 completion`: print the shell script that completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "fish", "zsh")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash: eval "$(mxfp4 completion bash)" in ~/.bashrc
    zsh:  eval "$(mxfp4 completion zsh)" in ~/.zshrc
    fish: mxfp4 completion fish > ~/.config/fish/completions/mxfp4.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    root = ctx.find_root()
    click.echo(kind(root.command, {}, "mxfp4", "_MXFP4_COMPLETE").source())
