"""What the vLLM plugin does to a layer, without vLLM."""

import tomllib
from pathlib import Path

import torch

from mxfp4 import codec
from mxfp4.kernels import ops, vllm_plugin
from mxfp4.kernels.triton.layout import pack

ROOT = Path(__file__).parents[3]


def layer_of(w):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(w.codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(w.scales, requires_grad=False)
    return layer


def test_cpu_layers_are_dequantized_once(make_weight, exact, assert_at_floor):
    w, x, bias = make_weight(33, 96), torch.randn(4, 96).bfloat16(), torch.randn(33).bfloat16()
    layer = layer_of(w)
    vllm_plugin.prepare(layer)
    assert torch.equal(layer.get_parameter("weight"), codec.dequantize(w))
    assert not hasattr(layer, "weight_scale")
    assert_at_floor(vllm_plugin.apply(layer, x, bias), exact(x, w, bias), floors=1.5)


def test_packed_layers_go_through_the_operator(make_weight, exact, assert_at_floor):
    w, x = make_weight(33, 96), torch.randn(4, 96).bfloat16()
    layer, packed = torch.nn.Module(), pack(w)
    for name, part in zip(
        ("words", "scales", "shifts", "factors"), ops.parts_of(packed), strict=True
    ):
        layer.register_buffer(f"mxfp4_{name}", part)
    setattr(layer, "mxfp4_facts", ops.facts_of(packed))  # noqa: B010
    assert_at_floor(vllm_plugin.apply(layer, x, None), exact(x, w))


def test_entry_point_names_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["mxfp4"].partition(":")
    assert module == vllm_plugin.__name__
    assert callable(getattr(vllm_plugin, name))
