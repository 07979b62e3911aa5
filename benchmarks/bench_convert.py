"""Local conversion against `cp` of the same source, and the memory that it takes.

    python benchmarks/bench_convert.py [--gib 2] [--rounds 5] [--folder DIR]

Speed: a multi-shard checkpoint of random BF16 experts is copied with `cp -r` and converted with
`mxfp4 convert`, one process, in turns; warm (source in the page cache) and cold (source dropped
from it before every run). `cp` does not wait for the disk and `mxfp4` does, so `cp` is also timed
with a `sync` of its files. The figures are ratios of medians; above 1 means faster than `cp`.
Virtual machines give free memory back to their host and wait when they need it again, which slows
`cp` up to fivefold at random; so every run starts with memory that was touched a moment before.

Memory: peak resident size of a conversion process, with torch imported in it, over a sparse
checkpoint with one tensor of 2.3 GB and over one of twenty shards.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mxfp4.converters.header import TensorInfo, build_header
from mxfp4.version import __version__

HIDDEN, INTER, VOCAB = 2048, 1024, 4096
SHARDS = 8
RESULTS = Path(__file__).parent / "results" / "convert.json"

Shapes = dict[str, tuple[int, ...]]


def config(layers: int, experts: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTER,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "vocab_size": VOCAB,
    }


def moe_shapes(layers: int, experts: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        base = f"model.layers.{layer}."
        shapes[base + "input_layernorm.weight"] = (HIDDEN,)
        for name in "qkvo":
            shapes[f"{base}self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[base + "mlp.gate.weight"] = (experts, HIDDEN)
        for expert in range(experts):
            name = f"{base}mlp.experts.{expert}."
            shapes[name + "gate_proj.weight"] = (INTER, HIDDEN)
            shapes[name + "up_proj.weight"] = (INTER, HIDDEN)
            shapes[name + "down_proj.weight"] = (HIDDEN, INTER)
    return shapes


def write_shards(
    folder: Path, shapes: Shapes, count: int, fill: Callable[[int], bytes] | None
) -> None:
    """Shards with true headers; without `fill` the data are a hole."""
    names = list(shapes)
    edges = [round(i * len(names) / count) for i in range(count + 1)]
    weight_map = {}
    for number in range(count):
        infos = [TensorInfo(n, "BF16", shapes[n]) for n in names[edges[number] : edges[number + 1]]]
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        with open(folder / file, "wb") as target:
            target.write(build_header(infos, {"format": "pt"}))
            for info in infos:
                if fill is None:
                    target.seek(info.byte_count, os.SEEK_CUR)
                else:
                    target.write(fill(info.element_count))
            target.truncate()
        weight_map.update({info.name: file for info in infos})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def random_bf16(count: int) -> bytes:
    """Normal values with the spread of trained weights."""
    rng = np.random.default_rng(count)
    values = rng.standard_normal(count, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def load_into_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.read(16 << 20):
                pass


def touch_free_memory(limit: int = 5 << 30) -> None:
    """Make the host of a virtual machine provide the memory that the next command will use."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    area = mmap.mmap(-1, min(limit, int(free * 0.8)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, len(area), mmap.PAGESIZE):
        area[start] = 1
    area.close()


def timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def speed(folder: Path, gib: float, rounds: int) -> dict[str, object]:
    layers = 4
    experts = max(round(gib * 2**30 / (layers * 3 * HIDDEN * INTER * 2)), 1)
    source, output = folder / "source", folder / "output"
    source.mkdir()
    write_shards(source, moe_shapes(layers, experts), SHARDS, random_bf16)
    (source / "config.json").write_text(json.dumps(config(layers, experts)))
    convert = [sys.executable, "-m", "mxfp4", "convert", str(source), str(output), "-q"]
    convert += ["--max-shard-size", "256MiB"]
    commands = {
        "cp": ["cp", "-r", str(source), str(output)],
        "cp and sync": ["sh", "-c", f"cp -r {source} {output} && sync {output}/*.safetensors"],
        "mxfp4": convert,
    }
    rows: dict[str, object] = {"source_bytes": sum(p.stat().st_size for p in source.iterdir())}
    for state, prepare in (("warm", load_into_cache), ("cold", drop_from_cache)):
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                shutil.rmtree(output, ignore_errors=True)
                os.sync()
                prepare(source)
                touch_free_memory()
                seconds[name].append(timed(command))
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        rows[state] = {
            "seconds": seconds,
            "over_cp": medians["cp"] / medians["mxfp4"],
            "over_cp_and_sync": medians["cp and sync"] / medians["mxfp4"],
        }
    return rows


MEASURE = """
import resource, sys, torch
from mxfp4.converters.convert import RunOptions, convert
from mxfp4.converters.plan import OutputOptions
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], None, OutputOptions(), RunOptions(workers=int(sys.argv[3])))
print(start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_memory(source: Path, output: Path, workers: int) -> dict[str, float]:
    """MiB resident after `import torch` and at the peak of the conversion."""
    command = [sys.executable, "-c", MEASURE, str(source), str(output), str(workers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    start, peak = (int(word) / 1024 for word in done.stdout.split())
    shutil.rmtree(output)
    return {"after_import_torch_mib": start, "peak_mib": peak, "workers": workers}


def memory(folder: Path) -> dict[str, object]:
    giant, many = folder / "giant", folder / "many"
    giant.mkdir()
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": (574_219, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (574_219, HIDDEN),
    }
    write_shards(giant, shapes, 1, None)
    dense = {**config(1, 0), "model_type": "llama", "intermediate_size": 574_219}
    del dense["num_experts"], dense["moe_intermediate_size"]
    (giant / "config.json").write_text(json.dumps(dense))
    many.mkdir()
    write_shards(many, moe_shapes(4, 40), 20, None)
    (many / "config.json").write_text(json.dumps(config(4, 40)))
    return {
        "tensor of 2.35 GB": peak_memory(giant, folder / "out", 1),
        "20 shards": peak_memory(many, folder / "out", 1),
        "20 shards, two workers": peak_memory(many, folder / "out", 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the source")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turns")
    parser.add_argument("--folder", type=Path, help="where to work; a disk, not memory")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        result = {
            "mxfp4": __version__,
            "cores": os.cpu_count(),
            "memory": memory(Path(name)),
            "speed": speed(Path(name), arguments.gib, arguments.rounds),
        }
    print(json.dumps(result, indent=2))
    if arguments.save:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
