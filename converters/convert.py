"""`convert`: from a checkpoint folder to an MXFP4 checkpoint folder, resumable at every moment.

Plan from headers, lock the output, run one unit of work per output shard, then write config,
companion files, manifest and report, and the index last: until it exists, nobody can mistake the
folder for a model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4.converters.checkpoint import CONFIG_NAME, INDEX_NAME, Checkpoint, open_checkpoint
from mxfp4.converters.collector import collector_paused
from mxfp4.converters.executors import EXECUTORS, choose
from mxfp4.converters.nonfinite import find_nonfinite
from mxfp4.converters.output_config import output_config
from mxfp4.converters.plan import OutputOptions, OutputShard, Plan, Task
from mxfp4.converters.planning import make_plan, require_convertible, same_work
from mxfp4.converters.reader import DEFAULT_SLAB_BYTES
from mxfp4.converters.recipe import Recipe
from mxfp4.converters.report import MANIFEST_NAME, REPORT_NAME, manifest, markdown
from mxfp4.converters.state import OutputFolder, ShardRecord
from mxfp4.converters.work import Quantizer, Substitutes, Work
from mxfp4.errors import NoSpaceError, OutputError
from mxfp4.kernels.rows import encode_rows
from mxfp4.spec import CodecOptions

_SPARE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a conversion runs; none of these changes a byte of the result."""

    workers: int | None = None
    slab_bytes: int = DEFAULT_SLAB_BYTES
    overwrite: bool = False
    allow_missing_config: bool = False
    keep_nonfinite: bool = False
    """Leave tensors with NaN or infinity in their source dtype, instead of an error."""
    keep_odd_shapes: bool = False
    """Leave tensors whose contraction axis is no multiple of 32 alone, instead of an error."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Callbacks of a running conversion; called from worker threads."""

    on_plan: Callable[[Plan, int, int], None] = lambda plan, total_bytes, done_bytes: None
    """Source bytes to read in all, and how many of them an earlier run did."""
    on_bytes: Callable[[int], None] = lambda count: None
    on_shard: Callable[[ShardRecord], None] = lambda record: None


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a finished conversion did."""

    plan: Plan
    output: Path
    records: tuple[ShardRecord, ...]
    converted_shards: int
    """Shards written by this run; the others were finished before."""

    def to_json(self) -> dict[str, Any]:
        """The manifest, with how much of it this run did."""
        return {
            **manifest(self.plan, self.records),
            "output": str(self.output),
            "shards_converted_now": self.converted_shards,
            "shards_finished_before": len(self.records) - self.converted_shards,
        }


def convert(
    source: str | Path,
    output: str | Path,
    recipe: Recipe | None = None,
    options: OutputOptions | None = None,
    run: RunOptions | None = None,
    *,
    quantizer: Quantizer | None = None,
    substitutes: Substitutes | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> ConversionReport:
    """Convert a checkpoint folder; the same call continues an interrupted one.

    `quantizer` replaces the codec that the recipe's scale rule names, and `substitutes` the codes
    of single modules and the bytes of single kept tensors. Setting `stop` ends the run
    at the next slab with `InterruptedConversionError`. Raises an `Mxfp4Error` for every reason
    not to go on; the output folder then holds finished shards or nothing, never a half one.
    """
    recipe, run, progress = recipe or Recipe(), run or RunOptions(), progress or Progress()
    plan = plan_conversion(source, recipe, options, run)
    if substitutes is not None:
        plan = dataclasses.replace(plan, codes=substitutes.identity)
    targets = [(plan, Path(output))]
    (report,) = _convert_all(targets, run, progress, quantizer, substitutes, stop)
    return report


def convert_several(
    source: str | Path,
    outputs: Sequence[tuple[OutputOptions, str | Path]],
    recipe: Recipe | None = None,
    run: RunOptions | None = None,
    *,
    quantizer: Quantizer | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[ConversionReport]:
    """Convert a checkpoint into several layouts, each into a folder of its own.

    Layouts that cut the checkpoint into the same modules are written from one read: their shards
    hold the same modules, with sizes and names of the first. A layout that stacks experts shares a
    read only with its like; see `read_groups`. Raises whatever `convert` raises.
    """
    run, progress = run or RunOptions(), progress or Progress()
    folders = [Path(folder) for _, folder in outputs]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise OutputError("two outputs share one folder", hint="give every output its own")
    groups = read_groups(source, [options for options, _ in outputs], recipe, run)
    found: dict[int, ConversionReport] = {}
    for group in groups:
        targets = [(plan, folders[number]) for number, plan in group.items()]
        reports = _convert_all(targets, run, progress, quantizer, None, stop)
        found.update(zip(group, reports, strict=True))
    return [found[number] for number in range(len(outputs))]


def read_groups(
    source: str | Path,
    options: Sequence[OutputOptions],
    recipe: Recipe | None = None,
    run: RunOptions | None = None,
) -> list[dict[int, Plan]]:
    """Plans for several layouts by their number, grouped by what one read can serve."""
    groups: list[dict[int, Plan]] = []
    for number, each in enumerate(options):
        plan = plan_conversion(source, recipe, each, run)
        for group in groups:
            first = next(iter(group.values()))
            if same_work(_tasks(plan), _tasks(first)):
                group[number] = plan_conversion(source, recipe, each, run, like=first)
                break
        else:
            groups.append({number: plan})
    return groups


def _tasks(plan: Plan) -> list[Task]:
    return [task for shard in plan.shards for task in shard.tasks]


def _convert_all(
    targets: Sequence[tuple[Plan, Path]],
    run: RunOptions,
    progress: Progress,
    quantizer: Quantizer | None,
    substitutes: Substitutes | None,
    stop: threading.Event | None,
) -> list[ConversionReport]:
    """Run the units that any of the outputs lacks, then finish all of them."""
    plan = targets[0][0]
    for each, output in targets:
        require_apart(each.checkpoint.folder, output)
        require_convertible(each, allow_blocked=run.keep_odd_shapes)
    with ExitStack() as stack:
        folders = [stack.enter_context(OutputFolder(output)) for _, output in targets]
        pairs = [(each, folder) for (each, _), folder in zip(targets, folders, strict=True)]
        for each, folder in pairs:
            folder.adopt(each, owned_files(each), overwrite=run.overwrite)
        todo = [
            unit
            for unit in plan.shards
            if any(folder.finished(each.id, unit.name) is None for each, folder in pairs)
        ]
        names = {unit.name for unit in todo}
        _require_space(pairs, names)
        total = sum(map(_source_bytes, plan.shards))
        progress.on_plan(plan, total, total - sum(map(_source_bytes, todo)))
        work = Work(
            plan,
            folders[0],
            quantizer or default_quantizer(plan.recipe),
            slab_bytes=run.slab_bytes,
            drop_cache=_exceeds_memory(plan.checkpoint),
            on_bytes=progress.on_bytes,
            stop=stop or threading.Event(),
            substitutes=substitutes,
            also=tuple(pairs[1:]),
        )
        executor, workers = choose(run.workers, len(todo))
        for record in EXECUTORS[executor](todo, work, workers):
            progress.on_shard(record)
        return [
            ConversionReport(each, folder.path, _finish(folder, each), len(todo))
            for each, folder in pairs
        ]


def _finish(folder: OutputFolder, plan: Plan) -> tuple[ShardRecord, ...]:
    records = [folder.finished(plan.id, shard.name) for shard in plan.shards]
    found = tuple(record for record in records if record is not None)
    if len(found) != len(records):
        raise OutputError(
            "a finished shard is gone again", file=str(folder.path), hint="run the command again"
        )
    finish(folder, plan, found)
    return found


@collector_paused
def plan_conversion(
    source: str | Path,
    recipe: Recipe | None = None,
    options: OutputOptions | None = None,
    run: RunOptions | None = None,
    *,
    like: Plan | None = None,
) -> Plan:
    """The plan that `convert` would follow; reads headers only, unless `run.keep_nonfinite`.

    With `keep_nonfinite` the tensors to quantize are read once, so that the decision to keep one
    is part of the plan.
    """
    run = run or RunOptions()
    checkpoint = open_checkpoint(source, allow_missing_config=run.allow_missing_config)
    plan = make_plan(checkpoint, recipe, options, like=like)
    if run.keep_nonfinite:
        found = find_nonfinite(plan, run.slab_bytes)
        if found:
            plan = make_plan(checkpoint, recipe, options, keep=found, like=like)
    return plan


def default_quantizer(recipe: Recipe) -> Quantizer:
    """The codec for a recipe's scale and tie rules, with statistics."""
    options = CodecOptions(rule=recipe.rule, ties=recipe.ties)
    return functools.partial(encode_rows, options=options, statistics=True)


def require_apart(source: Path, output: Path) -> None:
    """Refuse an output folder that is the source or lies inside it, also through symlinks."""
    real_source, real_output = source.resolve(), output.resolve()
    if real_output == real_source or real_source in real_output.parents:
        where = "is the source folder" if real_output == real_source else "lies inside the source"
        raise OutputError(
            f"the output folder {where}",
            file=str(output),
            hint="choose a folder outside the source; the source is never written to",
        )


def owned_files(plan: Plan) -> list[str]:
    """Every file that a conversion writes, relative to the output folder."""
    names = [shard.name for shard in plan.shards]
    names += [INDEX_NAME, MANIFEST_NAME, REPORT_NAME, *plan.companions]
    return names if plan.checkpoint.config is None else [*names, CONFIG_NAME]


def output_index(plan: Plan) -> dict[str, Any]:
    """The index: bytes of all tensors, and the shard of each."""
    weight_map = {info.name: shard for shard, info in plan.output_tensors()}
    total = sum(shard.byte_count for shard in plan.shards)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def finish(folder: OutputFolder, plan: Plan, records: tuple[ShardRecord, ...]) -> None:
    """Write everything that is not a shard; the index last."""
    for name in plan.companions:
        _copy_companion(folder, plan.checkpoint.folder / name, name)
    if plan.checkpoint.config is not None:
        folder.write_file(CONFIG_NAME, _pretty(output_config(plan)))
    description = manifest(plan, records)
    folder.write_file(MANIFEST_NAME, _pretty(description))
    folder.write_file(REPORT_NAME, markdown(plan, records).encode())
    folder.write_file(INDEX_NAME, _pretty(output_index(plan)))


def _copy_companion(folder: OutputFolder, source: Path, name: str) -> None:
    target, temporary = folder.path / name, folder.temporary(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _require_space(pairs: Sequence[tuple[Plan, OutputFolder]], units: Collection[str]) -> None:
    """Refuse to begin on a disk that is too small for all outputs that lie on it."""
    needs: dict[int, int] = {}
    for plan, folder in pairs:
        todo = [shard.byte_count for shard in plan.shards if shard.name in units]
        if not todo:
            continue
        source = plan.checkpoint.folder
        companions = sum((source / name).stat().st_size for name in plan.companions)
        disk = os.stat(folder.path).st_dev
        needs[disk] = needs.get(disk, 0) + sum(todo) + companions + _SPARE_BYTES
        free = shutil.disk_usage(folder.path).free
        if free < needs[disk]:
            raise NoSpaceError(
                f"the output needs {needs[disk]:,} more bytes, the disk has {free:,} free",
                file=str(folder.path),
                hint="free some space or choose another disk; finished shards are kept",
            )


def _source_bytes(shard: OutputShard) -> int:
    """Source bytes that a unit reads, scales aside."""
    return sum(task.source_bytes for task in shard.tasks)


def _exceeds_memory(checkpoint: Checkpoint) -> bool:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return checkpoint.byte_count > memory // 2


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
