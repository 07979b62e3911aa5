"""`check_routers`: does a converted model still send its tokens to the same experts?

Source and converted model run on the same tokens side by side. In every layer with a router, what
the router says and which experts are chosen is compared token by token. Router weights themselves
are compared byte by byte: they, like all protected tensors, are to be those of the source, but for
routers that a calibration re-fitted on request, which are told apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxfp4.calibration.paired import Stream, side_by_side
from mxfp4.calibration.refit import same_sets
from mxfp4.calibration.samples import Samples
from mxfp4.calibration.streaming.capture import watch_experts, watch_router
from mxfp4.calibration.streaming.skeleton import ModelOptions
from mxfp4.calibration.streaming.walk import DEFAULT_MEMORY
from mxfp4.converters.checkpoint import open_checkpoint, read_json_object
from mxfp4.converters.compare import CALIBRATION_REPORT
from mxfp4.converters.decide import PROTECTED_ROLES
from mxfp4.converters.roles import Role, classify
from mxfp4.errors import RecipeError


@dataclass(frozen=True)
class LayerRouting:
    """One layer's routers compared; shares are of tokens.

    `same_set`: all k experts are the same. `overlap`: share of the k experts that both chose.
    `same_first`: the expert with the largest router logit is the same. `router_kl`: mean KL of the
    softmax of the router logits, nats. `load_shift`: total variation between the two distributions
    of tokens over experts. `first_changed`: the set differs here and in no layer before.
    `changed_clear`: the set differs although the source's margin between the last expert chosen
    and the first one not chosen is above the layer's median.
    """

    layer: int
    experts: int
    chosen: int
    same_set: float
    overlap: float
    same_first: float
    router_kl: float
    load_shift: float
    first_changed: float
    changed_clear: float
    load_source: tuple[int, ...]
    load_converted: tuple[int, ...]


METRICS = tuple(
    field.name
    for field in fields(LayerRouting)
    if field.name
    in {
        "same_set",
        "overlap",
        "same_first",
        "router_kl",
        "load_shift",
        "first_changed",
        "changed_clear",
    }
)
"""The figures of a layer that reports show, in order."""


@dataclass(frozen=True)
class RoutingReport:
    """All layers with routers, and the protected tensors by name: (sha256, same bytes).

    `refitted` are the routers that the report beside `converted` says were re-fitted on request.
    """

    source: str
    converted: str
    token_count: int
    layers: tuple[LayerRouting, ...]
    protected: Mapping[str, tuple[str, bool]]
    refitted: tuple[str, ...] = ()

    @property
    def first_divergence(self) -> int | None:
        """The first layer in which any token's experts changed."""
        return next((row.layer for row in self.layers if row.same_set < 1), None)

    def to_json(self) -> dict[str, Any]:
        """Summary, layers, and hashes of protected tensors."""
        count = len(self.layers)
        means = {name: sum(getattr(row, name) for row in self.layers) / count for name in METRICS}
        return {
            "format": "mxfp4-routers/1",
            "source": self.source,
            "converted": self.converted,
            "tokens": self.token_count,
            "summary": {
                **{name: value for name, value in means.items() if name != "first_changed"},
                "never_changed": 1 - sum(row.first_changed for row in self.layers),
                "first_divergence": self.first_divergence,
                "protected_tensors": len(self.protected),
                "protected_changed": sorted(
                    n for n, (_, same) in self.protected.items() if not same
                ),
                "routers_refitted": list(self.refitted),
            },
            "layers": [asdict(row) for row in self.layers],
            "protected": {
                name: {"sha256": digest, "same": same}
                for name, (digest, same) in self.protected.items()
            },
        }


@dataclass(frozen=True)
class Routing:
    """One layer's decisions: `logits` float32 [M, E], `experts` int64 [M, k]."""

    logits: torch.Tensor
    experts: torch.Tensor


def check_routers(
    source: str | Path,
    converted: str | Path,
    samples: Samples,
    options: ModelOptions | None = None,
    *,
    memory_bytes: int = DEFAULT_MEMORY,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> RoutingReport:
    """Compare the routing of two checkpoints. Raises `RecipeError` for a model without routers."""
    routers = router_names(Path(source))
    rows: list[LayerRouting] = []
    changed = torch.zeros(samples.token_count, dtype=torch.bool)
    folders = (Path(source), Path(converted))
    with side_by_side(folders, samples, options or ModelOptions(), memory_bytes) as streams:
        count = len(streams[0].skeleton.layers)
        for number in range(count):
            found = [_advance(stream, number, routers) for stream in streams]
            if found[0] is not None and found[1] is not None:
                row = compare_routing(number, found[0], found[1], changed)
                changed |= ~same_sets(found[0].experts, found[1].experts)
                rows.append(row)
            on_layer(number + 1, count)
    return RoutingReport(
        str(source),
        str(converted),
        samples.token_count,
        tuple(rows),
        protected_tensors(Path(source), Path(converted)),
        refitted_routers(Path(converted)),
    )


def compare_routing(
    number: int, source: Routing, converted: Routing, changed_before: torch.Tensor
) -> LayerRouting:
    """Figures of one layer; `changed_before` bool [M] marks tokens that differed earlier."""
    count, chosen = source.logits.shape[1], source.experts.shape[1]
    same = same_sets(source.experts, converted.experts)
    shared = (source.experts.unsqueeze(2) == converted.experts.unsqueeze(1)).any(2).float().mean(1)
    first, second = source.logits.log_softmax(-1), converted.logits.log_softmax(-1)
    loads = [torch.bincount(r.experts.flatten(), minlength=count) for r in (source, converted)]
    shares = [load / load.sum() for load in loads]
    margin = _margins(source)
    clear = margin > margin.median()
    return LayerRouting(
        number,
        count,
        chosen,
        _share(same),
        float(shared.mean()),
        _share(source.logits.argmax(-1) == converted.logits.argmax(-1)),
        float((first.exp() * (first - second)).sum(-1).mean()),
        float((shares[0] - shares[1]).abs().sum() / 2),
        _share(~same & ~changed_before),
        _share(~same & clear),
        tuple(loads[0].tolist()),
        tuple(loads[1].tolist()),
    )


def router_names(folder: Path) -> frozenset[str]:
    """Names of the router weights of a checkpoint, by role."""
    checkpoint = open_checkpoint(folder)
    infos = checkpoint.tensors()
    roles = classify(infos, checkpoint.config)
    found = frozenset(
        info.name for info in infos if roles[info.name].role is Role.ROUTER and len(info.shape) == 2
    )
    if not found:
        raise RecipeError(
            "this model has no routers to check",
            file=str(folder),
            hint="compare dense models with `mxfp4 compare`",
        )
    return found


def refitted_routers(converted: Path) -> tuple[str, ...]:
    """Routers that the calibration report of an output says were re-fitted; none without one."""
    path = converted / CALIBRATION_REPORT
    if not path.is_file():
        return ()
    return tuple(read_json_object(path)["summary"].get("refitted_routers", ()))


def protected_tensors(source: Path, converted: Path) -> dict[str, tuple[str, bool]]:
    """SHA-256 of every protected tensor of the source, and whether the output has these bytes."""
    before, after = open_checkpoint(source), open_checkpoint(converted)
    roles = classify(before.tensors(), before.config)
    places = {t.info.name: (after.shards[n].path, t) for n, t in after.located()}
    result = {}
    for number, stored in before.located():
        name = stored.info.name
        if roles[name].role in PROTECTED_ROLES:
            digest = _digest(before.shards[number].path, stored.offset, stored.info.byte_count)
            same = False
            if name in places and places[name][1].info == stored.info:
                path, found = places[name]
                same = digest == _digest(path, found.offset, found.info.byte_count)
            result[name] = (digest, same)
    return result


def _digest(path: Path, offset: int, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(offset)
        while size > 0 and (piece := file.read(min(size, 1 << 20))):
            digest.update(piece)
            size -= len(piece)
    return digest.hexdigest()


def _advance(stream: Stream, number: int, routers: frozenset[str]) -> Routing | None:
    """Run one layer and return what its router decided, or None if it has none."""
    prefix = f"{stream.skeleton.prefix}.{number}."
    logits: list[torch.Tensor] = []
    experts: list[torch.Tensor] = []
    hooks: list[Any] = []

    def observe(layer: nn.Module) -> None:
        for name, _ in layer.named_parameters():
            if prefix + name in routers:
                router = layer.get_submodule(name.rpartition(".")[0])
                hooks.append(watch_router(router, partial(_note_logits, router, logits)))
        hooks.extend(watch_experts(layer, experts.append))

    try:
        stream.advance(number, observe)
    finally:
        for hook in hooks:
            hook.remove()
    if not logits:
        return None
    joined = torch.cat(logits)
    chosen = torch.cat(experts) if experts else joined.topk(_top_k(stream), -1).indices
    return Routing(joined, chosen)


def _note_logits(router: nn.Module, logits: list[torch.Tensor], hidden: torch.Tensor) -> None:
    weight, bias = router.get_parameter("weight"), getattr(router, "bias", None)
    bias = bias.float() if isinstance(bias, torch.Tensor) else None
    logits.append(nn.functional.linear(hidden.float(), weight.float(), bias))


def _top_k(stream: Stream) -> int:
    for name in ("num_experts_per_tok", "moe_topk", "top_k", "num_experts_per_token"):
        if found := getattr(stream.skeleton.config, name, None):
            return int(found)
    raise RecipeError("the config does not tell how many experts a token uses")


def _margins(routing: Routing) -> torch.Tensor:
    """Smallest logit among the chosen experts minus the largest among the others, [M]."""
    mask = torch.zeros_like(routing.logits, dtype=torch.bool).scatter_(1, routing.experts, True)
    inside = routing.logits.masked_fill(~mask, torch.inf).amin(-1)
    outside = routing.logits.masked_fill(mask, -torch.inf).amax(-1)
    return inside - outside


def _share(mask: torch.Tensor) -> float:
    return float(mask.float().mean())
