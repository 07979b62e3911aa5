"""The library that wrote INT4 and NVFP4 sources decodes them to the values that we decode."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from mxfp4.converters.convert import convert
from mxfp4.converters.plan import OutputOptions

pytestmark = pytest.mark.consumer_compressed_tensors

ROWS, COLUMNS = 96, 128
NAME = "model.layers.0.mlp.gate_proj"
CONFIG = {
    "model_type": "llama",
    "hidden_size": COLUMNS,
    "intermediate_size": ROWS,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}


def int4():
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=4, type="int", strategy="group", group_size=32, symmetric=True
        ),
    )
    scale = (torch.rand(ROWS, COLUMNS // 32) * 0.01 + 0.001).to(torch.bfloat16)
    return "pack-quantized", scheme, {"weight_scale": scale}


def nvfp4():
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
        ),
    )
    # The scale already holds the global scale when it is handed to the compressor.
    scale = (torch.rand(ROWS, COLUMNS // 16) * 300 + 20).to(torch.float8_e4m3fn)
    return (
        "nvfp4-pack-quantized",
        scheme,
        {"weight_scale": scale.float(), "weight_global_scale": torch.tensor([8192.0])},
    )


@pytest.mark.parametrize("make", [int4, nvfp4])
def test_values_are_those_of_the_library(make, tmp_path, builder):
    torch.manual_seed(0)
    name, scheme, scales = make()
    compressor = BaseCompressor.get_value_from_registry(name)
    weight = (torch.randn(ROWS, COLUMNS) * 0.05).to(torch.bfloat16)
    stored = dict(compressor.compress({"weight": weight, **scales}, scheme))
    theirs = compressor.decompress(dict(stored), scheme)["weight"].to(torch.bfloat16)
    dtypes = {
        torch.int32: "I32",
        torch.int64: "I64",
        torch.uint8: "U8",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float8_e4m3fn: "F8_E4M3",
    }
    views = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    tensors = {
        f"{NAME}.{leaf}": (
            dtypes[tensor.dtype],
            np.asarray(tensor.view(views.get(tensor.dtype, tensor.dtype)).numpy()),
        )
        for leaf, tensor in stored.items()
    }
    config = {**CONFIG, "quantization_config": {"quant_method": "compressed-tensors"}}
    folder = builder.write(tmp_path / "source", builder.split(tensors, len(tensors)), config)
    convert(folder, tmp_path / "out", options=OutputOptions(format="bf16"))
    ((dtype, shape, raw),) = builder.read(tmp_path / "out").values()
    assert (dtype, shape) == ("BF16", (ROWS, COLUMNS))
    ours = np.frombuffer(raw, np.uint16).reshape(shape)
    # A product that is exact in float32 may be rounded in the library's own, narrower arithmetic.
    difference = ours.astype(np.int64) - theirs.view(torch.uint16).numpy().astype(np.int64)
    assert np.abs(difference).max() <= 0
