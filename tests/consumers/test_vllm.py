"""The CPU engine of vLLM serves a dense MXFP4 checkpoint through the plugin of this package."""

from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

import mxfp4
from mxfp4.converters.convert import convert
from mxfp4.converters.plan import OutputOptions

# pyright: reportArgumentType=false
pytestmark = pytest.mark.consumer_vllm


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with this package and its entry points and nothing else, for another environment."""
    folder = tmp_path_factory.mktemp("site")
    package = distribution("mxfp4")
    (folder / "mxfp4").symlink_to(Path(mxfp4.__file__).parent)
    metadata = folder / f"mxfp4-{package.version}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: mxfp4\nVersion: {package.version}\n"
    (metadata / "METADATA").write_text(text)
    (metadata / "entry_points.txt").write_text(package.read_text("entry_points.txt"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny dense model in MXFP4, and its exact dequantized twin."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    base = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=256,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(base / "source")
    packed = convert(base / "source", base / "packed").output
    return packed, convert(packed, base / "plain", options=OutputOptions(format="bf16")).output


def test_served_model_says_what_its_dequantized_twin_says(folders, installed, consumer):
    packed, plain = folders
    found = consumer("vllm", packed, PYTHONPATH=str(installed))
    assert found["kernels"] == ["Mxfp4PluginLinearKernel"]
    wanted = consumer("vllm", plain)
    assert wanted["kernels"] == []
    assert len(found["tokens"]) == 12
    assert found["tokens"] == wanted["tokens"]
    pairs = zip(found["scores"], wanted["scores"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 0.01
