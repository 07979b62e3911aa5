"""Measure the Triton kernels on a GPU; needs no argument, and rehearses itself without a GPU.

In this order: environment and measured roofs (copy, bfloat16 product), a correctness sweep that
stops everything when it fails, then timings against torch's bfloat16 product, dequantizing before
it, `tl.dot_scaled`, torch's grouped product, and other people's kernels where they are installed.
What fails beside our own product is recorded and left out. Every result is written to the JSON file
as soon as it is there. `--quick` fits in six minutes on an H200. `mxfp4 bench report FILE` makes a
table and plots of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

REHEARSAL = not torch.cuda.is_available()
if REHEARSAL:
    os.environ["TRITON_INTERPRET"] = "1"

import triton
from kernel_peers import PEERS, Product

from mxfp4.codec import dequantize as dequantize_reference
from mxfp4.codec import quantize as quantize_reference
from mxfp4.kernels.triton import codec, product
from mxfp4.kernels.triton.configs import regime_of
from mxfp4.kernels.triton.device import describe, launch
from mxfp4.kernels.triton.grouped import fused_experts, grouped_matmul
from mxfp4.kernels.triton.layout import PackedWeight, pack
from mxfp4.kernels.triton.native_kernel import native_kernel
from mxfp4.kernels.triton.timing import copies_needed, measure
from mxfp4.spec import CodecOptions
from mxfp4.tensor import MXTensor

DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
RESULTS = Path(__file__).parent / "results"
FLOOR_SHARE = 1.05
PEER_TOLERANCE = 0.01
"""Relative Frobenius distance up to which a peer is said to compute the same."""

TINY_CHECKS = [(3, 33, 96), (1, 31, 160)]
CHECKS = [
    (tokens, *weight)
    for tokens in (1, 16, 17, 64, 129, 257)
    for weight in ((33, 96), (258, 2880), (512, 4096))
]
"""Tokens, rows and columns of the correctness sweep."""


@dataclass(frozen=True)
class Dense:
    """A linear layer of a real model."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Mixture:
    """A layer of experts of a real model; `inner` is the width between the two products."""

    name: str
    experts: int
    choices: int
    hidden: int
    inner: int


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    dense: tuple[Dense, ...]
    tokens: tuple[int, ...]
    mixtures: tuple[Mixture, ...]
    mixture_tokens: tuple[int, ...]
    codec_elements: int
    square: int
    repetitions: int


DENSE = (
    Dense("Llama-70B up", 28672, 8192),
    Dense("Llama-70B down", 8192, 28672),
    Dense("8192 square", 8192, 8192),
    Dense("Kimi-K2-like gate and up", 4096, 7168),
    Dense("gpt-oss-120b expert", 5760, 2880),
)
MIXTURES = (
    Mixture("gpt-oss-120b", 128, 4, 2880, 2880),
    Mixture("Kimi-K2-like", 384, 8, 7168, 2048),
)
FULL = Sizes(
    DENSE, (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096), MIXTURES, (1, 16, 64, 256, 1024, 4096),
    1 << 28, 8192, 12,
)  # fmt: skip
QUICK = Sizes(
    DENSE[:1] + DENSE[3:4], (1, 16, 64, 128, 512, 4096), MIXTURES, (16, 256, 1024), 1 << 27, 8192, 7
)
TINY = Sizes(
    (Dense("rehearsal", 160, 160),), (1, 40), (Mixture("rehearsal", 3, 2, 64, 64),), (5,),
    1 << 12, 64, 1,
)  # fmt: skip


class Record:
    """The JSON file, written anew after every entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, object] = {}

    def put(self, section: str, entry: object) -> None:
        found = self.data.setdefault(section, [])
        assert isinstance(found, list)
        found.append(entry)
        self.save()
        print(f"{section}: {json.dumps(entry)}", flush=True)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n")
        temporary.replace(self.path)


def environment() -> dict[str, object]:
    name = platform.processor() if REHEARSAL else torch.cuda.get_device_name()
    importable = {module for module, _ in PEERS.values()}
    return {
        "rehearsal": REHEARSAL,
        "device": name,
        "architecture": describe(DEVICE).architecture,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "importable": {
            name: importlib.util.find_spec(name) is not None for name in sorted(importable)
        },
    }


def timed(calls: Sequence[Callable[[], object]], sizes: Sizes) -> dict[str, float]:
    return asdict(measure(calls, repetitions=sizes.repetitions, device=DEVICE))


def roofs(sizes: Sizes, record: Record) -> tuple[float, float]:
    """Bytes per second of a copy and operations per second of a bfloat16 product."""
    source = torch.randn(sizes.codec_elements, device=DEVICE).bfloat16()
    target = torch.empty_like(source)
    copy = timed([lambda: target.copy_(source)], sizes)["median_us"]
    bandwidth = 2 * source.nbytes / copy * 1e6
    a = torch.randn(sizes.square, sizes.square, device=DEVICE).bfloat16()
    spent = timed([lambda: a @ a], sizes)["median_us"]
    operations = 2 * sizes.square**3 / spent * 1e6
    entry = {"copy_bytes_per_second": bandwidth, "bf16_operations_per_second": operations}
    record.put("roofs", entry)
    return bandwidth, operations


def correctness(record: Record) -> None:
    """Products against float64 at the rounding floor, and codecs byte by byte; raises if not."""
    shapes = TINY_CHECKS if REHEARSAL else CHECKS
    worst = 0.0
    for tokens, rows, columns in shapes:
        for dtype in (torch.bfloat16, torch.float16):
            w = quantize_reference(torch.randn(rows, columns, device=DEVICE) / 8)
            x = torch.randn(tokens, columns, device=DEVICE).to(dtype)
            y = product.matmul(x, pack(w, dtype=dtype))
            wanted = x.double() @ dequantize_reference(w, dtype=torch.float32).double().T
            floor = (wanted.to(dtype).double() - wanted).norm()
            share = float((y.double() - wanted).norm() / floor)
            worst = max(worst, share)
            if not share <= FLOOR_SHARE:
                raise SystemExit(f"wrong: {tokens}x{rows}x{columns} {dtype}: {share:.3f} of floor")
            assert torch.equal(y, product.matmul(x, pack(w, dtype=dtype)))
    one_hot()
    x = torch.randn(64, 320, device=DEVICE).bfloat16()
    ours, wanted_codes = codec.quantize(x), quantize_reference(x)
    assert torch.equal(ours.codes, wanted_codes.codes)
    assert torch.equal(ours.scales, wanted_codes.scales)
    assert torch.equal(codec.dequantize(ours), dequantize_reference(wanted_codes))
    record.put("correctness", {"worst_share_of_floor": worst, "products": len(shapes) * 2})


def one_hot() -> None:
    """Every code under the extreme scales comes out as it is: nothing flushes subnormals."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(1, 2)
    scales = torch.arange(32, dtype=torch.uint8, device=DEVICE).view(1, 32)
    w = MXTensor(codes, scales, (1, 1024))
    x = torch.zeros(16, 1024, device=DEVICE, dtype=torch.bfloat16)
    columns = torch.arange(16, device=DEVICE) * 61
    x[torch.arange(16, device=DEVICE), columns] = 1
    wanted = dequantize_reference(w)[0, columns]
    assert torch.equal(product.matmul(x, pack(w))[:, 0], wanted), "subnormals are lost"


def bench_dense(sizes: Sizes, record: Record, bandwidth: float, operations: float) -> None:
    for shape in sizes.dense:
        w = codec.quantize(torch.randn(shape.rows, shape.columns, device=DEVICE).bfloat16() / 8)
        packed = [pack(w)]
        packed += [clone(packed[0]) for _ in range(copies_needed(packed[0].nbytes, DEVICE) - 1)]
        plain = dequantize_reference(w)
        plains = [plain] + [plain.clone() for _ in range(copies_needed(plain.nbytes, DEVICE) - 1)]
        peers, failed = prepared_peers(w)
        if failed:
            record.put("peers", {"layer": shape.name, "errors": failed})
        for tokens in sizes.tokens:
            x = torch.randn(tokens, shape.columns, device=DEVICE).bfloat16()
            byte_count = packed[0].nbytes + x.nbytes + 2 * tokens * shape.rows
            multiplications = 2 * tokens * shape.rows * shape.columns
            floor = max(byte_count / bandwidth, multiplications / operations) * 1e6
            times, errors = dense_times(dense_calls(x, w, packed, plains, tokens), sizes)
            for name, product_of in peers.items():
                add_peer(name, product_of, x, packed[0], times, errors, sizes)
            ours = times["mxfp4"]["median_us"]
            entry = {
                "layer": shape.name,
                "rows": shape.rows,
                "columns": shape.columns,
                "tokens": tokens,
                "regime": regime_of(tokens).value,
                "times": times,
                "errors": errors,
                "over_bf16": times["bf16"]["median_us"] / ours,
                "share_of_roof": floor / ours,
            }
            record.put("dense", entry)


def dense_times(
    series: Iterable[tuple[str, list[Callable[[], object]]]], sizes: Sizes
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Times by name, and what went wrong by name; our own product and torch's must not."""
    times, errors = {}, {}
    for name, calls in series:
        try:
            times[name] = timed(calls, sizes)
        except Exception as error:  # whatever a baseline throws, the run goes on
            if name in ("mxfp4", "bf16"):
                raise
            errors[name] = short(error)
    return times, errors


def prepared_peers(
    w: MXTensor,
) -> tuple[dict[str, list[Product]], dict[str, str]]:
    """Products of the peers that are installed, one for each copy of the weight; and failures."""
    found, failed = {}, {}
    for name, (module, prepare) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            continue
        try:
            copies = copies_needed(w.codes.nbytes + w.scales.nbytes, DEVICE)
            found[name] = [prepare(w) for _ in range(copies)]
        except Exception as error:  # an import surface that changed, most likely
            failed[name] = short(error)
    return found, failed


def add_peer(
    name: str,
    products: list[Product],
    x: torch.Tensor,
    w: PackedWeight,
    times: dict[str, dict[str, float]],
    errors: dict[str, str],
    sizes: Sizes,
) -> None:
    """Time a peer if it computes what we compute."""
    try:
        wanted = product.matmul(x, w).float()
        difference = (products[0](x).reshape(wanted.shape).float() - wanted).norm()
        if not difference <= PEER_TOLERANCE * wanted.norm():
            raise ValueError(f"differs by {float(difference / wanted.norm()):.2g}")
        times[name] = timed([partial(p, x) for p in products], sizes)
    except Exception as error:  # as above
        errors[name] = short(error)


def short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:200]}"


def dense_calls(
    x: torch.Tensor,
    w: MXTensor,
    packed: list[PackedWeight],
    plains: list[torch.Tensor],
    tokens: int,
) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    yield "bf16", [partial(torch.matmul, x, p.T) for p in plains]
    scratch = 256 << 20
    yield "mxfp4", [partial(product.matmul, x, p, scratch_bytes=scratch) for p in packed]
    if tokens >= product.HYBRID_TOKENS:
        yield "mxfp4 fused", [partial(product.matmul, x, p) for p in packed]
    yield "dequantize then bf16", [lambda: x @ codec.decode(w.codes, w.scales, x.dtype).T]
    yield "dot_scaled", [lambda: dot_scaled(x, w)]


def dot_scaled(x: torch.Tensor, w: MXTensor) -> torch.Tensor:
    """The product as Triton offers it, in checkpoint order."""
    out = x.new_empty(x.shape[0], w.shape[0])
    tile = 16 if x.shape[0] <= 16 else 64 if x.shape[0] <= 64 else 128
    grid = (triton.cdiv(x.shape[0], tile), triton.cdiv(w.shape[0], 128))
    launch(
native_kernel, grid,
        x, w.scales, w.codes, w.scales, out, out, x.shape[0], w.shape[0], x.shape[1], x.stride(0),
        1, w.codes.stride(0), w.scales.stride(0), out.stride(0), X_FORMAT="bf16", TOKENS=tile,
        ROWS=128, DEPTH=128, FAST=True, EVEN_K=x.shape[1] % 128 == 0, HAS_BIAS=False,
        INTERP=REHEARSAL, num_warps=8 if tile == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


def bench_mixtures(sizes: Sizes, record: Record, bandwidth: float, operations: float) -> None:
    for layer in sizes.mixtures:
        w_in = random_bank(layer.experts, 2 * layer.inner, layer.hidden)
        w_out = random_bank(layer.experts, layer.hidden, layer.inner)
        packed_in, packed_out = pack(w_in), pack(w_out)
        plain_in = bank_values(w_in)
        for tokens in sizes.mixture_tokens:
            entry = mixture_entry(layer, tokens, packed_in, packed_out, plain_in, sizes)
            rows = tokens * layer.choices
            touched = min(1.0, expected_share(layer, tokens))
            byte_count = touched * packed_in.nbytes + 2 * rows * (layer.hidden + 2 * layer.inner)
            spent = 2 * rows * 2 * layer.inner * layer.hidden / operations
            floor = max(byte_count / bandwidth, spent) * 1e6
            ours = entry["times"]["mxfp4 grouped"]["median_us"]
            record.put("mixtures", {**entry, "share_of_roof": floor / ours})


def mixture_entry(
    layer: Mixture,
    tokens: int,
    packed_in: PackedWeight,
    packed_out: PackedWeight,
    plain_in: torch.Tensor,
    sizes: Sizes,
) -> dict[str, Any]:
    """Times of the first grouped product, against torch's, and of the whole fused layer."""
    x = torch.randn(tokens, layer.hidden, device=DEVICE).bfloat16()
    scores = torch.rand(tokens, layer.experts, device=DEVICE)
    weights, ids = torch.topk(scores, layer.choices)
    flat = ids.flatten().sort().values
    counts = torch.bincount(flat, minlength=layer.experts)
    ends = counts.cumsum(0).to(torch.int32)
    gathered = torch.randn(flat.numel(), layer.hidden, device=DEVICE).bfloat16()
    times = {
        "mxfp4 grouped": timed([lambda: grouped_matmul(gathered, packed_in, ends)], sizes),
        "mxfp4 layer": timed(
            [lambda: fused_experts(x, packed_in, packed_out, ids, weights)], sizes
        ),
    }
    transposed = plain_in.transpose(1, 2)
    errors = {}
    try:
        times["bf16 grouped"] = timed([lambda: grouped_mm(gathered, transposed, offs=ends)], sizes)
    except Exception as error:  # not every release and device has it
        errors["bf16 grouped"] = short(error)
    entry: dict[str, Any] = {**asdict(layer), "tokens": tokens, "times": times, "errors": errors}
    if "bf16 grouped" in times:
        ratio = times["bf16 grouped"]["median_us"] / times["mxfp4 grouped"]["median_us"]
        entry["over_bf16"] = ratio
    return entry


def grouped_mm(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """torch's own grouped product: x [T, K], w [E, K, N], ends of the groups int32 [E]."""
    public = getattr(torch.nn.functional, "grouped_mm", None)
    function = public or getattr(torch, "_grouped_mm")  # noqa: B009  (older releases)
    y: torch.Tensor = function(x, w, offs=offs)
    return y


def expected_share(layer: Mixture, tokens: int) -> float:
    """Share of the experts that see a token when routing is even."""
    return 1.0 - (1.0 - layer.choices / layer.experts) ** tokens


def random_bank(experts: int, rows: int, columns: int) -> MXTensor:
    """Random codes with plausible scales, made where they are needed."""
    codes = torch.randint(0, 256, (experts, rows, columns // 2), device=DEVICE, dtype=torch.uint8)
    scales = torch.randint(
        118, 122, (experts, rows, columns // 32), device=DEVICE, dtype=torch.uint8
    )
    return MXTensor(codes, scales, (experts, rows, columns))


def bank_values(w: MXTensor) -> torch.Tensor:
    return codec.decode(w.codes, w.scales, torch.bfloat16)


def bench_codec(sizes: Sizes, record: Record, bandwidth: float) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(sizes.codec_elements // 32, 32, device=DEVICE).to(dtype)
        codes, scales = codec.encode(x, CodecOptions())
        byte_count = x.nbytes + codes.nbytes + scales.nbytes
        for name, call in (
            ("quantize", partial(codec.encode, x, CodecOptions())),
            ("dequantize", partial(codec.decode, codes, scales, dtype)),
        ):
            spent = timed([call], sizes)
            share = byte_count / spent["median_us"] * 1e6 / bandwidth
            entry = {"operation": name, "dtype": str(dtype).removeprefix("torch.")}
            record.put("codec", {**entry, "times": {name: spent}, "share_of_copy": share})


def clone(w: PackedWeight) -> PackedWeight:
    return replace(w, words=w.words.clone(), scales=w.scales.clone())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes: six minutes on an H200")
    parser.add_argument("--out", type=Path, help="the JSON file")
    options = parser.parse_args()
    sizes = TINY if REHEARSAL else QUICK if options.quick else FULL
    facts = environment()
    name = str(facts["device"]).lower().replace(" ", "-")
    default = RESULTS / f"kernels-{'rehearsal' if REHEARSAL else name}.json"
    record = Record(options.out or default)
    record.data["environment"] = facts
    torch.manual_seed(0)
    if REHEARSAL:
        print("no GPU here: a rehearsal in the interpreter, its times mean nothing", flush=True)
    start = time.perf_counter()
    bandwidth, operations = roofs(sizes, record)
    correctness(record)
    bench_dense(sizes, record, bandwidth, operations)
    bench_mixtures(sizes, record, bandwidth, operations)
    bench_codec(sizes, record, bandwidth)
    record.data["seconds"] = round(time.perf_counter() - start, 1)
    record.save()
    print(f"done in {record.data['seconds']} s, {record.path}")


if __name__ == "__main__":
    main()
