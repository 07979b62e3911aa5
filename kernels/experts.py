"""MXFP4Experts: the routed experts of one layer, their weights in four bits."""

from __future__ import annotations

import torch
from torch import nn

from mxfp4.errors import ShapeError
from mxfp4.kernels import ops
from mxfp4.kernels.activations import ActivationOptions
from mxfp4.kernels.linear import PackedModule
from mxfp4.kernels.triton.layout import PackedWeight, interleave, pack
from mxfp4.tensor import MXTensor


class MXFP4Experts(PackedModule):
    """Tokens x [T, H] through k of E experts each; the router is not part of it.

    `w_in` is [E, 2 I, H] with rows gate, up, gate, up, ... as in gpt-oss; `w_out` is [E, H, I].
    """

    def __init__(
        self,
        w_in: PackedWeight,
        w_out: PackedWeight,
        *,
        bias_in: torch.Tensor | None = None,
        bias_out: torch.Tensor | None = None,
        activation: ActivationOptions | None = None,
    ) -> None:
        super().__init__()
        shapes = w_in.shape, w_out.shape
        if len(shapes[0]) != 3 or shapes[1] != (w_in.shape[0], w_in.columns, w_in.rows // 2):
            raise ShapeError(
                f"w_in [E, 2 I, H] and w_out [E, H, I] are needed, seen {list(shapes[0])} and "
                f"{list(shapes[1])}"
            )
        self.hold("w_in", w_in)
        self.hold("w_out", w_out)
        self.bias_in = None if bias_in is None else nn.Parameter(bias_in, requires_grad=False)
        self.bias_out = None if bias_out is None else nn.Parameter(bias_out, requires_grad=False)
        self.activation = activation or ActivationOptions()

    @classmethod
    def from_mxtensors(
        cls,
        gate: MXTensor,
        up: MXTensor,
        down: MXTensor,
        *,
        dtype: torch.dtype = torch.bfloat16,
        activation: ActivationOptions | None = None,
    ) -> MXFP4Experts:
        """Pack gate and up, each [E, I, H], and down [E, H, I] for activations of `dtype`."""
        w_in = pack(interleave(gate, up), dtype=dtype)
        return cls(w_in, pack(down, dtype=dtype), activation=activation)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], expert ids [T, k] and their weights [T, k] to y [T, H].

        Ids outside 0..E-1 add nothing. Differentiable in x and the weights (and the biases, once
        they require gradients); the backward pass computes the products again and waits for the
        device.
        """
        w_in, w_out = self._packed["w_in"], self._packed["w_out"]
        w_in.check_activations(x)
        y: torch.Tensor = ops.experts(
            x,
            self.parts("w_in"),
            self.parts("w_out"),
            w_in.columns,
            w_out.columns,
            [w_in.folded, w_in.expandable, w_out.folded, w_out.expandable],
            ids,
            weights,
            self.bias_in,
            self.bias_out,
            self.activation.kind.value,
            self.activation.limit,
            self.activation.alpha,
        )
        return y
