"""The adapters of the kernel benchmark, against stand-ins with the import surfaces they expect."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mxfp4.codec import dequantize
from mxfp4.tensor import MXTensor

PATH = Path(__file__).parents[3] / "benchmarks" / "kernel_peers.py"


@pytest.fixture
def peers():
    spec = importlib.util.spec_from_file_location("kernel_peers", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def product_of(x, values, scales):
    """x w for transposed codes and scales."""
    codes = values.T.contiguous()
    w = MXTensor(codes, scales.T.contiguous(), (codes.shape[0], codes.shape[1] * 2))
    return (x.float() @ dequantize(w, dtype=torch.float32).T).to(x.dtype)


@dataclass
class Old:
    weight_scale: object = None


@dataclass
class New:
    b_mx_scale: object = None


def install(monkeypatch, name, **content):
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("newer", [True, False])
def test_both_generations_of_triton_kernels(newer, peers, monkeypatch, make_weight, exact):
    axes = []

    def maker(mx_axis, num_warps=None):
        axes.append(mx_axis)
        return "layout" if newer else ("layout", {"mx_axis": mx_axis})

    def run(x, w, bias, *, precision_config):
        assert bias is None
        config = precision_config
        return product_of(x, w, config.b_mx_scale if newer else config.weight_scale)

    def convert(values, layout, **options):
        assert layout == "layout"
        assert options == ({} if newer else {"mx_axis": 0})
        return values

    install(monkeypatch, "triton_kernels")
    name = "matmul" if newer else "matmul_ogs"
    content = {name: run, "PrecisionConfig": New if newer else Old}
    install(monkeypatch, f"triton_kernels.{name}", **content)
    wrap = SimpleNamespace(wrap_torch_tensor=lambda t, dtype=None: t, convert_layout=convert)
    install(monkeypatch, "triton_kernels.tensor", FP4="fp4", **vars(wrap))
    install(monkeypatch, "triton_kernels.tensor_details")
    install(
        monkeypatch,
        "triton_kernels.tensor_details.layout",
        make_default_matmul_mxfp4_w_layout=maker,
        make_default_matmul_mxfp4_w_scale_layout=maker,
    )
    w, x = make_weight(8, 64), torch.randn(3, 64).bfloat16()
    y = peers.triton_kernels(w)(x)
    torch.testing.assert_close(y.double(), exact(x, w), rtol=2**-7, atol=1e-2)
    assert axes == ([-2, -2] if newer else [-2, -2, 0, 0])


def test_marlin(peers, monkeypatch, make_weight, exact):
    def prepare(layer):
        assert layer.params_dtype == torch.bfloat16
        assert layer.weight.shape == (layer.output_size_per_partition, 32)
        assert layer.input_size_per_partition == 64
        layer.workspace = "workspace"

    def apply(x, weight, scale, weight_global_scale, workspace, rows, columns):
        assert (weight_global_scale, workspace, rows, columns) == (None, "workspace", 8, 64)
        return product_of(x, weight.T, scale.T)

    base = "vllm.model_executor.layers.quantization.utils"
    parts = base.split(".")
    for depth in range(1, len(parts) + 1):
        install(monkeypatch, ".".join(parts[:depth]))
    install(
        monkeypatch,
        f"{base}.marlin_utils_fp4",
        prepare_fp4_layer_for_marlin=prepare,
        apply_fp4_marlin_linear=apply,
    )
    w, x = make_weight(8, 64), torch.randn(3, 64).bfloat16()
    y = peers.marlin(w)(x)
    torch.testing.assert_close(y.double(), exact(x, w), rtol=2**-7, atol=1e-2)
