"""Find the folds of a running layer, apply them in place, and prove each by running the layer.

See `folding` for what a fold is and why it changes nothing. What reads a norm and what makes a
channel is told by names and by tracing one short run; a fold that changes what the layer computes,
because something else reads the same values, is undone and noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mxfp4.calibration import folding
from mxfp4.calibration.moments import Moments
from mxfp4.calibration.streaming.layout import Slot
from mxfp4.calibration.streaming.parts import LinearPart, matrix
from mxfp4.calibration.streaming.skeleton import place
from mxfp4.calibration.streaming.walk import Visit

TOLERANCE = 1e-4
"""Largest difference, relative to the layer's output, by which a fold may change a float32 run."""

PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))
"""Names of projections where rows of the first are input channels of the second."""


@dataclass
class Folds:
    """The folds of one visited layer; `source_dtype` is what its norms are stored in.

    `changed` collects new norm gains by full name, `notes` what was not folded and why.
    """

    visit: Visit
    source_dtype: torch.dtype
    norms: bool
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def fold(self, parts: Sequence[LinearPart], moments: dict[str, Moments]) -> dict[str, Moments]:
        """Fold what can be folded among unrounded parts; returns the moments of the new inputs."""
        found = dict(moments)
        for part in parts:
            producer = self._producer(part, parts)
            if producer is not None:
                found[part.key] = self._fold_rows(part, producer, found[part.key])
        for part in parts if self.norms else ():
            found[part.key] = self._fold_norm(part, found[part.key])
        return found

    def _fold_norm(self, part: LinearPart, moments: Moments) -> Moments:
        name = self._norm_of(part)
        if name is None:
            return moments
        gain = self.visit.layer.get_parameter(name).detach().clone()
        scale = folding.channel_scales(self._weight(part), moments.mean(), powers_of_two=False)[0]
        folded, scale = folding.storable_gain(gain.float(), scale, self.source_dtype)
        if torch.equal(folded, gain.float()):
            return moments

        def apply(forward: bool) -> None:
            place(self.visit.layer, name, (folded if forward else gain).to(gain.dtype))
            for slot in part.slots:
                self._matrix(slot).mul_(scale if forward else 1 / scale)

        if not self._unchanged(apply, f"norm {name}"):
            return moments
        self.changed[f"{self.visit.prefix}.{name}"] = folded.to(self.source_dtype)
        return moments.rescaled(scale)

    def _fold_rows(self, part: LinearPart, producer: Slot, moments: Moments) -> Moments:
        scale = folding.channel_scales(self._weight(part), moments.mean(), powers_of_two=False)[0]
        heads = self.visit.head_size if part.paths[0].endswith("o_proj") else None
        rows = folding.rows_of_columns(producer.view.row_count, len(scale), heads)
        per_row = torch.exp2(folding.shared_mean(scale.log2(), rows, producer.view.row_count))
        if torch.equal(per_row, torch.ones_like(per_row)):
            return moments
        per_column = per_row[rows]

        def apply(forward: bool) -> None:
            down, up = (1 / per_row, per_column) if forward else (per_row, 1 / per_column)
            self._matrix(producer).mul_(down.unsqueeze(1))
            self._matrix(part.slots[0]).mul_(up)

        changed = self._unchanged(apply, f"rows of {producer.module}")
        return moments.rescaled(per_column) if changed else moments

    def _unchanged(self, apply: Callable[[bool], None], what: str) -> bool:
        """Apply a fold and see that the layer still computes the same; undo it if it does not."""
        before = self.visit.probe()
        apply(True)
        after = self.visit.probe()
        change = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
        if change <= TOLERANCE:
            return True
        apply(False)
        self.notes.append(f"{self.visit.prefix}: {what} not folded, the layer's output changed")
        return False

    def _norm_of(self, part: LinearPart) -> str | None:
        """The name of the gain [K] of the norm whose output is the input of a part."""
        # The outputs are kept alive, so that no later tensor can lie at the same address.
        made: dict[int, tuple[str, torch.Tensor]] = {}
        read: list[str | None] = []
        hooks = [
            module.register_forward_hook(
                lambda m, i, o, name=name: made.__setitem__(o.data_ptr(), (name, o))
            )
            for name, module in self.visit.layer.named_modules()
            if isinstance(getattr(module, "weight", None), torch.Tensor)
            and module.get_parameter("weight").ndim == 1
        ]
        reader = self.visit.layer.get_submodule(part.paths[0])
        hooks.append(
            reader.register_forward_pre_hook(
                lambda m, i: read.append(made.get(i[0].data_ptr(), (None, None))[0])
            )
        )
        try:
            self.visit.probe()
        finally:
            for hook in hooks:
                hook.remove()
        return f"{read[0]}.weight" if read and read[0] is not None else None

    def _producer(self, part: LinearPart, parts: Sequence[LinearPart]) -> Slot | None:
        """The projection whose rows are this part's input channels."""
        if len(part.slots) != 1:
            return None
        parent, _, leaf = part.slots[0].module.rpartition(".")
        wanted = [f"{parent}.{first}" for first, second in PAIRS if second == leaf]
        return next((slot for slot in _slots(parts) if slot.module in wanted), None)

    def _weight(self, part: LinearPart) -> torch.Tensor:
        return torch.cat([self._matrix(slot) for slot in part.slots]).float().unsqueeze(0)

    def _matrix(self, slot: Slot) -> torch.Tensor:
        return matrix(self.visit.layer, self.visit.prefix, slot)


def _slots(parts: Sequence[LinearPart]) -> Iterator[Slot]:
    for part in parts:
        yield from part.slots
