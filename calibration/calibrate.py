"""`calibrate`: a conversion whose codes are chosen for the inputs that the layers really see.

Layer by layer: load it, observe, round, run it again with the rounded weights, let it go. The
activations of all tokens lie in two files, before and after the layer. When all layers are done the
ordinary conversion writes the checkpoint and takes its codes from the store, so that names, shapes
and byte counts are those of a conversion without calibration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mxfp4.calibration.block import Block, BlockResult
from mxfp4.calibration.methods import MethodOptions
from mxfp4.calibration.samples import Samples
from mxfp4.calibration.store import CodeStore
from mxfp4.calibration.streaming.hidden import SpilledTensor, batch_size, batches
from mxfp4.calibration.streaming.layout import Layout
from mxfp4.calibration.streaming.parts import find_parts
from mxfp4.calibration.streaming.skeleton import ModelOptions, Skeleton
from mxfp4.calibration.streaming.weights import Weights
from mxfp4.converters.convert import (
    ConversionReport,
    Progress,
    RunOptions,
    convert,
    owned_files,
    plan_conversion,
    require_apart,
)
from mxfp4.converters.plan import OutputOptions, Plan
from mxfp4.converters.planning import require_convertible
from mxfp4.converters.recipe import Recipe
from mxfp4.converters.roles import Role
from mxfp4.converters.state import OutputFolder
from mxfp4.errors import InterruptedConversionError

STORE = "calibration"
"""Folder of unfinished work inside the output's state folder."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How codes are chosen and the model is run; `memory_bytes` bounds temporaries of a layer."""

    method: MethodOptions = field(default_factory=MethodOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    memory_bytes: int = 4 << 30


@dataclass(frozen=True)
class CalibrationReport:
    """The conversion that was written, and the facts of every calibrated layer."""

    conversion: ConversionReport
    options: MethodOptions
    samples: Samples
    layers: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "format": "mxfp4-calibration/1",
            "options": self.options.to_json(),
            "tokens": self.samples.token_count,
            "sequence_length": self.samples.tokens.shape[1],
            "domains": sorted(set(self.samples.domains)),
            "data_sha256": self.samples.sha256,
            "summary": summary(self.layers),
            "layers": self.layers,
            "conversion": self.conversion.to_json(),
        }


def calibrate(
    source: str | Path,
    output: str | Path,
    samples: Samples,
    recipe: Recipe | None = None,
    options: CalibrationOptions | None = None,
    output_options: OutputOptions | None = None,
    run: RunOptions | None = None,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> CalibrationReport:
    """Calibrate and convert a checkpoint folder; the same call continues an interrupted one.

    `on_layer` is told (layers done, layers in all). Raises `MissingExtraError` without
    transformers, `UnsupportedFormatError` for a model that cannot be run block by block, and
    whatever `convert` raises.
    """
    recipe, options = recipe or Recipe(), options or CalibrationOptions()
    run, stop = run or RunOptions(), stop or threading.Event()
    plan = plan_conversion(source, recipe, output_options, run)
    require_apart(plan.checkpoint.folder, Path(output))
    require_convertible(plan, allow_blocked=run.keep_odd_shapes)
    options = replace(options, method=resolved(options.method, plan))
    with OutputFolder(Path(output)) as folder:
        store = CodeStore(
            folder.state / STORE,
            _settings(plan, samples, options),
            overwrite=run.overwrite,
        )
        _require_free(folder, plan, store, run)
        calibrate_layers(plan, samples, options, store, on_layer, stop)
    conversion = convert(
        source,
        output,
        recipe,
        output_options,
        run,
        substitutes=store,
        progress=progress,
        stop=stop,
    )
    report = CalibrationReport(conversion, options.method, samples, store.records)
    store.remove()
    return report


def calibrate_layers(
    plan: Plan,
    samples: Samples,
    options: CalibrationOptions,
    store: CodeStore,
    on_layer: Callable[[int, int], None],
    stop: threading.Event,
) -> None:
    """Fill a store layer by layer, from the first one that it lacks."""
    layout = Layout.of_plan(plan)
    with Weights(plan.checkpoint, layout) as weights:
        skeleton = Skeleton(plan.checkpoint.folder, weights, options.model)
        count = len(skeleton.layers)
        on_layer(store.done_layers, count)
        if store.done_layers == count:
            return
        size = batch_size(samples.tokens.shape[1], skeleton.width, options.memory_bytes)
        before = _entry(store, skeleton, samples, size)
        for number in range(store.done_layers, count):
            after = _spill(store, number + 1, skeleton, samples, new=True)
            with skeleton.filled(number, weights):
                result = _layer(plan, layout, skeleton, samples, options, number, before, size)
                for batch in batches(len(samples.tokens), size):
                    after.tensor[batch] = skeleton.run(number, before.tensor[batch])
            after.sync()
            store.save(number, result)
            before.path.unlink()
            before = after
            on_layer(store.done_layers, count)
            if stop.is_set() and number + 1 < count:
                raise InterruptedConversionError(
                    "stopped on request", hint="run the same command to continue"
                )
        before.path.unlink()


def resolved(options: MethodOptions, plan: Plan) -> MethodOptions:
    """Options with `fold_norms` decided: only where no router could read a norm."""
    if options.fold_norms is not None:
        return options
    routed = any(tensor.decision.role.role is Role.ROUTER for tensor in plan.tensors)
    return replace(options, fold_norms=not routed)


def summary(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all calibrated modules, and the experts that saw few tokens."""
    modules = {name: facts for layer in layers for name, facts in layer["modules"].items()}
    starved = sorted(name for name, facts in modules.items() if facts["guarded"])
    errors = [facts["output_error"] for facts in modules.values()]
    plain = [facts["output_error_even"] for facts in modules.values()]
    return {
        "modules": len(modules),
        "mean_output_error": sum(errors) / max(len(errors), 1),
        "mean_output_error_even": sum(plain) / max(len(plain), 1),
        "few_tokens": starved,
        "kept_even": sorted(name for name, facts in modules.items() if facts["kept_even"]),
        "changed_tensors": sorted(name for layer in layers for name in layer["changed"]),
        "notes": [note for layer in layers for note in layer["notes"]],
    }


def _layer(
    plan: Plan,
    layout: Layout,
    skeleton: Skeleton,
    samples: Samples,
    options: CalibrationOptions,
    number: int,
    before: SpilledTensor,
    size: int,
) -> BlockResult:
    prefix = f"{skeleton.prefix}.{number}"
    layer = skeleton.layers[number]
    stored = {tensor.info.dtype for tensor in plan.quantized}
    block = Block(
        layer,
        prefix,
        find_parts(layer, prefix, layout, plan),
        lambda batch: skeleton.run(number, before.tensor[batch]),
        list(batches(len(samples.tokens), size)),
        samples.halves,
        options.method,
        _DTYPES[stored.pop()] if len(stored) == 1 else torch.float32,
        skeleton.head_size,
    )
    return block.calibrate()


def _entry(store: CodeStore, skeleton: Skeleton, samples: Samples, size: int) -> SpilledTensor:
    """The activations in front of the first layer that is not done."""
    if store.done_layers:
        return _spill(store, store.done_layers, skeleton, samples, new=False)
    entry = _spill(store, 0, skeleton, samples, new=True)
    for batch in batches(len(samples.tokens), size):
        entry.tensor[batch] = skeleton.embed(samples.tokens[batch])
    return entry


def _spill(
    store: CodeStore, number: int, skeleton: Skeleton, samples: Samples, *, new: bool
) -> SpilledTensor:
    shape = (*samples.tokens.shape, skeleton.width)
    path = store.folder / f"hidden-{number:05d}.bin"
    return SpilledTensor(path, shape, skeleton.options.dtype, new=new)


def _settings(plan: Plan, samples: Samples, options: CalibrationOptions) -> Mapping[str, Any]:
    """Everything that decides a code."""
    return {
        "plan": plan.id,
        "method": options.method.to_json(),
        "dtype": str(options.model.dtype),
        "data": samples.sha256,
    }


def _require_free(folder: OutputFolder, plan: Plan, store: CodeStore, run: RunOptions) -> None:
    """Refuse an output folder that the conversion would refuse, before the long work."""
    planned = replace(plan, codes=store.identity)
    folder.adopt(planned, owned_files(planned), overwrite=run.overwrite)
