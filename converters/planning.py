"""Make a plan: classify, decide, cut stacked banks into matrices, fill output shards.

Everything here is a pure function of the checkpoint's headers, the recipe and the options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mxfp4.converters.checkpoint import CONFIG_NAME, Checkpoint
from mxfp4.converters.decide import Action, Decision, decide, default_level
from mxfp4.converters.formats import OutputFormat, output_format
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.ignore import ignore_patterns
from mxfp4.converters.ignore_check import check_ignore
from mxfp4.converters.plan import (
    OutputOptions,
    OutputShard,
    Plan,
    PlannedTensor,
    Task,
)
from mxfp4.converters.reader import MatrixView
from mxfp4.converters.recipe import Recipe
from mxfp4.converters.roles import ExpertBank, Role, TensorRole, classify
from mxfp4.errors import CorruptCheckpointError, ShapeError, UnsupportedFormatError

_WEIGHT_LEAF = ".weight"
_HEAD = "lm_head"


def make_plan(
    checkpoint: Checkpoint,
    recipe: Recipe | None = None,
    options: OutputOptions | None = None,
    *,
    keep: Mapping[str, str] | None = None,
) -> Plan:
    """Decide every tensor of a checkpoint and lay out the output.

    `keep` maps tensor names to reasons for leaving them (and their fusion group) in the source
    dtype on top of what the recipe says. Raises `RecipeError` for patterns that match nothing
    or contradict the protection of routers and norms.
    """
    recipe = recipe or Recipe()
    options = options or OutputOptions()
    layout = output_format(options.format)
    infos = checkpoint.tensors()
    roles = classify(infos, checkpoint.config)
    level = recipe.level or default_level(roles)
    decisions = decide(infos, roles, replace(recipe, level=level))
    if keep:
        decisions = _keep_groups(decisions, keep)
    tensors = tuple(
        PlannedTensor(shard, stored, decisions[stored.info.name])
        for shard, stored in checkpoint.located()
    )
    shards = _fill_shards(checkpoint, tensors, options, layout)
    plan = Plan(checkpoint, recipe, level, options, tensors, shards, (), ())
    return replace(plan, ignore=_ignore(plan), warnings=_warnings(plan))


def tasks_of(tensor: PlannedTensor) -> Iterator[Task]:
    """The output modules that one source tensor becomes."""
    role, info = tensor.decision.role, tensor.info
    if tensor.decision.action is Action.KEEP:
        yield Task(tensor.shard, tensor.stored)
    elif role.bank is not None:
        for module, view in bank_matrices(info, role, role.bank):
            yield Task(tensor.shard, tensor.stored, module, view)
    else:
        rows, columns = info.shape
        view = MatrixView.plain(rows, columns)
        if role.axis == 0:
            view = MatrixView(columns, rows, 0, 1, columns)
        yield Task(tensor.shard, tensor.stored, module_of(info.name), view)


def module_of(tensor: str) -> str:
    """The module that owns a weight: the name without its `.weight` leaf."""
    return tensor.removesuffix(_WEIGHT_LEAF)


def bank_matrices(
    info: TensorInfo, role: TensorRole, bank: ExpertBank
) -> Iterator[tuple[str, MatrixView]]:
    """(module name, view) of every expert matrix of a stacked or flattened bank.

    [E, P N, K] and [E, K, P N] banks, also flattened to two axes, hold P projections for each of
    E experts, one after the other or with their rows interleaved. Names follow the per-expert
    layout that engines load: `…experts.{e}.{projection}`.
    """
    experts, count = bank.expert_count, len(bank.projections)
    first, second = info.shape[-2], info.shape[-1]
    k_last = role.axis == len(info.shape) - 1
    if len(info.shape) == 2:
        first //= experts
    stacked_rows, columns = (first, second) if k_last else (second, first)
    rows = stacked_rows // count
    parent = _expert_container(info.name)
    interleaved = bank.arrangement == "interleaved"
    for expert in range(experts):
        base = expert * first * second
        for part, projection in enumerate(bank.projections):
            skip = part if interleaved else part * rows
            step = count if interleaved else 1
            view = (
                MatrixView(rows, columns, base + skip * columns, step * columns, 1)
                if k_last
                else MatrixView(rows, columns, base + skip, step, stacked_rows)
            )
            yield f"{parent}.{expert}.{projection}", view


def _expert_container(tensor: str) -> str:
    parent = module_of(tensor).rpartition(".")[0]
    inside = any("expert" in segment for segment in parent.split(".")[-2:])
    return parent if inside else f"{parent}.experts" if parent else "experts"


def _keep_groups(decisions: Mapping[str, Decision], keep: Mapping[str, str]) -> dict[str, Decision]:
    groups = {role.group: name for name in keep if (role := decisions[name].role).group is not None}
    changed = dict(decisions)
    for name, decision in decisions.items():
        if decision.action is not Action.QUANTIZE:
            continue
        cause = name if name in keep else groups.get(decision.role.group or "")
        if cause is not None:
            reason = keep[cause] if cause == name else f"kept with {cause}: {keep[cause]}"
            changed[name] = replace(decision, action=Action.KEEP, reason=reason)
    return changed


def _fill_shards(
    checkpoint: Checkpoint,
    tensors: Sequence[PlannedTensor],
    options: OutputOptions,
    layout: OutputFormat,
) -> tuple[OutputShard, ...]:
    """Group tasks into output files; a module's codes and scales are one task and never part."""
    groups: list[list[Task]] = [[]]
    sizes = [0]
    for number, tensor in enumerate(tensors):
        new_source = number > 0 and tensor.shard != tensors[number - 1].shard
        for task in tasks_of(tensor):
            task_bytes = task.byte_count(layout)
            full = sizes[-1] + task_bytes > options.max_shard_bytes
            if groups[-1] and (new_source if options.layout == "same" else full):
                groups.append([])
                sizes.append(0)
            new_source = False
            groups[-1].append(task)
            sizes[-1] += task_bytes
    if options.layout == "same":
        # Output folders are flat; a shard from a sub-folder keeps its path as part of its name.
        names = [checkpoint.shards[group[0].shard].name.replace("/", "-") for group in groups]
    else:
        total = len(groups)
        names = [f"model-{n + 1:05d}-of-{total:05d}.safetensors" for n in range(total)]
    _require_unique(groups, layout)
    return tuple(
        OutputShard(name, tuple(group), size)
        for name, group, size in zip(names, groups, sizes, strict=True)
    )


def _require_unique(groups: Sequence[Sequence[Task]], layout: OutputFormat) -> None:
    seen: dict[str, str] = {}
    for group in groups:
        for task in group:
            for info in task.outputs(layout):
                if info.name in seen:
                    raise CorruptCheckpointError(
                        f"the output would hold this name twice: from {seen[info.name]} "
                        f"and from {task.stored.info.name}",
                        tensor=info.name,
                        hint="keep one of the two with --keep",
                    )
                seen[info.name] = task.stored.info.name


def _ignore(plan: Plan) -> tuple[str, ...]:
    quantized = [
        task.module for shard in plan.shards for task in shard.tasks if task.module is not None
    ]
    kept = {
        module_of(tensor.info.name): tensor.decision.role
        for tensor in plan.tensors
        if tensor.decision.action is Action.KEEP
    }
    patterns = ignore_patterns(quantized, kept)
    if _HEAD not in quantized and not any(_HEAD in pattern for pattern in patterns):
        # A tied head is not stored, but engines build the module all the same.
        patterns.append(f"re:.*\\b{_HEAD}$")
    check_ignore(patterns, quantized, kept)
    return tuple(patterns)


def _warnings(plan: Plan) -> tuple[str, ...]:
    found = list(plan.checkpoint.warnings)
    unknown = sum(1 for tensor in plan.tensors if not tensor.decision.role.recognised)
    if unknown:
        found.append(f"{unknown} tensor(s) have unrecognised names and are kept; see the table")
    if not plan.quantized:
        found.append(f"level {plan.level} quantizes nothing in this checkpoint")
    cut = sum(1 for tensor in plan.quantized if tensor.decision.role.bank is not None)
    if cut:
        found.append(f"{cut} stacked expert bank(s) are written as one matrix per expert")
    biases = sum(
        1
        for tensor in plan.tensors
        if tensor.decision.role.role is Role.BIAS and len(tensor.info.shape) > 1
    )
    if cut and biases:
        found.append(
            f"{biases} stacked expert bias(es) keep their source names; "
            "loaders of per-expert checkpoints may not look for them"
        )
    turned = sum(
        1
        for tensor in plan.quantized
        if tensor.decision.role.bank is None and tensor.decision.role.axis == 0
    )
    if turned:
        found.append(
            f"{turned} weight(s) stored as [in, out] (Conv1D) are written as [out, in] Linear "
            "codes; transformers does not build such layers for Conv1D models"
        )
    return tuple(found)


def require_convertible(plan: Plan, *, allow_blocked: bool = False) -> None:
    """Raise unless every tensor that the recipe wants to quantize can be."""
    quantization = plan.checkpoint.quantization
    if quantization is not None:
        raise UnsupportedFormatError(
            f"the source is already quantized ({quantization.get('quant_method', 'unnamed')})",
            file=CONFIG_NAME,
            hint="start from the BF16, FP16 or FP32 checkpoint",
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
