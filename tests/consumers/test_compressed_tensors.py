"""The library that defines the layout decodes our output to the very bits we decode it to."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from mxfp4.converters.convert import convert
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.kernels.rows import decode_rows

pytestmark = pytest.mark.consumer_compressed_tensors


@pytest.fixture(scope="module")
def converted(tmp_path_factory, tiny_moe):
    output = tmp_path_factory.mktemp("ct") / "out"
    return convert(tiny_moe, output, Recipe(level=Level.LINEAR))


@pytest.fixture(scope="module")
def tensors(converted):
    found = {}
    for path in sorted(converted.output.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.fixture(scope="module")
def scheme(converted):
    import json

    config = json.loads((converted.output / "config.json").read_text())["quantization_config"]
    return QuantizationConfig.model_validate(config).config_groups["group_0"]


def test_the_config_is_valid_under_its_own_schema(converted, scheme):
    assert scheme.weights.num_bits == 4
    assert scheme.weights.group_size == 32
    assert str(scheme.format) == "mxfp4-pack-quantized"


def test_every_module_decodes_to_the_same_bits(tensors, scheme):
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith("_packed")]
    assert len(modules) == 400
    for module in modules:
        stored = {
            "weight_packed": tensors[f"{module}.weight_packed"],
            "weight_scale": tensors[f"{module}.weight_scale"],
        }
        theirs = compressor.decompress(dict(stored), scheme)["weight"].to(torch.bfloat16)
        ours = decode_rows(stored["weight_packed"].numpy(), stored["weight_scale"].numpy(), "BF16")
        assert np.array_equal(theirs.view(torch.uint16).numpy(), ours), module


def test_every_module_encodes_to_the_same_bytes(tensors, scheme, tiny_moe):
    from compressed_tensors.quantization.utils import calculate_qparams

    source = {}
    for path in sorted(tiny_moe.glob("*.safetensors")):
        source |= load_file(path)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith("_packed")]
    for module in modules[::7]:
        weight = source[f"{module}.weight"]
        blocks = weight.unflatten(-1, (-1, 32))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        packed = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        for leaf in ("weight_packed", "weight_scale"):
            assert torch.equal(packed[leaf], tensors[f"{module}.{leaf}"]), f"{module}.{leaf}"
