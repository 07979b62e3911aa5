"""Other people's MXFP4 products, where they happen to be installed: triton_kernels and Marlin.

`prepare` functions take a weight in checkpoint order and give a function of x. The import surface
is that of public sources read, not of a run: `bench_kernels.py` checks every result before it times
it, and records what went wrong instead of stopping.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from mxfp4.tensor import MXTensor

Product = Callable[[torch.Tensor], torch.Tensor]

SCALE_NAMES = ("b_mx_scale", "weight_scale")
"""What releases of triton_kernels call the scales of the weight, newest first."""


def triton_kernels(w: MXTensor) -> Product:
    """`triton_kernels.matmul`, in older releases `matmul_ogs`, with the layouts it recommends."""
    try:
        module, name = import_module("triton_kernels.matmul"), "matmul"
    except ImportError:
        module, name = import_module("triton_kernels.matmul_ogs"), "matmul_ogs"
    tensor = import_module("triton_kernels.tensor")
    layout = import_module("triton_kernels.tensor_details.layout")
    # Transposed views, because it wants columns that are contiguous.
    values = tensor.wrap_torch_tensor(w.codes.transpose(-2, -1), dtype=tensor.FP4)
    scales = tensor.wrap_torch_tensor(w.scales.transpose(-2, -1))
    value_layout, scale_layout = _layouts(layout)
    values = tensor.convert_layout(values, value_layout[0], **value_layout[1])
    scales = tensor.convert_layout(scales, scale_layout[0], **scale_layout[1])
    known = inspect.signature(module.PrecisionConfig).parameters
    scale_name = next(name for name in SCALE_NAMES if name in known)
    config = module.PrecisionConfig(**{scale_name: scales})
    product = getattr(module, name)
    return lambda x: product(x, values, None, precision_config=config)


def marlin(w: MXTensor) -> Product:
    """The product of vLLM for devices without scaled blocks."""
    utils = import_module("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
    rows, columns = w.shape
    layer: Any = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = rows, columns
    layer.params_dtype = torch.bfloat16
    layer.weight = torch.nn.Parameter(w.codes.clone(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(w.scales.clone(), requires_grad=False)
    utils.prepare_fp4_layer_for_marlin(layer)
    weight, scale, workspace = layer.weight, layer.weight_scale, layer.workspace

    def product(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = utils.apply_fp4_marlin_linear(
            x, weight, scale, None, workspace, rows, columns
        )
        return y

    return product


PEERS: dict[str, tuple[str, Callable[[MXTensor], Product]]] = {
    "triton_kernels": ("triton_kernels", triton_kernels),
    "marlin": ("vllm", marlin),
}
"""By the name in the results: the module that must be importable, and how to prepare a weight."""


def _layouts(layout: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The layouts it recommends for values and scales, each with options for converting.

    Newer releases give objects and count axes from the end; older ones give a class and options,
    and count from the front.
    """
    makers = (
        layout.make_default_matmul_mxfp4_w_layout,
        partial(layout.make_default_matmul_mxfp4_w_scale_layout, num_warps=8),
    )
    found = [make(mx_axis=-2) for make in makers]
    if isinstance(found[0], tuple):
        return [make(mx_axis=0) for make in makers]
    return [(each, {}) for each in found]
