"""Inside the vLLM environment: serve a folder and print greedy tokens with their log-probs, and
which kernels of a quantized linear layer served it.

run_vllm.py FOLDER [decode]. vLLM's only MXFP4 expert kernel for CPUs needs AMX. With `decode`, the
engine still reads names, shapes, shards and bytes with its own MXFP4 loader; only the product is
that of its unquantized experts, on weights decoded after loading.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import os
import sys

import torch

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
)

from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization import mxfp4

Original = mxfp4.Mxfp4MoEMethod
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decoded(codes, scales):
    elements = VALUES[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()]
    factors = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=-1)
    return (elements * factors).to(torch.bfloat16)


class DecodedExperts(UnquantizedFusedMoEMethod):
    """vLLM's own parameters and loaders for MXFP4, its unquantized product."""

    loaded = 0
    create_weights = Original.create_weights
    _encode_mxfp4_weight_scale = staticmethod(Original._encode_mxfp4_weight_scale)
    get_scale_weight_loader = Original.__dict__["get_scale_weight_loader"]

    def __getattr__(self, name):
        if name.startswith("_") or not hasattr(Original, name):
            return super().__getattr__(name)
        return getattr(Original, name).__get__(self)

    def process_weights_after_loading(self, layer):
        for name in ("w13", "w2"):
            codes, scales = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            assert codes.dtype == scales.dtype == torch.uint8
            values = decoded(codes.data, scales.data)
            delattr(layer, f"{name}_weight")
            delattr(layer, f"{name}_weight_scale")
            parameter = torch.nn.Parameter(values, requires_grad=False)
            layer.register_parameter(f"{name}_weight", parameter)
        DecodedExperts.loaded += 1
        super().process_weights_after_loading(layer)


amx = torch.cpu._is_amx_tile_supported()
folder, *mode = sys.argv[1:]
if mode == ["amx"]:
    print(json.dumps({"amx": amx}))
    sys.exit()
if mode == ["decode"]:
    mxfp4.Mxfp4MoEMethod = DecodedExperts
engine = LLM(
    folder,
    skip_tokenizer_init=True,
    dtype="bfloat16",
    max_model_len=256,
    enforce_eager=True,
)
choice = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, detokenize=False)
found = engine.generate([{"prompt_token_ids": [3, 14, 15, 92, 65, 35]}], choice)[0].outputs[0]
scores = [next(iter(step.values())).logprob for step in found.logprobs]
runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
schemes = [module.scheme for module in runner.model.modules() if hasattr(module, "scheme")]
kernels = {type(scheme.kernel).__name__ for scheme in schemes}
result = {
    "tokens": list(found.token_ids),
    "scores": scores,
    "decoded": DecodedExperts.loaded,
    "kernels": sorted(kernels),
}
print(json.dumps(result))
