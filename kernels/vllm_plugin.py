"""A vLLM plugin: MXFP4 linear layers on CPUs, and on GPUs with the Triton kernels on request.

vLLM finds `register` through the entry point group `vllm.general_plugins` and knows its kernel by
the name `Mxfp4PluginLinearKernel`. On CPUs, for which vLLM has no MXFP4 linear kernel of its own,
weights are dequantized once after loading, so a model needs the memory of bfloat16 there. GPUs are
left to vLLM's own kernels unless the environment has MXFP4_VLLM_GPU=1; since vLLM takes the first
kernel that can run, the others are then switched off with its own VLLM_DISABLED_KERNELS.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from mxfp4.kernels import ops
from mxfp4.kernels.codec import dequantize
from mxfp4.kernels.products import SCRATCH_BYTES
from mxfp4.kernels.triton.layout import LAYOUT_OF_DTYPE, pack
from mxfp4.spec import BLOCK_SIZE
from mxfp4.tensor import MXTensor

GPU_SWITCH = "MXFP4_VLLM_GPU"


@cache
def register() -> None:
    """Register the kernel with vLLM; more than one call does no harm."""
    from vllm.model_executor.kernels.linear import register_linear_kernel  # pyright: ignore[reportMissingImports]
    from vllm.platforms import PlatformEnum  # pyright: ignore[reportMissingImports]

    register_linear_kernel(kernel_class(), PlatformEnum.CPU, "mxfp4")
    if os.environ.get(GPU_SWITCH) == "1":
        register_linear_kernel(kernel_class(), PlatformEnum.CUDA, "mxfp4")
        register_linear_kernel(kernel_class(), PlatformEnum.ROCM, "mxfp4")


@cache
def kernel_class() -> type[Any]:
    """The kernel; made on demand because its base class comes from vLLM."""
    from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearKernel  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic  # pyright: ignore[reportMissingImports]

    class Mxfp4PluginLinearKernel(MxFp4LinearKernel):  # type: ignore[misc]
        """Weight-only: activations stay as they are, like in vLLM's Marlin kernel."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            """On CPUs always, on GPUs for which there are kernels."""
            return _supported()

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            """MXFP4 weights with plain activations or what vLLM asks for MXFP4 by default."""
            if config.activation_quant_key in (None, kMxfp4Dynamic):
                return True, None
            return False, "only weights are MXFP4 here"

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Take codes `weight` and `weight_scale` of the layer to the form `apply` uses."""
            prepare(layer)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            """x [..., K] to y [..., N]."""
            return apply(layer, x, bias)

    return Mxfp4PluginLinearKernel


def prepare(layer: torch.nn.Module) -> None:
    """Replace codes `weight` [N, K/2] and `weight_scale` [N, K/32] by what the device computes on.

    A CPU gets `weight` [N, K] in the dtype of the layer, a GPU a packed weight.
    """
    codes, scales = layer.get_parameter("weight").data, layer.get_parameter("weight_scale").data
    w = MXTensor(codes, scales, (codes.shape[0], scales.shape[1] * BLOCK_SIZE))
    dtype = getattr(layer, "params_dtype", torch.bfloat16)
    del layer.weight_scale
    if codes.device.type == "cpu":
        layer.weight = torch.nn.Parameter(dequantize(w, dtype=dtype), requires_grad=False)
        return
    packed = pack(w, dtype=dtype if dtype in LAYOUT_OF_DTYPE else torch.bfloat16)
    del layer.weight
    for name, part in zip(
        ("words", "scales", "shifts", "factors"), ops.parts_of(packed), strict=True
    ):
        layer.register_buffer(f"mxfp4_{name}", part, persistent=False)
    layer.mxfp4_facts = ops.facts_of(packed)  # type: ignore[assignment]


def apply(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of a layer that `prepare` has seen."""
    facts: Any = getattr(layer, "mxfp4_facts", None)
    if facts is None:
        return torch.nn.functional.linear(x, layer.get_parameter("weight"), bias)
    names = ("words", "scales", "shifts", "factors")
    parts = [layer.get_buffer(f"mxfp4_{name}") for name in names]
    y: torch.Tensor = ops.linear(x, parts, *facts, bias, SCRATCH_BYTES)
    return y


def _supported() -> tuple[bool, str | None]:
    if not torch.cuda.is_available():
        return True, None
    from mxfp4.kernels.triton.device import supports

    if supports(torch.device("cuda")):
        return True, None
    return False, "there are no MXFP4 kernels for this GPU"
