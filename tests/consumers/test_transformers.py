"""transformers loads our output without a missing or unexpected key and computes with our bits."""

# pyright: reportGeneralTypeIssues=false

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from mxfp4.converters.convert import convert
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.kernels.rows import decode_rows

# Warnings of the consumers' own code are theirs to mend.
pytestmark = [pytest.mark.consumer_transformers, pytest.mark.filterwarnings("default")]

TEXT = "The Lord said unto Moses, import sys and print the documentation of the function"


def load(folder, **options):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.bfloat16, **options
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], f"{kind}: {info[kind]}"
    return model.eval()


def dequantized(source, target):
    """The converted checkpoint with every packed module decoded to BF16, as a plain checkpoint."""
    target.mkdir()
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        codes, scales = tensors.pop(name), tensors.pop(f"{module}.weight_scale")
        bits = decode_rows(codes.numpy(), scales.numpy(), "BF16")
        tensors[f"{module}.weight"] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("level", [Level.EXPERTS, Level.LINEAR])
def test_logits_are_those_of_the_dequantized_checkpoint(level, tiny_moe, tmp_path):
    output = convert(tiny_moe, tmp_path / "out", Recipe(level=level)).output
    tokens = AutoTokenizer.from_pretrained(output)(TEXT, return_tensors="pt").input_ids
    assert tokens.shape[1] > 10
    plain = load(dequantized(output, tmp_path / "plain"))
    packed = load(output, quantization_config=CompressedTensorsConfig(dequantize=True))
    original = load(tiny_moe)
    with torch.no_grad():
        expected, found, before = (m(tokens).logits.float() for m in (plain, packed, original))
    assert torch.equal(found, expected)
    cosine = torch.cosine_similarity(before.flatten(), found.flatten(), dim=0).item()
    assert 0.98 < cosine < 1.0
