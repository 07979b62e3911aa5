"""Cut source tensors into the modules of the output; gather experts where a layout stacks them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mxfp4.converters.formats import DEFAULT_FORMAT, FORMATS, OutputFormat, Payload, Slot
from mxfp4.converters.formats.stacked import GPT_OSS
from mxfp4.converters.formats.types import Shape, unstacked
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.plan import Matrix, PlannedTensor, Task, Treatment
from mxfp4.converters.reader import MatrixView
from mxfp4.converters.roles import ExpertBank, TensorRole
from mxfp4.converters.sources import Source
from mxfp4.errors import CorruptCheckpointError, UnsupportedFormatError

_WEIGHT_LEAF = ".weight"
_KEEP = Treatment.KEEP

MODULES = frozenset({Treatment.QUANTIZE, Treatment.PASS})
"""Treatments that end as MXFP4 modules."""


def module_of(tensor: str) -> str:
    """The module that owns a weight: the name without its `.weight` leaf."""
    return tensor.removesuffix(_WEIGHT_LEAF)


def make_tasks(
    tensors: Sequence[PlannedTensor], layout: OutputFormat, config: Mapping[str, Any]
) -> list[Task]:
    """All tasks in the order of the source; a stack stands where its first matrix does.

    Raises `CorruptCheckpointError` for a stack that lacks an expert or whose experts differ in
    shape.
    """
    slot_of, transposed = _stacking(layout, config)
    if slot_of is unstacked:
        return [task for tensor in tensors for task in tasks_of(tensor, layout)]
    tasks: list[Task | None] = []
    stacks: dict[str, tuple[int, dict[tuple[int, int], tuple[Matrix, Slot]]]] = {}
    for tensor in tensors:
        for task in tasks_of(tensor, layout, gather=transposed):
            slot = None
            if task.matrices and (task.treatment in MODULES or transposed):
                slot = slot_of(task.matrices[0].module)
            if slot is None or (transposed and not _in_bank(tensor)):
                tasks.append(task)
                continue
            if slot.stack not in stacks:
                stacks[slot.stack] = (len(tasks), {})
                tasks.append(None)
            stacks[slot.stack][1][slot.expert, slot.lane] = (task.matrices[0], slot)
    for stack, (position, members) in stacks.items():
        treatment = Treatment.DECODE if transposed else Treatment.QUANTIZE
        tasks[position] = _stacked_task(stack, members, treatment)._replace(transposed=transposed)
    return [task for task in tasks if task is not None]


def _in_bank(tensor: PlannedTensor) -> bool:
    return tensor.treatment is Treatment.DECODE


def _stacking(
    layout: OutputFormat, config: Mapping[str, Any]
) -> tuple[Callable[[str], Slot | None], bool]:
    """Where matrices go, and whether they are stored transposed.

    The BF16 form of gpt-oss is a stack too, with the contraction axis before the rows.
    """
    if layout.payload is Payload.BF16 and config.get("model_type") in (GPT_OSS.model_types or ()):
        return GPT_OSS.slot, True
    return layout.slot, False


def _stacked_task(
    stack: str, members: Mapping[tuple[int, int], tuple[Matrix, Slot]], treatment: Treatment
) -> Task:
    lanes = next(iter(members.values()))[1].lanes
    experts = max(expert for expert, _ in members) + 1
    wanted = [(expert, lane) for expert in range(experts) for lane in range(lanes)]
    missing = [place for place in wanted if place not in members]
    if missing:
        raise CorruptCheckpointError(
            f"expert {missing[0][0]} of {experts} is not among the quantized ones, and a stack "
            "holds all of them",
            tensor=stack,
            hint="quantize all experts of a layer, or choose a layout with one tensor per expert",
        )
    matrices = tuple(members[place][0] for place in wanted)
    shapes = {(m.view.row_count, m.view.column_count) for m in matrices}
    if len(shapes) > 1:
        raise CorruptCheckpointError(
            f"its experts have different shapes: {sorted(shapes)}",
            tensor=stack,
            hint="choose a layout with one tensor per expert",
        )
    rows, columns = shapes.pop()
    passed = all(m.source.storage.startswith("mxfp4") for m in matrices)
    if treatment is Treatment.QUANTIZE and passed:
        treatment = Treatment.PASS
    return Task(
        treatment, matrices[0].source, stack, (experts, rows * lanes, columns), matrices, lanes
    )


def tasks_of(
    tensor: PlannedTensor, layout: OutputFormat = FORMATS[DEFAULT_FORMAT], *, gather: bool = False
) -> list[Task]:
    """The output modules that one source tensor becomes, before any stacking.

    With `gather`, also banks to decode are cut into matrices.
    """
    source, decision, treatment = tensor
    if treatment is _KEEP:
        return _copies(source, layout)
    role = decision.role
    if role.bank is None or not (treatment in MODULES or gather or _stacked_mlx(source)):
        return [_module_task(tensor)]
    return [
        Task(
            treatment,
            source,
            module,
            (view.row_count, view.column_count),
            (Matrix(source, module, view),),
        )
        for module, view in bank_matrices(source.info, role, role.bank)
    ]


def _stacked_mlx(source: Source) -> bool:
    """MLX stacks what other loaders look for one by one."""
    return ".switch_mlp." in source.parts[0].info.name


def _copies(source: Source, layout: OutputFormat) -> list[Task]:
    if source.plain:
        return [Task(_KEEP, source)]
    weight, scale = (part.info for part in source.parts)
    base = module_of(weight.name)
    leaf = layout.fp8_scale if weight.name.endswith(_WEIGHT_LEAF) else "_scale_inv"
    # An E8M0 byte has to be called one: loaders copy U8 by value.
    dtype = "F8_E8M0" if scale.dtype == "U8" else scale.dtype
    renamed = TensorInfo(f"{base}{leaf}", dtype, scale.shape)
    return [Task(_KEEP, source), Task(_KEEP, source, part=1, renamed=renamed)]


def _module_task(tensor: PlannedTensor) -> Task:
    """One task for the whole tensor; leading axes are matrices one after the other."""
    source, decision, treatment = tensor
    name, _, shape = source.info
    module, turned = module_of(name), False
    if treatment in MODULES:
        turned = decision.role.axis == 0
        if len(shape) != 2:
            raise UnsupportedFormatError(
                f"a packed tensor of shape {list(shape)} that is not known as a stack of experts",
                tensor=name,
                hint="decode it with --format bf16",
            )
    shape, views = _views(shape, turned)
    # A list, as this runs for every expert of a checkpoint and nearly always once.
    matrices = tuple([Matrix(source, module, view) for view in views])
    return Task(treatment, source, module, shape, matrices)


@functools.lru_cache(maxsize=65536)
def _views(shape: Shape, turned: bool) -> tuple[Shape, tuple[MatrixView, ...]]:
    """The module's shape and its matrices in a tensor; `turned` ones are stored [K, N].

    Cached, so that the many experts of one shape share their views.
    """
    rows, columns = shape[-2:]
    if turned:
        return (columns, rows), (MatrixView(columns, rows, 0, 1, columns),)
    offsets = (number * rows * columns for number in range(math.prod(shape[:-2])))
    return shape, tuple(MatrixView(rows, columns, offset, columns, 1) for offset in offsets)


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


def modules_of(tasks: Iterable[Task]) -> Iterator[str]:
    """Names of all MXFP4 matrices as modules of their own."""
    for task in tasks:
        if task.treatment in MODULES:
            yield from (matrix.module for matrix in task.matrices)
