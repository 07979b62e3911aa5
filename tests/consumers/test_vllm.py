"""vLLM's CPU engine serves a compressed-tensors MXFP4 checkpoint through the plugin.

Needs vLLM's CPU build, which CI does not install; the parts of the plugin that do not need vLLM are
tested in tests/kernels/triton/test_vllm_layers.py.
"""

import importlib.util
import json
import os

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)

from safetensors.torch import load_file, save_file

import mxfp4
from mxfp4.kernels import vllm_plugin

# pyright: reportMissingImports=false, reportArgumentType=false
pytestmark = pytest.mark.filterwarnings("default")


def tokens_of(folder):
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        enforce_eager=True,
    )
    choice = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, detokenize=False)
    prompt = {"prompt_token_ids": [3, 14, 15, 92, 65, 35]}
    found = engine.generate([prompt], choice)[0].outputs[0]
    worker = engine.llm_engine.model_executor.driver_worker.worker
    kernels = {
        type(module.scheme.kernel).__name__
        for module in worker.model_runner.model.modules()
        if hasattr(getattr(module, "scheme", None), "kernel")
    }
    scores = [next(iter(step.values())).logprob for step in found.logprobs]
    return list(found.token_ids), scores, kernels


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
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
        tie_word_embeddings=False,
    )
    plain, packed = base / "plain", base / "packed"
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(plain)
    packed.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, value in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = value
            continue
        w = mxfp4.quantize(value * 4)
        stored[name.replace("weight", "weight_packed")] = w.codes
        stored[name.replace("weight", "weight_scale")] = w.scales
        tensors[name] = mxfp4.dequantize(w)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    described = json.loads((plain / "config.json").read_text())
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    weights |= {"symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": weights, "format": "mxfp4-pack-quantized"}
    described["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (packed / "config.json").write_text(json.dumps(described))
    return packed, plain


def test_served_model_says_what_its_dequantized_twin_says(checkpoints):
    vllm_plugin.register()
    packed, plain = checkpoints
    tokens, scores, kernels = tokens_of(packed)
    assert kernels == {"Mxfp4PluginLinearKernel"}
    wanted, wanted_scores, _ = tokens_of(plain)
    assert tokens == wanted
    assert max(abs(a - b) for a, b in zip(scores, wanted_scores, strict=True)) < 0.01
