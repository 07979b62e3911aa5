"""Second moments of the inputs of a layer: what calibration needs to know about activations.

The error that rounding W [N, K] to Q makes on inputs x is tr((W - Q) H (W - Q)^T) with H the mean
of w x x^T. H is kept in two halves from different sequences, so that a result fitted on one half
can be checked on the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HALVES = 2


@dataclass(frozen=True)
class Moments:
    """Sums over tokens for a stack of B inputs; `sums` is float32 [2, B, K, K].

    `weights` float32 [2, B] are the sums of the token weights w, `counts` int64 [B] the tokens.
    """

    sums: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, stack: int, columns: int) -> Moments:
        """No tokens yet."""
        return cls(
            torch.zeros(HALVES, stack, columns, columns),
            torch.zeros(HALVES, stack),
            torch.zeros(stack, dtype=torch.int64),
        )

    def add(
        self, entry: int, inputs: torch.Tensor, half: int, weight: torch.Tensor | None = None
    ) -> None:
        """Add tokens [M, K] with weights [M] (one each by default) to one entry, in place."""
        inputs = inputs.float()
        scaled = inputs if weight is None else inputs * weight.float().unsqueeze(1)
        self.sums[half, entry].addmm_(scaled.T, inputs)
        self.weights[half, entry] += len(inputs) if weight is None else weight.sum()
        self.counts[entry] += len(inputs)

    def pick(self, chosen: torch.Tensor) -> Moments:
        """Some entries of the stack, by index."""
        return Moments(self.sums[:, chosen], self.weights[:, chosen], self.counts[chosen])

    def rescaled(self, scale: torch.Tensor) -> Moments:
        """Moments of inputs divided by `scale` [B, K] or [K] channel by channel."""
        outer = scale.unsqueeze(-1) * scale.unsqueeze(-2)
        return Moments(self.sums / outer, self.weights, self.counts)

    def half(self, number: int) -> Moments:
        """One half alone; its token counts are halved."""
        keep = torch.zeros(HALVES)
        keep[number] = 1
        return Moments(
            self.sums * keep.view(-1, 1, 1, 1),
            self.weights * keep.view(-1, 1),
            self.counts // HALVES,
        )

    def mean(self) -> torch.Tensor:
        """H as float32 [B, K, K]; zero where there was no token."""
        total = self.weights.sum(0).clamp(min=1e-30)
        return self.sums.sum(0) / total.view(-1, 1, 1)

    def importance(self) -> torch.Tensor:
        """The mean square of each input channel, float32 [B, K]."""
        return self.mean().diagonal(dim1=-2, dim2=-1)


def shrunk(moments: Moments, prior: Moments, pseudo_tokens: torch.Tensor) -> torch.Tensor:
    """H of every entry, pulled towards a prior (one entry, or one each).

    The prior counts for `pseudo_tokens` tokens, float32 [B] or [1].

    An expert that few tokens reach has an H of low rank, and GPTQ on it is worse than plain
    rounding; the layer-wide H is a good guess for the directions nothing is known about. Both are
    means, so that `pseudo_tokens` counts tokens however they are weighted.
    """
    count = moments.counts.float().view(-1, 1, 1)
    pseudo = pseudo_tokens.view(-1, 1, 1)
    return (moments.mean() * count + prior.mean() * pseudo) / (count + pseudo).clamp(min=1)


def damping(
    counts: torch.Tensor, columns: int, bounds: tuple[float, float], slope: float
) -> torch.Tensor:
    """What share of the mean diagonal is added to the diagonal, float32 [B].

    `slope` times columns per token, within `bounds`: with few tokens per input channel most
    directions of H are noise, and the diagonal keeps the solution near plain rounding.
    """
    return (slope * columns / counts.clamp(min=1).float()).clamp(*bounds)


def less_correlated(hessian: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """H [B, K, K] with its off-diagonal entries taken down by `share` [B] of themselves.

    Correlations seen in few tokens are partly chance, and a fit that trusts them pays on other
    text. Unlike damping this treats loud and quiet channels alike.
    """
    kept = hessian * (1 - share).view(-1, 1, 1)
    kept.diagonal(dim1=-2, dim2=-1).copy_(hessian.diagonal(dim1=-2, dim2=-1))
    return kept


def conditional_energy(hessian: torch.Tensor) -> torch.Tensor:
    """What of each input channel the others do not explain: 1 / diag(H^-1), float32 [B, K].

    `hessian` is positive definite. It is what an error in one weight costs once the other weights
    of its row have adapted to it (Hassibi and Stork, Optimal Brain Surgeon).
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian.double()))
    return (1 / inverse.diagonal(dim1=-2, dim2=-1)).float()


def damped(hessian: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """H [B, K, K] with `share` [B] of its mean diagonal added to the diagonal.

    A matrix of zeros becomes the identity, which makes every method plain rounding.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1)
    add = torch.where(mean > 0, share * mean, torch.ones_like(mean))
    result = hessian.clone()
    result.diagonal(dim1=-2, dim2=-1).add_(add.unsqueeze(-1))
    return result


def output_error(weight: torch.Tensor, values: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """tr((W - Q) H (W - Q)^T) of each matrix, float32 [B]."""
    difference = weight - values
    return ((difference @ hessian) * difference).sum((-2, -1))
