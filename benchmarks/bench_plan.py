"""Plan a 2.8T-parameter checkpoint from headers: seconds of processor time and peak memory.

    python benchmarks/bench_plan.py [--save]

The checkpoint is sparse: 1,122 shards with true headers whose data are holes, 190,395 tensors.
Seconds depend on the machine; the row also has the time that `json.loads` of the same headers
takes on it, measured in the same run, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_convert import Shapes, config, write_shards

LAYERS, EXPERTS, HIDDEN, INTER, VOCAB = 60, 1_053, 7_168, 2_048, 163_840
SHARDS, ROUNDS = 1_122, 3
RESULTS = Path(__file__).parent / "results" / "plan.json"


def shapes() -> Shapes:
    found: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for expert in range(EXPERTS):
            name = f"{base}mlp.experts.{expert}."
            found[name + "gate_proj.weight"] = (INTER, HIDDEN)
            found[name + "up_proj.weight"] = (INTER, HIDDEN)
            found[name + "down_proj.weight"] = (HIDDEN, INTER)
        for name in "qkvo":
            found[f"{base}self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
            found[f"{base}self_attn.{name}_proj.bias"] = (HIDDEN,)
        found[base + "mlp.gate.weight"] = (EXPERTS, HIDDEN)
        found[base + "input_layernorm.weight"] = (HIDDEN,)
        found[base + "post_attention_layernorm.weight"] = (HIDDEN,)
        found[base + "self_attn.q_norm.weight"] = (HIDDEN,)
        found[base + "self_attn.k_norm.weight"] = (HIDDEN,)
    found["model.norm.weight"] = (HIDDEN,)
    found["lm_head.weight"] = (VOCAB, HIDDEN)
    return found


def read_headers(folder: Path) -> float:
    """Processor seconds to load the JSON of all headers, which no planner can do without."""
    started = time.process_time()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return time.process_time() - started


def plan(folder: Path) -> tuple[float, float]:
    """Processor seconds and peak MiB of `mxfp4 plan --json`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "mxfp4", "plan", str(folder), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, after.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = shapes()
        write_shards(folder, tensors, SHARDS, None)
        facts = {**config(LAYERS, EXPERTS), "hidden_size": HIDDEN, "vocab_size": VOCAB}
        (folder / "config.json").write_text(json.dumps(facts))
        rounds = [(read_headers(folder), *plan(folder)) for _ in range(ROUNDS)]
    headers, seconds, peaks = ([row[i] for row in rounds] for i in range(3))
    result = {
        "tensors": len(tensors),
        "shards": SHARDS,
        "cores": os.cpu_count(),
        "processor_seconds": statistics.median(seconds),
        "json_of_headers_seconds": statistics.median(headers),
        "over_json_of_headers": statistics.median(seconds) / statistics.median(headers),
        "peak_mib": max(peaks),
    }
    print(json.dumps(result, indent=2))
    if arguments.save:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
