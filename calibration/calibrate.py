"""`calibrate`: a conversion whose codes are chosen for the inputs that the layers really see.

Layer by layer: load it, observe, round, run it again with the rounded weights, let it go. The
activations of all tokens lie in two files, before and after the layer. When all layers are done the
ordinary conversion writes the checkpoint and takes its codes from the store, so that names, shapes
and byte counts are those of a conversion without calibration.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mxfp4.calibration.block import Block, BlockResult
from mxfp4.calibration.methods import MethodOptions
from mxfp4.calibration.samples import Samples
from mxfp4.calibration.statistics import Statistics, codes_from, collect
from mxfp4.calibration.store import CodeStore
from mxfp4.calibration.streaming.skeleton import ModelOptions
from mxfp4.calibration.streaming.walk import DEFAULT_MEMORY, Visit, Walk
from mxfp4.converters.compare import CALIBRATION_REPORT
from mxfp4.converters.convert import (
    ConversionReport,
    Progress,
    RunOptions,
    convert,
    owned_files,
    plan_conversion,
    require_apart,
)
from mxfp4.converters.decide import Action
from mxfp4.converters.plan import OutputOptions, Plan
from mxfp4.converters.planning import require_convertible
from mxfp4.converters.recipe import Recipe
from mxfp4.converters.roles import Role
from mxfp4.converters.state import OutputFolder
from mxfp4.errors import RecipeError, UnsupportedFormatError

STORE = "calibration"
"""Folder of unfinished work inside the output's state folder."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How codes are chosen and the model is run; `memory_bytes` bounds temporaries of a layer."""

    method: MethodOptions = field(default_factory=MethodOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    memory_bytes: int = DEFAULT_MEMORY


@dataclass(frozen=True)
class CalibrationReport:
    """The conversion that was written, and the facts of every calibrated layer."""

    conversion: ConversionReport
    options: MethodOptions
    data: Mapping[str, Any]
    layers: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "format": "mxfp4-calibration/1",
            "options": self.options.to_json(),
            "data": dict(self.data),
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
    plan = _planned(source, output, recipe, output_options, run)
    options = replace(options, method=resolved(options.method, plan))
    settings = {
        "plan": plan.id,
        "method": options.method.to_json(),
        "dtype": str(options.model.dtype),
        "data": samples.sha256,
    }
    with OutputFolder(Path(output)) as folder:
        store, finished = _open_store(folder, plan, settings, run)
        if not finished:
            walk = Walk(
                plan,
                samples,
                store.folder,
                options.model,
                options.memory_bytes,
                on_layer,
                stop,
                follow_source=options.method.refit_routers,
            )
            calibrate_layers(walk, options.method, store)
    conversion = _write(source, output, recipe, output_options, run, store, progress, stop)
    return _report(conversion, options.method, data_facts(samples), store, finished)


def calibrate_from(
    source: str | Path,
    output: str | Path,
    statistics: Statistics,
    recipe: Recipe | None = None,
    options: MethodOptions | None = None,
    output_options: OutputOptions | None = None,
    run: RunOptions | None = None,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> CalibrationReport:
    """Convert with codes from collected statistics; neither transformers nor text is needed.

    The moments are those of the source model, not of one rounded layer by layer, and nothing is
    folded, because whether a fold is exact can only be seen by running the layer. Raises
    `RecipeError` when routers are to be re-fitted, which needs the model's own activations.
    """
    if options is not None and options.refit_routers:
        raise RecipeError(
            "routers are re-fitted to what they read in the rounded model, which statistics of the "
            "source do not hold",
            hint="calibrate with text instead of --stats",
        )
    recipe, run = recipe or Recipe(), run or RunOptions()
    plan = _planned(source, output, recipe, output_options, run)
    options = replace(options or MethodOptions(), fold_norms=False)
    facts = dict(statistics.facts)
    settings = {"plan": plan.id, "method": options.to_json(), "statistics": facts}
    with OutputFolder(Path(output)) as folder:
        store, finished = _open_store(folder, plan, settings, run)
        if not finished:
            codes_from(plan, statistics, options, store, on_layer)
    event = stop or threading.Event()
    conversion = _write(source, output, recipe, output_options, run, store, progress, event)
    return _report(conversion, options, facts, store, finished)


def collect_statistics(
    source: str | Path,
    folder: Path,
    samples: Samples,
    recipe: Recipe | None = None,
    model: ModelOptions | None = None,
    *,
    memory_bytes: int = DEFAULT_MEMORY,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> Statistics:
    """Run the source model on text and keep what `calibrate_from` needs, in a new folder."""
    plan = plan_conversion(source, recipe or Recipe())
    folder.mkdir(parents=True, exist_ok=True)
    walk = Walk(plan, samples, folder, model or ModelOptions(), memory_bytes, on_layer)
    return collect(walk, data_facts(samples))


def calibrate_layers(walk: Walk, options: MethodOptions, store: CodeStore) -> None:
    """Fill a store layer by layer, from the first one that it lacks."""
    stored = {tensor.info.dtype for tensor in walk.plan.quantized}
    source_dtype = _DTYPES[stored.pop()] if len(stored) == 1 else torch.float32
    routers = refittable_routers(walk.plan) if options.refit_routers else {}
    found: dict[int, BlockResult] = {}

    def visit(visit: Visit) -> None:
        found[visit.number] = Block(visit, options, source_dtype, routers).calibrate()

    walk.go(store.done_layers, visit, lambda number: store.save(number, found.pop(number)))


def resolved(options: MethodOptions, plan: Plan) -> MethodOptions:
    """Options with `fold_norms` decided: only where no router could read a norm."""
    if options.fold_norms is not None:
        return options
    routed = any(tensor.decision.role.role is Role.ROUTER for tensor in plan.tensors)
    return replace(options, fold_norms=not routed)


def refittable_routers(plan: Plan) -> dict[str, torch.dtype]:
    """The stored dtype of every router weight that a plan keeps, by name.

    Raises `RecipeError` when there is none, and `UnsupportedFormatError` for one in another dtype
    than BF16, FP16 or FP32.
    """
    kept = [
        tensor.info
        for tensor in plan.tensors
        if tensor.decision.role.role is Role.ROUTER
        and tensor.decision.action is Action.KEEP
        and len(tensor.info.shape) == 2
    ]
    if not kept:
        raise RecipeError(
            "this model has no routers to re-fit",
            file=str(plan.checkpoint.folder),
            hint="leave out --refit-routers",
        )
    for info in kept:
        if info.dtype not in _DTYPES:
            raise UnsupportedFormatError(
                f"a router stored as {info.dtype} cannot be re-fitted",
                tensor=info.name,
                hint="leave out --refit-routers",
            )
    return {info.name: _DTYPES[info.dtype] for info in kept}


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
        "refitted_routers": sorted(
            name
            for layer in layers
            for name, facts in layer.get("routers", {}).items()
            if facts["refitted"]
        ),
        "notes": [note for layer in layers for note in layer["notes"]],
    }


def data_facts(samples: Samples) -> dict[str, Any]:
    """What a report says of the text."""
    return {
        "tokens": samples.token_count,
        "sequence_length": samples.tokens.shape[1],
        "domains": sorted(set(samples.domains)),
        "data_sha256": samples.sha256,
    }


def _report(
    conversion: ConversionReport,
    options: MethodOptions,
    data: Mapping[str, Any],
    store: CodeStore,
    finished: bool,
) -> CalibrationReport:
    """Write the report beside the checkpoint and let the stored codes go.

    When an earlier run had `finished` the checkpoint, the facts of layers are those in its report.
    """
    layers = store.records
    path = conversion.output / CALIBRATION_REPORT
    if finished and not layers and path.is_file():
        layers = json.loads(path.read_bytes())["layers"]
    report = CalibrationReport(conversion, options, data, layers)
    text = json.dumps(report.to_json(), indent=2) + "\n"
    path.write_text(text, encoding="utf-8")
    store.remove()
    return report


def _planned(
    source: str | Path,
    output: str | Path,
    recipe: Recipe,
    output_options: OutputOptions | None,
    run: RunOptions,
) -> Plan:
    plan = plan_conversion(source, recipe, output_options, run)
    require_apart(plan.checkpoint.folder, Path(output))
    require_convertible(plan, allow_blocked=run.keep_odd_shapes)
    return plan


def _open_store(
    folder: OutputFolder, plan: Plan, settings: Mapping[str, Any], run: RunOptions
) -> tuple[CodeStore, bool]:
    """The store in an output folder, after the checks that the conversion would make.

    Also tells whether every shard of the output is there already.
    """
    store = CodeStore(folder.state / STORE, settings, overwrite=run.overwrite)
    planned = replace(plan, codes=store.identity)
    folder.adopt(planned, owned_files(planned), overwrite=run.overwrite)
    shards = [folder.finished(planned.id, shard.name) for shard in planned.shards]
    return store, all(record is not None for record in shards)


def _write(
    source: str | Path,
    output: str | Path,
    recipe: Recipe,
    output_options: OutputOptions | None,
    run: RunOptions,
    store: CodeStore,
    progress: Progress | None,
    stop: threading.Event,
) -> ConversionReport:
    return convert(
        source,
        output,
        recipe,
        output_options,
        run,
        substitutes=store,
        progress=progress,
        stop=stop,
    )
