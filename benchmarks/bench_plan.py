"""Plan two checkpoints of 2.8T parameters from their headers: seconds and peak memory.

    python benchmarks/bench_plan.py [--save]

Both are sparse: true headers whose data are holes. `many shards` has 1,122 shards and 190,395 BF16
tensors, `Kimi-K3` the 497,220 tensors of that model, packed, in 96 shards. Seconds depend on the
machine; a row also has the time that `json.loads` of the same headers takes on it, measured in the
same run, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_convert import Shapes, config, write_shards

from mxfp4.converters.header import build_header

LAYERS, EXPERTS, HIDDEN, INTER, VOCAB = 60, 1_053, 7_168, 2_048, 163_840
SHARDS, ROUNDS = 1_122, 3
KIMI_K3_SHARDS = 96
RESULTS = Path(__file__).parent / "results" / "plan.json"
TESTS = Path(__file__).parents[1] / "tests" / "converters"


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


def plan(folder: Path, *flags: str) -> tuple[float, float, float]:
    """Seconds on the clock and of the processor, and peak MiB, of `mxfp4 plan`."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "mxfp4", "plan", str(folder), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    clock = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return clock, seconds, after.ru_maxrss / 1024


def many_shards(folder: Path) -> None:
    write_shards(folder, shapes(), SHARDS, None)
    facts = {**config(LAYERS, EXPERTS), "hidden_size": HIDDEN, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(facts))


def kimi_k3(folder: Path) -> None:
    """The list that the tests of roles rebuild from the shapes of the corpus."""
    sys.path.insert(0, str(TESTS))
    listed = importlib.import_module("test_roles_scale")
    tensors = list(listed.kimi_k3(True))
    edges = [round(i * len(tensors) / KIMI_K3_SHARDS) for i in range(KIMI_K3_SHARDS + 1)]
    weight_map = {}
    for number in range(KIMI_K3_SHARDS):
        held = tensors[edges[number] : edges[number + 1]]
        file = f"model-{number + 1:05d}-of-{KIMI_K3_SHARDS:06d}.safetensors"
        with open(folder / file, "wb") as target:
            target.write(build_header(held, {"format": "pt"}))
            target.truncate(target.tell() + sum(info.byte_count for info in held))
        weight_map.update({info.name: file for info in held})
    (folder / "config.json").write_text(json.dumps(listed.entry()["config"]))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(make: Callable[[Path], None]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        rounds = [
            (read_headers(folder), *plan(folder), *plan(folder, "--json")) for _ in range(ROUNDS)
        ]
    headers, clock, seconds, _, clock_json, _, peaks = ([r[i] for r in rounds] for i in range(7))
    return {
        "tensors": len(index["weight_map"]),
        "shards": len(set(index["weight_map"].values())),
        "seconds": statistics.median(clock),
        "seconds_with_json": statistics.median(clock_json),
        "processor_seconds": statistics.median(seconds),
        "json_of_headers_seconds": statistics.median(headers),
        "over_json_of_headers": statistics.median(seconds) / statistics.median(headers),
        "peak_mib": max(peaks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    result = {
        "cores": os.cpu_count(),
        "many shards": measure(many_shards),
        "Kimi-K3": measure(kimi_k3),
    }
    print(json.dumps(result, indent=2))
    if arguments.save:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
