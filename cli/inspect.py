"""`mxfp4 inspect`: what a checkpoint is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxfp4.cli.options import output_flags
from mxfp4.cli.render import Voice, emit_json, reported, size, table

if TYPE_CHECKING:
    from mxfp4.converters.inspection import Inspection


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@output_flags
def inspect(path: Path, voice: Voice) -> None:
    """Show what the checkpoint in PATH is: format, sizes by role and dtype, problems."""
    with reported(voice):
        from mxfp4.converters.inspection import inspect as read

        found = read(path)
        if voice.as_json:
            emit_json(found.to_json())
        elif not voice.quiet:
            _show(found, voice.verbose)


def _show(found: Inspection, verbose: int) -> None:
    kind = ", ".join(found.architectures) or found.model_type or "no architecture named"
    index = "with index" if found.indexed else "no index"
    click.echo(f"{found.folder}: {kind}")
    click.echo(
        f"{found.shard_count} shard(s) {index}, {found.tensor_count:,} tensors, "
        f"{found.parameter_count:,} stored elements, {size(found.byte_count)}"
    )
    click.echo(f"weights: {found.storage}\n")
    click.echo(_sizes("role", found.by_role))
    if verbose:
        click.echo("\n" + _sizes("dtype", found.by_dtype))
    if found.quantization is not None:
        method = found.quantization.get("quant_method", "unnamed")
        click.echo(f"\nquantization config: {method}")
        if verbose:
            click.echo(json.dumps(found.quantization, indent=2))
    for problem in found.problems:
        click.echo(f"\nproblem: {problem}")


def _sizes(first: str, rows: Sequence[dict[str, Any]]) -> str:
    names = [first] if first == "dtype" else [first, "dtype"]
    head = [*names, "tensors", "elements", "bytes"]
    body = [
        [
            *(str(row[name]) for name in names),
            f"{row['tensors']:,}",
            f"{row['elements']:,}",
            size(row["bytes"]),
        ]
        for row in rows
    ]
    return table([head, *body], left=range(len(names)))
