"""Visit the decoder layers of a checkpoint one after the other, each with its real inputs.

The activations of all tokens lie in one file per layer boundary; the file in front of a layer is
removed when the layer behind it is finished, so that a walk can go on where it stopped. On request
the activations of the unchanged source go along in files of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mxfp4.calibration.samples import Samples
from mxfp4.calibration.streaming.hidden import SpilledTensor, batch_size, batches, release_memory
from mxfp4.calibration.streaming.layout import Layout
from mxfp4.calibration.streaming.parts import Part, find_parts
from mxfp4.calibration.streaming.skeleton import ModelOptions, Skeleton
from mxfp4.calibration.streaming.weights import Weights
from mxfp4.converters.plan import Plan
from mxfp4.errors import InterruptedConversionError

DEFAULT_MEMORY = 4 << 30
"""Bytes that the temporaries of one layer may take, unless told otherwise."""


_CALIBRATED = "hidden"
_SOURCE = "source"
"""Names of the files for the activations of the model as it becomes, and of the source."""

PROBE_TOKENS = 64
"""Length of the short runs that show whether two versions of a layer compute the same."""


@dataclass(frozen=True)
class Visit:
    """One filled decoder layer: `run` computes it on some sequences, `parts` are to be rounded."""

    number: int
    prefix: str
    layer: nn.Module
    parts: Sequence[Part]
    run: Callable[[slice], torch.Tensor]
    batches: Sequence[slice]
    halves: Sequence[int]
    sequence_length: int
    probe: Callable[[], torch.Tensor]
    """The layer on the first tokens of the first sequence."""
    head_size: int | None
    run_source: Callable[[slice], None] | None = None
    """Takes the source's own activations of a batch through the layer, which must still be as in
    the source; to be called once for every batch. None unless the walk follows the source."""


@dataclass(frozen=True)
class Walk:
    """A walk over the layers of a plan's source with some tokens; files go to `folder`."""

    plan: Plan
    samples: Samples
    folder: Path
    model: ModelOptions
    memory_bytes: int = DEFAULT_MEMORY
    on_layer: Callable[[int, int], None] = lambda done, total: None
    stop: threading.Event | None = None
    follow_source: bool = False
    """Also take the source's own activations along; twice the disk."""

    def go(
        self, first: int, visit: Callable[[Visit], None], finished: Callable[[int], None]
    ) -> None:
        """Visit all layers from `first` on.

        `visit` may change the layer's weights; its outputs are then computed with them, and
        `finished` is called once they are on the disk. Raises `InterruptedConversionError` between
        two layers when asked to stop, and `ResumeError` when the activations in front of `first`
        are gone.
        """
        layout = Layout.of_plan(self.plan)
        with Weights(self.plan.checkpoint, layout) as weights:
            skeleton = Skeleton(self.plan.checkpoint.folder, weights, self.model)
            count = len(skeleton.layers)
            self.on_layer(first, count)
            if first == count:
                return
            size = batch_size(self.samples.tokens.shape[1], skeleton.width, self.memory_bytes)
            names = (_CALIBRATED, _SOURCE) if self.follow_source else (_CALIBRATED,)
            before = {name: self._entry(name, first, skeleton, size) for name in names}
            for number in range(first, count):
                after = {name: self._spill(name, number + 1, skeleton, new=True) for name in names}
                with skeleton.filled(number, weights):
                    visit(self._visit(number, skeleton, layout, before, after, size))
                    for batch in self._batches(size):
                        hidden = before[_CALIBRATED].tensor[batch]
                        after[_CALIBRATED].tensor[batch] = skeleton.run(number, hidden)
                for spilled in after.values():
                    spilled.sync()
                finished(number)
                _unlink(before)
                before = after
                release_memory()
                self.on_layer(number + 1, count)
                if self.stop is not None and self.stop.is_set() and number + 1 < count:
                    raise InterruptedConversionError(
                        "stopped on request", hint="run the same command to continue"
                    )
            _unlink(before)

    def _visit(
        self,
        number: int,
        skeleton: Skeleton,
        layout: Layout,
        before: Mapping[str, SpilledTensor],
        after: Mapping[str, SpilledTensor],
        size: int,
    ) -> Visit:
        prefix = f"{skeleton.prefix}.{number}"
        layer = skeleton.layers[number]
        hidden = before[_CALIBRATED].tensor

        def run_source(batch: slice) -> None:
            entering = before[_SOURCE].tensor[batch]
            after[_SOURCE].tensor[batch] = skeleton.run(number, entering)

        return Visit(
            number,
            prefix,
            layer,
            find_parts(layer, prefix, layout, self.plan),
            lambda batch: skeleton.run(number, hidden[batch]),
            self._batches(size),
            self.samples.halves,
            self.samples.tokens.shape[1],
            lambda: skeleton.run(number, hidden[:1, :PROBE_TOKENS]),
            skeleton.head_size,
            run_source if self.follow_source else None,
        )

    def _batches(self, size: int) -> list[slice]:
        return list(batches(len(self.samples.tokens), size))

    def _entry(self, name: str, first: int, skeleton: Skeleton, size: int) -> SpilledTensor:
        """The activations in front of the first layer to visit."""
        if first:
            return self._spill(name, first, skeleton, new=False)
        entry = self._spill(name, 0, skeleton, new=True)
        for batch in self._batches(size):
            entry.tensor[batch] = skeleton.embed(self.samples.tokens[batch])
        return entry

    def _spill(self, name: str, number: int, skeleton: Skeleton, *, new: bool) -> SpilledTensor:
        shape = (*self.samples.tokens.shape, skeleton.width)
        path = self.folder / f"{name}-{number:05d}.bin"
        return SpilledTensor(path, shape, skeleton.options.dtype, new=new)


def _unlink(spilled: Mapping[str, SpilledTensor]) -> None:
    for tensor in spilled.values():
        tensor.path.unlink()
