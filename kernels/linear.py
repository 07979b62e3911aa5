"""MXFP4Linear: a linear layer whose weight stays in four bits."""

from __future__ import annotations

import torch
from torch import nn

from mxfp4.kernels import ops
from mxfp4.kernels.products import SCRATCH_BYTES
from mxfp4.kernels.triton.layout import PackedWeight, pack, unpack
from mxfp4.tensor import MXTensor


class PackedModule(nn.Module):
    """A module that holds packed weights as buffers.

    Factors are kept as int32 bits, so that casting the module leaves them alone.
    """

    def hold(self, name: str, w: PackedWeight) -> None:
        """Register the tensors of `w` as buffers below `name`."""
        self._packed: dict[str, PackedWeight] = {**getattr(self, "_packed", {}), name: w}
        for part, tensor in zip(("words", "scales", "shifts"), ops.parts_of(w), strict=False):
            self.register_buffer(f"{name}_{part}", tensor)
        self.register_buffer(f"{name}_factors", w.factors.view(torch.int32))

    def parts(self, name: str) -> list[torch.Tensor]:
        """The tensors of a held weight where the module is now."""
        words, scales, shifts, factors = (
            self.get_buffer(f"{name}_{part}") for part in ("words", "scales", "shifts", "factors")
        )
        return [words, scales, shifts, factors.view(torch.float32)]

    def packed(self, name: str) -> PackedWeight:
        """A held weight where the module is now."""
        w = self._packed[name]
        return ops.join(self.parts(name), ops.facts_of(w), w.dtype, bank=w.experts is not None)


class MXFP4Linear(PackedModule):
    """y = x w^T + bias for x [..., K] of the dtype the weight was packed for.

    The weight is not a parameter; x and bias get gradients.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        super().__init__()
        self.hold("weight", weight)
        self.out_features, self.in_features = weight.rows, weight.columns
        self.scratch_bytes = scratch_bytes
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_mxtensor(
        cls,
        weight: MXTensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> MXFP4Linear:
        """Pack `weight` [N, K] for activations of `dtype`; a bias is cast to it."""
        return cls(pack(weight, dtype=dtype), None if bias is None else bias.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] to y [..., N]."""
        w = self._packed["weight"]
        w.check_activations(x)
        facts = ops.facts_of(w)
        y: torch.Tensor = ops.linear(x, self.parts("weight"), *facts, self.bias, self.scratch_bytes)
        return y

    def to_mxtensor(self) -> MXTensor:
        """The weight in checkpoint order, bit for bit what was packed."""
        return unpack(self.packed("weight"))

    def extra_repr(self) -> str:
        """Sizes, as `nn.Linear` shows them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, layout={self._packed['weight'].layout}"
        )
