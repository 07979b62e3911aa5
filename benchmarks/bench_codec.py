"""Speed and memory of the block codec beside memcpy and beside other packages' encoders.

    python benchmarks/bench_codec.py [--mib 64] [--rounds 9] [--peer-rounds 3] [--write NAME]

Everything runs on one thread. Candidates take turns in every round; speeds are medians, ratios are
medians of the ratios of each round. GB count the bytes of the BF16 source. `--write codec` puts the
JSON and the chart into benchmarks/results/codec.*. Peers are whatever is installed beside this
package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import codec_peers
import numpy as np
import torch
from codec_chart import bar_chart

import mxfp4
from mxfp4.kernels import native
from mxfp4.kernels.backends import BlockCodec, backends, block_codec, use_backend
from mxfp4.spec import CodecOptions, ScaleRule

RESULTS = Path(__file__).with_name("results")
SEARCH = CodecOptions(rule=ScaleRule.SEARCH)
COLUMNS = 4096
MEASURED = " with statistics"
Row = dict[str, Any]
Candidates = dict[str, Callable[[], Any]]


def source(mib: int) -> torch.Tensor:
    """Weights like those of a model: normal, spread 0.02, BF16 [N, 4096]."""
    torch.manual_seed(0)
    return (torch.randn(mib * (1 << 20) // 2 // COLUMNS, COLUMNS) * 0.02).bfloat16()


def race(candidates: Candidates, rounds: int, size: int) -> list[Row]:
    """Wall and CPU seconds of every candidate in turns; the first one is the baseline."""
    for run in candidates.values():
        run()
    wall: dict[str, list[float]] = {name: [] for name in candidates}
    cpu: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - start_cpu)
    first = next(iter(candidates))
    rows: list[Row] = [
        {
            "name": name,
            "gb_per_second": size / statistics.median(wall[name]) / 1e9,
            "gb_per_cpu_second": size / statistics.median(cpu[name]) / 1e9,
            "ratio": statistics.median(a / b for a, b in zip(wall[first], wall[name], strict=True)),
            "cpu_ratio": statistics.median(
                a / b for a, b in zip(cpu[first], cpu[name], strict=True)
            ),
        }
        for name in candidates
    ]
    for row in rows:
        alone = row["name"].removesuffix(MEASURED)
        if alone != row["name"]:
            pairs = zip(wall[row["name"]], wall[alone], strict=True)
            row["times_encoding_alone"] = statistics.median(a / b for a, b in pairs)
    return rows


def codec_of(name: str) -> BlockCodec:
    with use_backend(name):
        return block_codec()


def own_candidates(x: torch.Tensor) -> Candidates:
    """memcpy and everything the codec does, by implementation; outputs are allocated before."""
    bits = x.view(torch.int16).numpy().view(np.uint16).reshape(-1, 32)
    half = x.half().view(torch.int16).numpy().view(np.uint16).reshape(-1, 32)
    floats = x.float().numpy().reshape(-1, 32)
    copy, copy32 = np.empty_like(bits), np.empty_like(floats)
    codes, scales = np.empty((len(bits), 16), np.uint8), np.empty(len(bits), np.uint8)
    candidates: Candidates = {"memcpy": lambda: np.copyto(copy, bits)}

    def encode(
        codec: BlockCodec, data: Any, dtype: str, options: CodecOptions, **more: Any
    ) -> None:
        codec.encode_blocks(data, dtype, options, codes, scales, **more)

    even = CodecOptions()
    for name in [f"c-{set_name}" for set_name in native.load().sets] + ["numpy"]:
        own = codec_of(name)
        runs: Candidates = {
            "encode": lambda c=own: encode(c, bits, "BF16", even),
            "encode" + MEASURED: lambda c=own: encode(c, bits, "BF16", even, statistics=True),
            "encode, search": lambda c=own: encode(c, bits, "BF16", SEARCH),
            "encode F16": lambda c=own: encode(c, half, "F16", even),
            "encode F32": lambda c=own: encode(c, floats, "F32", even),
            "decode": lambda c=own: c.decode_blocks(codes, scales, copy, "BF16"),
            "decode to F32": lambda c=own: c.decode_blocks(codes, scales, copy32, "F32"),
        }
        candidates |= {f"{name}: {what}": run for what, run in runs.items()}
    encode(codec_of("auto"), bits, "BF16", even)
    return candidates


def peer_candidates(x: torch.Tensor, peers: list[codec_peers.Peer]) -> Candidates:
    """Public entry points with fresh outputs, ours first."""

    def own(backend: str) -> mxfp4.MXTensor:
        with use_backend(backend):
            return mxfp4.quantize(x)

    candidates: Candidates = {"mxfp4": lambda: own("auto"), "mxfp4 (numpy)": lambda: own("numpy")}
    return candidates | {peer.name: lambda p=peer: p.run(x) for peer in peers}


def differing_bytes(x: torch.Tensor, peer: codec_peers.Peer) -> int:
    """Bytes of codes and scales that differ from ours under the producer's options."""
    codes, scales = peer.unpack(peer.run(x))
    o = peer.options
    ours = mxfp4.quantize(x, rule=o.rule, ties=o.ties, zero_sign=o.zero_sign)
    return int((ours.codes.numpy() != codes).sum() + (ours.scales.numpy() != scales).sum())


def extra_memory(name: str, mib: int) -> float | None:
    """Peak of resident memory above the start, outputs included, as a share of the source.

    Measured in a process of its own, so that no memory freed earlier is used again.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, __file__, "--mib", str(mib), "--memory-of", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def print_memory(name: str, mib: int) -> None:
    """What `extra_memory` runs: encode a little to load everything, then the whole source."""
    peers = codec_peers.installed()[0]
    peer_candidates(source(1), peers)[name]()
    x = source(mib)
    run = peer_candidates(x, peers)[name]
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = run()
    print((_status("VmHWM") - before) / x.nbytes)
    del result


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def start_up(rounds: int = 9) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds from starting Python until one block is encoded; medians."""
    script = (
        "import sys, numpy; from mxfp4.kernels.rows import encode_rows;"
        "encode_rows(numpy.ones((1, 32), 'u2'), 'BF16'); assert 'torch' not in sys.modules"
    )
    seconds = {"python with numpy": "import numpy", "first block encoded": script}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in seconds}
    for _ in range(rounds):
        for name, code in seconds.items():
            before, start = os.times(), time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            wall, after = time.perf_counter() - start, os.times()
            cpu = after.children_user - before.children_user
            cpu += after.children_system - before.children_system
            measured[name].append((wall, cpu))
    return {
        name: {
            "wall": statistics.median(wall for wall, _ in values),
            "cpu": statistics.median(cpu for _, cpu in values),
        }
        for name, values in measured.items()
    }


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), cpu)
    chosen = next(b.name for b in reversed(backends()) if b.chosen)
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "backend": chosen,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
    }


def show(title: str, rows: list[Row], ratio: str) -> None:
    print(f"\n{title}\n{'':34s} {'GB/s':>8s} {'GB/CPU-s':>9s} {ratio:>18s}")
    for row in rows:
        value = row["ratio"] if ratio == "over memcpy" else 1 / row["cpu_ratio"]
        times = row.get("times_encoding_alone")
        more = f"   {times:.2f} times encoding alone" if times else ""
        print(
            f"{row['name']:34s} {row['gb_per_second']:8.2f} {row['gb_per_cpu_second']:9.3f} "
            f"{value:18.3f}{more}"
        )


def show_costs(rows: list[Row]) -> None:
    print(f"\n{'':34s} {'extra memory / source':>22s} {'differing bytes':>16s}")
    for row in rows:
        memory = row["extra_memory"]
        amount = "not measured" if memory is None else f"{memory:.3f}"
        print(f"{row['name']:34s} {amount:>22s} {row.get('differing_bytes', '')!s:>16s}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--write", metavar="NAME", help="of the JSON and the chart in results/")
    parser.add_argument("--memory-of", metavar="NAME", help="only print the memory of one encoder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_of:
        print_memory(arguments.memory_of, arguments.mib)
        return
    x = source(arguments.mib)
    peers, versions, missing = codec_peers.installed()
    own = race(own_candidates(x), arguments.rounds, x.nbytes)
    show(f"{arguments.mib} MiB of BF16, one thread", own, "over memcpy")
    candidates = peer_candidates(x, peers)
    others = race(candidates, arguments.peer_rounds, x.nbytes)
    for row, peer in zip(others[2:], peers, strict=True):
        row["differing_bytes"] = differing_bytes(x[:512], peer)
    for row in others:
        row["extra_memory"] = extra_memory(row["name"], arguments.mib)
    show("public functions, fresh outputs", others, "mxfp4 is x faster")
    show_costs(others)
    started = start_up()
    print("\nseconds to start:", started)
    print("not installed:", missing or "none missing")
    result = {
        "operation": "codec",
        "machine": machine(),
        "peers": versions,
        "not_run": missing,
        "source": {"mib": arguments.mib, "dtype": "BF16", "shape": list(x.shape)},
        "rounds": {"codec": arguments.rounds, "peers": arguments.peer_rounds},
        "codec": own,
        "encoders": others,
        "start_up_seconds": started,
    }
    if arguments.write:
        write(result, arguments.write)


def write(result: dict[str, Any], name: str) -> None:
    """The JSON and the chart."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    bars = {"memcpy": result["codec"][0]["gb_per_cpu_second"]}
    bars |= {row["name"]: row["gb_per_cpu_second"] for row in result["encoders"]}
    chart = bar_chart("Encoding BF16 to MXFP4, GB of source per CPU-second, one thread", bars)
    (RESULTS / f"{name}.svg").write_text(chart)


if __name__ == "__main__":
    main()
