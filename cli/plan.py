"""`mxfp4 plan`: what a conversion would do, from headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxfp4.cli.options import RecipeFlags, output_flags, recipe_flags
from mxfp4.cli.render import Voice, emit_object, reported, size, table
from mxfp4.cli.targets import TargetFlags, build_targets, show_remarks, target_flags, with_preset
from mxfp4.converters.collector import collector_paused

if TYPE_CHECKING:
    from mxfp4.converters.parallel import ParallelRow
    from mxfp4.converters.plan import Plan, PlannedTensor

_KEPT_ROWS = 40


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="List every tensor with its decision.")
@click.option(
    "--tp",
    metavar="SIZES",
    help="Check tensor-parallel sizes against engine kernels, such as 1,2,4,8.",
)
@recipe_flags
@target_flags
@output_flags
@collector_paused
def plan(
    source: Path,
    tensors: bool,
    tp: str | None,
    flags: RecipeFlags,
    aims: TargetFlags,
    voice: Voice,
) -> None:
    """Show what converting SOURCE would do, without writing anything."""
    with reported(voice):
        from mxfp4.converters.convert import RunOptions, plan_conversion

        flags = with_preset(flags, aims)
        targets = build_targets(source, flags, aims)
        recipe = flags.recipe()
        run = RunOptions(allow_missing_config=flags.allow_missing_config)
        made, *others = (plan_conversion(source, recipe, t.options, run) for t in targets)
        sizes = _parallel_sizes(tp)
        if voice.as_json:
            emit_object(_facts_json(made), "tensors", _rows(made), _parallel_json(made, sizes))
        elif not voice.quiet:
            for target, each in zip(targets, (made, *others), strict=True):
                show_plan(each)
                show_remarks(target, each)
            click.echo("\n" + _kept_table(made))
            if tensors or voice.verbose > 1:
                click.echo("\n" + _tensor_table(made))
            if sizes:
                click.echo("\n" + _parallel_table(made, sizes))
            if not made.blocked:
                click.echo(f"\nnext     mxfp4 convert {source} OUT")


def plan_json(made: Plan, parallel_sizes: list[int]) -> dict[str, Any]:
    """The plan as the JSON document of `mxfp4 plan --json`."""
    tensors = [_tensor_json(tensor) for tensor in made.tensors]
    return {**_facts_json(made), "tensors": tensors, **_parallel_json(made, parallel_sizes)}


def _facts_json(made: Plan) -> dict[str, Any]:
    from mxfp4.converters.report import not_as_asked, role_table

    config = made.checkpoint.config or {}
    return {
        "model_type": config.get("model_type"),
        "level": str(made.level),
        "format": made.options.format,
        "rule": str(made.recipe.rule),
        "totals": {**made.totals, "peak_memory_per_worker": peak_memory()},
        "roles": role_table(made),
        "ignore": list(made.ignore),
        "warnings": list(made.warnings),
        "blocked": not_as_asked(made),
    }


def _parallel_json(made: Plan, sizes: list[int]) -> dict[str, Any]:
    return {"tensor_parallel": [row.to_json() for row in _parallel(made, sizes)]} if sizes else {}


def peak_memory() -> int:
    """Bytes that one worker adds at most to the process: slabs, their codes, the spool."""
    from mxfp4.converters.work import peak_worker_bytes

    return peak_worker_bytes()


def show_plan(made: Plan) -> None:
    """The summary that `plan` and `convert` both print."""
    config = made.checkpoint.config or {}
    totals = made.totals
    kind = config.get("model_type") or "unknown model type"
    click.echo(
        f"{made.checkpoint.folder.name}  {kind}, level {made.level}, rule {made.recipe.rule}"
        f"  ({totals['source_shards']:,} shards, {totals['tensors']:,} tensors)\n"
    )
    click.echo(_totals_table(made))
    click.echo(
        f"\noutput   {totals['output_shards']:,} shard(s), {made.options.format}, "
        f"{size(totals['bytes_after'])} of disk"
    )
    click.echo(f"memory   at most {size(peak_memory())} per worker beyond the interpreter")
    for warning in made.warnings:
        click.echo(f"note     {warning}")
    for tensor in made.blocked[:5]:
        click.echo(f"blocked  {tensor.info.name}: {tensor.decision.reason}")
    if made.blocked:
        click.echo(
            f"         convert refuses {len(made.blocked)} such tensor(s); leave them in their "
            "source dtype with --keep PATTERN or --on-odd-shape keep"
        )


def _totals_table(made: Plan) -> str:
    """Bytes before and after per role; quantized roles first."""
    from mxfp4.converters.plan import Treatment
    from mxfp4.converters.planning import bytes_after

    words = {
        Treatment.QUANTIZE: " -> mxfp4",
        Treatment.PASS: "  (mxfp4 already)",
        Treatment.DECODE: "  (decoded)",
        Treatment.KEEP: "  (kept)",
    }
    order = list(words)
    rows: dict[tuple[int, str], list[int]] = {}
    for tensor, count in made.kinds:
        key = order.index(tensor.treatment), str(tensor.decision.role.role)
        row = rows.setdefault(key, [0, 0, 0])
        for position, value in enumerate((1, tensor.byte_count, bytes_after(tensor, made))):
            row[position] += count * value
    lines = [["", "tensors", "before", "after", "ratio"]]
    for (rank, role), row in sorted(rows.items(), key=lambda item: (item[0][0], -item[1][1])):
        lines.append(_totals_row(f"{role}{words[order[rank]]}", row))
    total = [sum(row[position] for row in rows.values()) for position in range(3)]
    return table([*lines, _totals_row("total", total)])


def _totals_row(label: str, row: list[int]) -> list[str]:
    count, before, after = row
    ratio = f"{after / before:.3f}" if before else "-"
    return [f"  {label}", f"{count:,}", size(before), size(after), ratio]


def _kept_table(made: Plan) -> str:
    """Everything that is kept and why, unrecognised names first."""
    from mxfp4.converters.report import kept_groups

    groups = kept_groups(made)
    rows = [["kept", "tensors", "first of them", "because"]]
    for group in groups[:_KEPT_ROWS]:
        role = group["role"] if group["recognised"] else f"{group['role']} (unrecognised)"
        rows.append([role, f"{group['tensors']:,}", group["first"], group["reason"]])
    text = table(rows, left=(0, 2, 3))
    more = len(groups) - _KEPT_ROWS
    return f"{text}\nand {more} more; --tensors lists every tensor" if more > 0 else text


def _tensor_json(tensor: PlannedTensor) -> dict[str, Any]:
    decision, info = tensor.decision, tensor.info
    return {
        "name": info.name,
        "shape": list(info.shape),
        "dtype": info.dtype,
        "role": str(decision.role.role),
        "action": str(tensor.treatment),
        "axis": decision.role.axis,
        "reason": decision.reason,
    }


def _rows(made: Plan) -> Iterator[str]:
    """Every tensor as JSON: what follows the name is the same text for all of a kind."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    facts = [_tensor_json(tensor) for tensor, _ in made.kinds]
    rests = [encode({key: row[key] for key in row if key != "name"})[1:] for row in facts]
    for (source, _, _), number in zip(made.tensors, made.tensors.kind_numbers, strict=True):
        yield f'{{"name": {encode(source.info.name)}, {rests[number]}'


def _tensor_table(made: Plan) -> str:
    rows = [["tensor", "dtype", "shape", "role", "action", "axis", "reason"]]
    for tensor in made.tensors:
        row = _tensor_json(tensor)
        axis = "" if row["axis"] is None else str(row["axis"])
        shape = "x".join(map(str, row["shape"]))
        rows.append(
            [row["name"], row["dtype"], shape, row["role"], row["action"], axis, row["reason"]]
        )
    return table(rows, left=(0, 1, 2, 3, 4, 6))


def _parallel_sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise click.UsageError(f"--tp wants sizes such as 1,2,4,8, not {text!r}")
    return sizes


def _parallel(made: Plan, sizes: list[int]) -> list[ParallelRow]:
    from mxfp4.converters.parallel import parallel_advice

    infos = [tensor.info for tensor in made.quantized]
    return parallel_advice(infos, {t.info.name: t.decision for t in made.quantized}, sizes)


def _parallel_table(made: Plan, sizes: list[int]) -> str:
    """One line per kind of weight and size: what every kernel family does with a rank's part."""
    found = _parallel(made, sizes)
    if not found:
        return "tensor parallel: nothing is quantized"
    families = list(found[0].fits)
    rows = [["tensor parallel", "tp", "split", "N", "K", *families]]
    for row in found:
        n, k = ("cut" if part is None else f"{part:,}" for part in (row.n, row.k))
        label = f"{row.module} ({row.count:,})"
        fits = [str(row.fits[family]) for family in families]
        rows.append([label, str(row.degree), str(row.split), n, k, *fits])
    return table(rows)
