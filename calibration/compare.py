"""`compare`: how far a second checkpoint's next-token distributions are from the first one's.

KL(A || B) in nats per token, agreement of the most likely token, and the perplexity of both, for
all text and for each domain. The 95 % interval of a mean is 1.96 standard errors over sequences,
because the tokens of one sequence are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxfp4.calibration.paired import log_probabilities, side_by_side
from mxfp4.calibration.samples import Samples
from mxfp4.calibration.streaming.skeleton import ModelOptions
from mxfp4.calibration.streaming.walk import DEFAULT_MEMORY


@dataclass(frozen=True)
class SequenceFigures:
    """Means over the predicted tokens of one sequence."""

    domain: str
    kl: float
    top1: float
    nats_first: float
    nats_second: float


@dataclass(frozen=True)
class Comparison:
    """Figures of every sequence; `to_json` sums them up."""

    first: str
    second: str
    sequence_length: int
    sequences: tuple[SequenceFigures, ...]

    def to_json(self) -> dict[str, Any]:
        """All text, then each domain."""
        domains = sorted({sequence.domain for sequence in self.sequences})
        return {
            "first": self.first,
            "second": self.second,
            "tokens": len(self.sequences) * (self.sequence_length - 1),
            "all": figures(list(self.sequences)),
            "domains": {
                domain: figures([s for s in self.sequences if s.domain == domain])
                for domain in domains
            },
        }


def compare(
    first: str | Path,
    second: str | Path,
    samples: Samples,
    options: ModelOptions | None = None,
    *,
    memory_bytes: int = DEFAULT_MEMORY,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Run two checkpoints, plain or MXFP4, on the same tokens, one layer of each at a time."""
    (found,) = compare_all(
        first, [second], samples, options, memory_bytes=memory_bytes, on_layer=on_layer
    )
    return found


def compare_all(
    first: str | Path,
    others: Sequence[str | Path],
    samples: Samples,
    options: ModelOptions | None = None,
    *,
    memory_bytes: int = DEFAULT_MEMORY,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> list[Comparison]:
    """`compare` one checkpoint with several others, which runs it once only."""
    folders = [Path(folder) for folder in (first, *others)]
    with side_by_side(folders, samples, options or ModelOptions(), memory_bytes) as streams:
        count = len(streams[0].skeleton.layers)
        for number in range(count):
            for stream in streams:
                stream.advance(number)
            on_layer(number + 1, count)
        found: list[list[SequenceFigures]] = [[] for _ in others]
        for number in range(len(samples.tokens)):
            wanted = log_probabilities(streams[0], number)
            for stream, rows in zip(streams[1:], found, strict=True):
                rows.append(_figures(wanted, log_probabilities(stream, number), samples, number))
    length = samples.tokens.shape[1]
    return [
        Comparison(str(first), str(other), length, tuple(rows))
        for other, rows in zip(others, found, strict=True)
    ]


def _figures(
    first: torch.Tensor, second: torch.Tensor, samples: Samples, number: int
) -> SequenceFigures:
    target = samples.tokens[number, 1:].unsqueeze(1)
    one, two = first[:-1], second[:-1]
    return SequenceFigures(
        samples.domains[number],
        float((one.exp() * (one - two)).sum(-1).mean()),
        float((one.argmax(-1) == two.argmax(-1)).float().mean()),
        float(-one.gather(1, target).mean()),
        float(-two.gather(1, target).mean()),
    )


def figures(sequences: list[SequenceFigures]) -> dict[str, float]:
    """Means over sequences of equal length, with the half-width of their 95 % interval."""
    first = [sequence.nats_first for sequence in sequences]
    second = [sequence.nats_second for sequence in sequences]
    return {
        "sequences": len(sequences),
        "kl": mean([s.kl for s in sequences]),
        "kl_interval": interval([s.kl for s in sequences]),
        "top1": mean([s.top1 for s in sequences]),
        "top1_interval": interval([s.top1 for s in sequences]),
        "perplexity_first": math.exp(mean(first)),
        "perplexity_second": math.exp(mean(second)),
        "nats_more": mean(second) - mean(first),
        "nats_more_interval": interval([b - a for a, b in zip(first, second, strict=True)]),
    }


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def interval(values: list[float]) -> float:
    """1.96 standard errors of the mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    middle = mean(values)
    variance = math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return 1.96 * math.sqrt(variance / len(values))
