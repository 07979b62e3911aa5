"""Several checkpoints of one model on the same tokens, layer by layer side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from mxfp4.calibration.samples import Samples
from mxfp4.calibration.streaming.hidden import SpilledTensor, batch_size, batches, release_memory
from mxfp4.calibration.streaming.skeleton import ModelOptions, Skeleton
from mxfp4.calibration.streaming.weights import Weights
from mxfp4.converters.checkpoint import open_checkpoint
from mxfp4.errors import ShapeError


@dataclass
class Stream:
    """One checkpoint on its way through the layers; `hidden` is the input of the next one."""

    weights: Weights
    skeleton: Skeleton
    hidden: SpilledTensor
    size: int

    def batches(self) -> Iterator[slice]:
        """Slices of sequences that are run together."""
        return batches(self.hidden.tensor.shape[0], self.size)

    def advance(self, number: int, observe: Callable[[nn.Module], None] | None = None) -> None:
        """Replace the hidden states by the output of a layer; `observe` sees it filled first."""
        with self.skeleton.filled(number, self.weights) as layer:
            if observe is not None:
                observe(layer)
            for batch in self.batches():
                self.hidden.tensor[batch] = self.skeleton.run(number, self.hidden.tensor[batch])
        release_memory()


@contextmanager
def side_by_side(
    folders: Sequence[Path], samples: Samples, options: ModelOptions, memory_bytes: int
) -> Iterator[list[Stream]]:
    """All checkpoints with the embeddings of all tokens; activations lie in a temporary folder.

    Raises `ShapeError` when they are not the same model.
    """
    with ExitStack() as stack:
        spill = Path(stack.enter_context(TemporaryDirectory(prefix="mxfp4-")))
        streams: list[Stream] = []
        for place, folder in enumerate(folders):
            weights = stack.enter_context(Weights(open_checkpoint(folder)))
            skeleton = Skeleton(folder, weights, options)
            size = batch_size(samples.tokens.shape[1], skeleton.width, memory_bytes)
            shape = (*samples.tokens.shape, skeleton.width)
            hidden = SpilledTensor(spill / f"{place}.bin", shape, options.dtype, new=True)
            for batch in batches(len(samples.tokens), size):
                hidden.tensor[batch] = skeleton.embed(samples.tokens[batch])
            streams.append(Stream(weights, skeleton, hidden, size))
        for other in streams[1:]:
            seen, wanted = ((len(s.skeleton.layers), s.skeleton.width) for s in (other, streams[0]))
            if seen != wanted:
                raise ShapeError(
                    f"these are different models: {wanted[0]} and {seen[0]} layers, "
                    f"{wanted[1]} and {seen[1]} channels"
                )
        yield streams


def log_probabilities(stream: Stream, sequence: int) -> torch.Tensor:
    """Log-probabilities float32 [T, V] for one sequence, after the last layer."""
    return torch.log_softmax(stream.skeleton.logits(stream.hidden.tensor[sequence]), -1)
