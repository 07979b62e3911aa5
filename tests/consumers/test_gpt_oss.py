"""transformers loads gpt-oss in our packed form, and computes with the bits we decode it to."""

# The stubs of transformers do not know what its loaders return.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from mxfp4.converters.convert import convert
from mxfp4.converters.plan import OutputOptions

# Warnings of the consumers' own code are theirs to mend.
pytestmark = [pytest.mark.consumer_transformers, pytest.mark.filterwarnings("default")]

TOKENS = torch.tensor([[5, 17, 99, 3, 42, 7, 64, 21]])


def load(folder, **options):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.bfloat16, **options
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], f"{kind}: {info[kind]}"
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


def test_packed_and_decoded_give_the_same_logits(gpt_oss, tmp_path):
    packed = convert(gpt_oss, tmp_path / "packed", options=OutputOptions(format="gpt-oss")).output
    plain = convert(packed, tmp_path / "plain", options=OutputOptions(format="bf16")).output
    first = load(packed, quantization_config=Mxfp4Config(dequantize=True))
    second = load(plain)
    for (name, ours), theirs in zip(
        second.named_parameters(), first.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert torch.equal(logits(first), logits(second))
    before = logits(load(gpt_oss))
    cosine = torch.cosine_similarity(before.flatten(), logits(second).flatten(), dim=0).item()
    assert 0.9 < cosine < 1.0


def test_a_way_through_another_layout_comes_back_to_the_same_bytes(gpt_oss, tmp_path, builder):
    packed = convert(gpt_oss, tmp_path / "packed", options=OutputOptions(format="gpt-oss")).output
    single = convert(packed, tmp_path / "single").output
    again = convert(single, tmp_path / "again", options=OutputOptions(format="gpt-oss")).output
    assert builder.read(again) == builder.read(packed)
    names = list(builder.read(single))
    assert sum(name.endswith(".weight_packed") for name in names) == 2 * 4 * 3
    assert np.all([not name.endswith("_blocks") for name in names])


@pytest.mark.consumer_llama
def test_the_converter_of_llama_cpp_takes_it(gpt_oss, tmp_path, builder, consumer, llama_converter):
    packed = convert(gpt_oss, tmp_path / "packed", options=OutputOptions(format="gpt-oss")).output
    blocks = convert(packed, tmp_path / "blocks", options=OutputOptions(format="gguf-blocks"))
    arguments = (packed, tmp_path / "model.gguf", tmp_path / "blocks.npz")
    result = consumer("llama", llama_converter, *arguments, here=True)
    assert result["mxfp4"] == 2 * 3
    theirs, ours = np.load(tmp_path / "blocks.npz"), builder.read(blocks.output)
    for layer in range(2):
        for leaf in ("gate", "up", "down"):
            stacked = theirs[f"blk.{layer}.ffn_{leaf}_exps.weight"]
            for expert in range(4):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj.weight_gguf"
                assert stacked[expert].tobytes() == ours[name][2], name
