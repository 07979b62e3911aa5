"""Make a plan: classify, decide, cut stacked banks into matrices, fill output shards.

Everything here is a pure function of the checkpoint's headers, the recipe and the options.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mxfp4.converters.checkpoint import CONFIG_NAME, Checkpoint
from mxfp4.converters.decide import Action, Decision, decide_each, default_level
from mxfp4.converters.formats import OutputFormat, Payload, output_format
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.ignore import ignore_patterns
from mxfp4.converters.ignore_check import NameSet, check_ignore
from mxfp4.converters.notes import plan_warnings
from mxfp4.converters.output_config import stale_files
from mxfp4.converters.patterns import module_name
from mxfp4.converters.plan import OutputOptions, OutputShard, Plan, PlannedTensor, Task, Treatment
from mxfp4.converters.recipe import Recipe
from mxfp4.converters.roles import Classified, classify_each
from mxfp4.converters.sources import Source, read_sources
from mxfp4.converters.sources.types import PLAIN
from mxfp4.converters.tasks import MODULES, bank_matrices, make_tasks, module_of, tasks_of
from mxfp4.converters.treatments import packed_roles, treat
from mxfp4.errors import (
    CorruptCheckpointError,
    RecipeError,
    ShapeError,
    UnsupportedFormatError,
)

__all__ = ["bank_matrices", "make_plan", "module_of", "require_convertible", "tasks_of"]

_HEAD = "lm_head"


def make_plan(
    checkpoint: Checkpoint,
    recipe: Recipe | None = None,
    options: OutputOptions | None = None,
    *,
    keep: Mapping[str, str] | None = None,
    like: Plan | None = None,
) -> Plan:
    """Decide every tensor of a checkpoint and lay out the output.

    `keep` maps tensor names to reasons for leaving them (and their fusion group) in the source
    dtype on top of what the recipe says. `like` is a plan for another layout whose shards shall
    hold the same tasks, so that one read serves both (see `same_work`). Raises `RecipeError` for
    patterns that match nothing or contradict the protection of routers and norms, and for a
    recipe or a `like` that the layout cannot follow.
    """
    recipe = recipe or Recipe()
    options = options or OutputOptions()
    layout = output_format(options.format)
    _require_offered(layout, options, checkpoint)
    found = read_sources(checkpoint)
    infos = [_as_values(source) for source in found.sources]
    classified = classify_each(infos, checkpoint.config)
    roles = classified.roles
    if found.quantized:
        roles = packed_roles(found.sources, infos, roles, checkpoint.config)
    level = recipe.level or default_level(roles)
    decisions = decide_each(infos, roles, replace(recipe, level=level))
    if keep:
        decisions = _keep_groups([info.name for info in infos], decisions, keep)
    tensors = treat(found.sources, decisions, layout, checkpoint)
    tasks = make_tasks(tensors, layout, checkpoint.config or {})
    if like is None:
        shards = _fill_shards(checkpoint, tasks, options, layout)
    else:
        shards = _same_shards(tasks, like, layout)
    plan = Plan(
        checkpoint,
        recipe,
        level,
        options,
        tensors,
        shards,
        (),
        (),
        dropped=found.dropped,
        stale=stale_files(checkpoint),
    )
    return replace(plan, ignore=_ignore(plan, classified), warnings=plan_warnings(plan))


def _as_values(source: Source) -> TensorInfo:
    """What classification and recipes see: the tensor as if it were not quantized."""
    info = source.info
    return info if source.storage == PLAIN else TensorInfo(info.name, "BF16", info.shape)


def _require_offered(layout: OutputFormat, options: OutputOptions, checkpoint: Checkpoint) -> None:
    """Raise unless the layout exists for this model and can say this about activations."""
    if options.activations not in layout.activations:
        raise RecipeError(
            f"the layout {layout.name} has no way to ask for {options.activations} activations",
            hint="it knows " + ", ".join(sorted(layout.activations)),
        )
    model = str((checkpoint.config or {}).get("model_type"))
    if layout.model_types is not None and model not in layout.model_types:
        raise UnsupportedFormatError(
            f"the layout {layout.name} has no names for models of type {model!r}",
            file=CONFIG_NAME,
            hint="it exists for " + ", ".join(sorted(layout.model_types)),
        )


def _keep_groups(
    names: Sequence[str], decisions: Sequence[Decision], keep: Mapping[str, str]
) -> list[Decision]:
    found = dict(zip(names, decisions, strict=True))
    groups = {role.group: name for name in keep if (role := found[name].role).group is not None}
    changed = list(decisions)
    for position, (name, decision) in enumerate(zip(names, decisions, strict=True)):
        if decision.action is not Action.QUANTIZE:
            continue
        cause = name if name in keep else groups.get(decision.role.group or "")
        if cause is not None:
            reason = keep[cause] if cause == name else f"kept with {cause}: {keep[cause]}"
            changed[position] = decision._replace(action=Action.KEEP, reason=reason)
    return changed


def _fill_shards(
    checkpoint: Checkpoint,
    tasks: Sequence[Task],
    options: OutputOptions,
    layout: OutputFormat,
) -> tuple[OutputShard, ...]:
    """Group tasks into output files; a module's codes and scales are one task and never part."""
    groups: list[list[Task]] = [[]]
    sizes = [0]
    output_names: list[str] = []

    @functools.cache
    def written(shape: tuple[int, ...]) -> tuple[list[str], int]:
        """Leaves and bytes of the tensors of an MXFP4 module."""
        tensors = layout.tensors("", shape)
        return [info.name for info in tensors], sum(info.byte_count for info in tensors)

    for task in tasks:
        if task.treatment in MODULES:
            leaves, task_bytes = written(task.shape)
            output_names += [f"{task.module}{leaf}" for leaf in leaves]
        else:
            outputs = task.outputs(layout)
            task_bytes = sum(info.byte_count for info in outputs)
            output_names += [info.name for info in outputs]
        if options.layout == "same":
            full = bool(groups[-1]) and task.shard != groups[-1][-1].shard
        else:
            full = sizes[-1] + task_bytes > options.max_shard_bytes
        if groups[-1] and full:
            groups.append([])
            sizes.append(0)
        groups[-1].append(task)
        sizes[-1] += task_bytes
    if len(set(output_names)) < len(output_names):
        _refuse_clash(tasks, layout)
    if options.layout == "same":
        # Output folders are flat; a shard from a sub-folder keeps its path as part of its name.
        names = [checkpoint.shards[group[0].shard].name.replace("/", "-") for group in groups]
    else:
        total = len(groups)
        names = [f"model-{n + 1:05d}-of-{total:05d}.safetensors" for n in range(total)]
    return tuple(
        OutputShard(name, tuple(group), size)
        for name, group, size in zip(names, groups, sizes, strict=True)
    )


def _same_shards(
    tasks: Sequence[Task], like: Plan, layout: OutputFormat
) -> tuple[OutputShard, ...]:
    """The tasks of another layout in the shards of a plan."""
    wanted = [task for shard in like.shards for task in shard.tasks]
    if not same_work(tasks, wanted):
        raise RecipeError(
            f"the layouts {like.options.format} and {layout.name} do not cut this checkpoint into "
            "the same tensors, so they cannot be written from one read",
            hint="convert into each of them by itself",
        )
    _refuse_clash(tasks, layout)
    shards, start = [], 0
    for shard in like.shards:
        group = tuple(tasks[start : start + len(shard.tasks)])
        size = sum(task.byte_count(layout) for task in group)
        shards.append(OutputShard(shard.name, group, size))
        start += len(group)
    return tuple(shards)


def same_work(tasks: Sequence[Task], others: Sequence[Task]) -> bool:
    """Whether two lists of tasks read and encode the same matrices in the same order."""
    return len(tasks) == len(others) and all(
        (a.treatment, a.matrices, a.lanes, a.transposed, a.part, a.source.parts)
        == (b.treatment, b.matrices, b.lanes, b.transposed, b.part, b.source.parts)
        for a, b in zip(tasks, others, strict=True)
    )


def bytes_after(tensor: PlannedTensor, plan: Plan) -> int:
    """Bytes of what one source tensor becomes."""
    if tensor.treatment is Treatment.KEEP:
        return tensor.byte_count
    rows, columns = tensor.info.element_count // tensor.info.shape[-1], tensor.info.shape[-1]
    if tensor.treatment is Treatment.DECODE:
        return rows * columns * (1 if plan.format.payload is Payload.FP8 else 2)
    if tensor.decision.role.axis != len(tensor.info.shape) - 1:
        rows, columns = columns, rows
    return sum(info.byte_count for info in plan.format.tensors("", (rows, columns)))


def _refuse_clash(tasks: Iterable[Task], layout: OutputFormat) -> None:
    """Raise `CorruptCheckpointError` if two tasks would write tensors of one name."""
    sources: dict[str, str] = {}
    for task in tasks:
        source = task.stored.info.name
        for info in task.outputs(layout):
            other = sources.setdefault(info.name, source)
            if other is not source:
                raise CorruptCheckpointError(
                    f"the output would hold this name twice: from {other} and from {source}",
                    tensor=info.name,
                    hint="keep one of the two with --keep",
                )


def _ignore(plan: Plan, classified: Classified) -> tuple[str, ...]:
    """Patterns for layouts that list what is not quantized, checked both ways."""
    if not plan.format.ignores:
        return ()
    packed = _packed_modules(plan.tensors, classified)
    # A kept bias belongs to the module of its weight, which may be quantized.
    kept = {
        module: tensor.decision.role
        for tensor in plan.tensors
        if tensor.treatment not in MODULES
        and (module := module_name(tensor.info.name)) not in packed
    }
    patterns = ignore_patterns(packed, kept)
    if _HEAD not in packed and not any(_HEAD in pattern for pattern in patterns):
        # A tied head is not stored, but engines build the module all the same.
        patterns.append(f"re:.*\\b{_HEAD}$")
        check_ignore(patterns, packed, kept)
    return tuple(patterns)


def _packed_modules(tensors: Sequence[PlannedTensor], classified: Classified) -> NameSet:
    """The modules that end as MXFP4. Only those of banks have names that were not parsed yet."""
    banks: list[str] = []
    members: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    names = zip(classified.families, classified.indices, strict=True)
    for tensor, (family, indices) in zip(tensors, names, strict=True):
        if tensor.treatment in MODULES:
            role = tensor.decision.role
            if role.bank is None:
                members[family].append(indices)
            else:
                banks += [module for module, _ in bank_matrices(tensor.info, role, role.bank)]
    packed = NameSet(banks)
    for family, found in members.items():
        packed.add_members(module_of(family), found)
    return packed


def require_convertible(plan: Plan, *, allow_blocked: bool = False) -> None:
    """Raise unless every tensor that the recipe wants to quantize can be."""
    quantization = plan.checkpoint.quantization
    if quantization is not None and all(tensor.source.plain for tensor in plan.tensors):
        raise UnsupportedFormatError(
            "the config says that the source is already quantized "
            f"({quantization.get('quant_method', 'unnamed')}), but no tensor is stored in a "
            "quantized form that is read here",
            file=CONFIG_NAME,
            hint="start from the BF16, FP16 or FP32 checkpoint; if this is it, remove the entry "
            "from its config",
        )
    if plan.blocked and not allow_blocked:
        first = plan.blocked[0]
        others = f" (and {len(plan.blocked) - 1} more)" if len(plan.blocked) > 1 else ""
        raise ShapeError(
            f"{first.decision.reason}{others}",
            file=plan.checkpoint.shards[first.shard].name,
            tensor=first.info.name,
            hint=f"leave it in its source dtype with --keep '{first.info.name}', "
            "or all such tensors with --on-odd-shape keep",
        )
