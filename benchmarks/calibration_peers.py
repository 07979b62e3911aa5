"""Quantize a checkpoint to MXFP4 weights with another tool, on the same calibration tokens.

    python benchmarks/calibration_peers.py TOOL MODEL TOKENS.pt OUT

TOOL is one of `PEERS`; TOKENS.pt is an int64 tensor [S, T] as `bench_calibration.py` saves it. Runs
in an environment of its own with llmcompressor and auto-round installed. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROUTERS = "re:.*mlp.gate$"


def compressor(model: Any, tokens: torch.Tensor, method: str) -> None:
    """llm-compressor at MXFP4A16: "rtn" or "gptq"."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]
    from llmcompressor.modifiers.gptq import GPTQModifier  # pyright: ignore[reportMissingImports]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # pyright: ignore[reportMissingImports]

    kind = GPTQModifier if method == "gptq" else QuantizationModifier
    recipe = kind(targets="Linear", scheme="MXFP4A16", ignore=["lm_head", ROUTERS])
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens.tolist()]
    data: dict[str, Any] = {}
    if method == "gptq":
        data["dataset"] = Dataset.from_list(rows)
        data["max_seq_length"] = tokens.shape[1]
        data["num_calibration_samples"] = tokens.shape[0]
    oneshot(model=model, recipe=recipe, **data)


def auto_round(model: Any, tokens: torch.Tensor, folder: Path, out: Path, iterations: int) -> None:
    """AutoRound with MXFP4 weights and 16-bit activations."""
    from auto_round import AutoRound  # pyright: ignore[reportMissingImports]

    routed = (getattr(model.config, "num_experts", 0) or 0) > 1
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(folder),
        scheme="MXFP4",
        act_bits=16,
        iters=iterations,
        nsamples=tokens.shape[0],
        seqlen=tokens.shape[1],
        batch_size=4,
        dataset=[row.unsqueeze(0) for row in tokens],
        # Matched as a part of the name: "gate" alone would keep every gate_proj as well.
        ignore_layers="mlp.gate" if routed else "",
        low_gpu_mem_usage=False,
        enable_torch_compile=False,
    )
    rounder.quantize_and_save(str(out), format="llm_compressor")


def with_compressor(method: str) -> Callable[[Any, torch.Tensor, Path, Path], None]:
    """A peer that quantizes in place and saves packed."""

    def run(model: Any, tokens: torch.Tensor, folder: Path, out: Path) -> None:
        compressor(model, tokens, method)
        model.save_pretrained(out, save_compressed=True)

    return run


PEERS: Mapping[str, Callable[[Any, torch.Tensor, Path, Path], None]] = {
    "compressor-rtn": with_compressor("rtn"),
    "compressor-gptq": with_compressor("gptq"),
    "autoround-0": lambda m, t, f, o: auto_round(m, t, f, o, 0),
    "autoround-200": lambda m, t, f, o: auto_round(m, t, f, o, 200),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tool", choices=sorted(PEERS))
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    tokens = torch.load(options.tokens)
    start = time.process_time()
    PEERS[options.tool](model, tokens, options.model, options.out)
    seconds = time.process_time() - start
    row = {"method": options.tool, "cpu_seconds": round(seconds, 1), "tokens": tokens.numel()}
    options.out.joinpath("peer.json").write_text(json.dumps(row))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
