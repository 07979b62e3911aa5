"""Measure every calibration method on packed checkpoints read back, beside other tools.

    python benchmarks/bench_calibration.py tokens   --text CORPUS --work WORK --smollm2 MODEL
    python benchmarks/bench_calibration.py calibrate --text ... [--model moe] [--method gptq]
    python benchmarks/bench_calibration.py evaluate  --text ... [--peers FOLDER]
    python benchmarks/bench_calibration.py table

CORPUS is made by `calibration_corpus.py`, MODEL by `smollm2_checkpoint.py`, the outputs of other
tools by `calibration_peers.py` in PEERS/<model>-<tool>-<seed>, on the tokens that `tokens` saved.
Calibration text and evaluation text are different documents; a seed decides which documents of the
calibration text are drawn. Rows go to `results/calibration.jsonl`, the table to
`results/calibration.md`. CPU seconds are of the whole process and count all of its threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxfp4.calibration.calibrate import CalibrationOptions, calibrate
from mxfp4.calibration.compare import compare_all, figures
from mxfp4.calibration.methods import MethodOptions
from mxfp4.calibration.routers import check_routers
from mxfp4.calibration.samples import SampleOptions, Samples, load_tokenizer, read_samples
from mxfp4.converters.convert import RunOptions
from mxfp4.converters.recipe import Level, Recipe

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "calibration.jsonl"
SEEDS = (0, 1, 2)
EVALUATION_SEED = 100
LINEAR = Recipe(level=Level.LINEAR)
CHOICES = "What the defaults were chosen on, and what did not help: `calibration_choices.md`.\n"


@dataclass(frozen=True)
class Model:
    """One model under test with the text it gets."""

    name: str
    weights: int
    """Quantized weights, for costs per million."""
    domains: tuple[str, ...]
    tokens: int
    length: int
    evaluation_tokens: int
    few_tokens: tuple[int, ...] = ()
    routed: bool = False


MODELS: Mapping[str, Model] = {
    "smollm2": Model(
        "smollm2",
        106_168_320,
        ("handbook_en", "foldoc", "pydocs", "kjv", "gcide", "code", "jargon", "fortunes"),
        8_192,
        512,
        8_192,
    ),
    "moe": Model(
        "moe",
        6_488_064,
        (
            *("code", "foldoc", "fortunes", "gcide", "gitdocs", "handbook_de"),
            *("handbook_en", "handbook_es", "handbook_fr", "jargon", "kjv", "pydocs"),
        ),
        24_576,
        256,
        24_576,
        (512, 1_024),
        routed=True,
    ),
}
METHODS: Mapping[str, MethodOptions] = {
    "even": MethodOptions("even"),
    "search": MethodOptions("search"),
    "gptq": MethodOptions("gptq"),
    "gptq+": MethodOptions("gptq+"),
    "even-refit": MethodOptions("even", refit_routers=True),
    "gptq-refit": MethodOptions("gptq", refit_routers=True),
    "gptq+-refit": MethodOptions("gptq+", refit_routers=True),
    "gptq-plain": MethodOptions(
        "gptq",
        damping_low=0.01,
        expert_damping_low=0.01,
        damping_high=0.01,
        doubt_high=0.0,
        pseudo_tokens=0.0,
        pseudo_tokens_plenty=0.0,
        guard_tokens_per_column=0.0,
    ),
}
"""`-refit` also re-fits routers; `gptq-plain` is GPTQ without what protects against few tokens."""
ROUTED_METHODS = frozenset(name for name, options in METHODS.items() if options.refit_routers)


@dataclass(frozen=True)
class Bench:
    """Where things are."""

    text: Path
    work: Path
    smollm2: Path
    peers: Path | None

    def folder(self, model: Model) -> Path:
        """The source checkpoint."""
        return self.smollm2 if model.name == "smollm2" else ROOT / "examples" / "tiny-moe"

    def samples(self, model: Model, part: str, tokens: int, seed: int) -> Samples:
        """Text of one part, "calibration" or "evaluation"."""
        files = [self.text / f"{domain}.{part}.txt" for domain in model.domains]
        tokenizer = load_tokenizer(self.folder(model))
        return read_samples(files, tokenizer, SampleOptions(tokens, model.length, seed))

    def output(self, model: Model, method: str, tokens: int, seed: int) -> Path:
        """Where a calibrated checkpoint goes."""
        return self.work / f"{model.name}-{method}-{tokens}-{seed}"

    def peer_outputs(self, model: Model) -> Iterator[tuple[str, int, Path]]:
        """(tool, seed, folder) of what other tools wrote."""
        for info in sorted(self.peers.glob(f"{model.name}-*/peer.json")) if self.peers else ():
            facts = json.loads(info.read_text())
            seed = int(info.parent.name.rpartition("-")[2])
            (config,) = info.parent.rglob("config.json")
            yield facts["method"], seed, config.parent


def save_tokens(bench: Bench) -> None:
    for model in MODELS.values():
        for seed in SEEDS:
            samples = bench.samples(model, "calibration", model.tokens, seed)
            torch.save(samples.tokens, bench.work / f"tokens-{model.name}-{seed}.pt")


def run_calibrations(
    bench: Bench, models: Sequence[str], methods: Sequence[str], wanted: Sequence[int]
) -> None:
    for model in (MODELS[name] for name in models):
        for tokens in (model.tokens, *model.few_tokens):
            for method in methods:
                if method == "even" and tokens != model.tokens:
                    continue  # it does not look at tokens
                if method in ROUTED_METHODS and not model.routed:
                    continue
                for seed in SEEDS[:1] if method == "even" else wanted:
                    calibrate_one(bench, model, method, tokens, seed)


def calibrate_one(bench: Bench, model: Model, method: str, tokens: int, seed: int) -> None:
    output = bench.output(model, method, tokens, seed)
    if (output / "bench.json").exists():
        return
    samples = bench.samples(model, "calibration", tokens, seed)
    start = time.process_time()
    report = calibrate(
        bench.folder(model),
        output,
        samples,
        LINEAR,
        CalibrationOptions(METHODS[method]),
        run=RunOptions(overwrite=True),
    )
    row = {
        "cpu_seconds": round(time.process_time() - start, 1),
        "few_tokens_modules": len(report.to_json()["summary"]["few_tokens"]),
        "kept_even_modules": len(report.to_json()["summary"]["kept_even"]),
    }
    (output / "bench.json").write_text(json.dumps(row))
    print(output.name, row, flush=True)


def evaluate(bench: Bench, models: Sequence[str]) -> None:
    RESULTS.mkdir(exist_ok=True)
    known = {(r["model"], r["method"], r["tokens"], r["seed"]) for r in read_rows()}
    for model in (MODELS[name] for name in models):
        found: dict[tuple[str, int, int], Path] = {}
        for path in sorted(bench.work.glob(f"{model.name}-*/bench.json")):
            method, tokens, seed = path.parent.name.removeprefix(f"{model.name}-").rsplit("-", 2)
            found[method, int(tokens), int(seed)] = path.parent
        for tool, seed, folder in bench.peer_outputs(model):
            found[tool, model.tokens, seed] = folder
        todo = {key: folder for key, folder in found.items() if (model.name, *key) not in known}
        evaluate_some(bench, model, todo)


def evaluate_some(bench: Bench, model: Model, todo: Mapping[tuple[str, int, int], Path]) -> None:
    if not todo:
        return
    samples = bench.samples(model, "evaluation", model.evaluation_tokens, EVALUATION_SEED)
    source = bench.folder(model)
    results = compare_all(source, list(todo.values()), samples)
    for ((method, tokens, seed), folder), found in zip(todo.items(), results, strict=True):
        figures_here = figures(list(found.sequences))
        row: dict[str, Any] = {
            **{"model": model.name, "method": method, "tokens": tokens, "seed": seed},
            "kl": figures_here["kl"],
            "kl_interval": figures_here["kl_interval"],
            "top1": figures_here["top1"],
            "perplexity": figures_here["perplexity_second"],
            "perplexity_source": figures_here["perplexity_first"],
            **costs(folder, model),
        }
        if model.routed:
            routing = check_routers(source, folder, samples).to_json()["summary"]
            row["same_experts"] = routing["same_set"]
            row["router_kl"] = routing["router_kl"]
            row["protected_changed"] = len(routing["protected_changed"])
        with open(ROWS, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def costs(folder: Path, model: Model) -> dict[str, float]:
    """CPU seconds of a run, and per million quantized weights."""
    for path in (folder / "bench.json", folder / "peer.json", folder.parent / "peer.json"):
        if path.exists():
            seconds = float(json.loads(path.read_text())["cpu_seconds"])
            return {
                "cpu_seconds": seconds,
                "cpu_seconds_per_million": round(seconds / model.weights * 1e6, 2),
            }
    return {}


def read_rows() -> list[dict[str, Any]]:
    if not ROWS.exists():
        return []
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean, and half of the range over seeds."""
    middle = statistics.fmean(values)
    return f"{middle:.{digits}f} ± {(max(values) - min(values)) / 2:.{digits}f}"


def table() -> str:
    """Markdown of all rows: means over seeds, ratios to `even` seed by seed."""
    rows = read_rows()
    text = ["# Calibration\n", "Made by `benchmarks/bench_calibration.py`; see there.\n", CHOICES]
    for model in MODELS.values():
        here = [row for row in rows if row["model"] == model.name]
        even = next((row["kl"] for row in here if row["method"] == "even"), None)
        if even is None:
            continue
        text.append(f"## {model.name}\n")
        text.append("| method | tokens | seeds | KL (nats) | KL / even | same top token | ")
        text[-1] += "same experts | CPU s | CPU s / million weights |"
        text.append("|" + " --- |" * 9)
        groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in here:
            groups.setdefault((row["method"], row["tokens"]), []).append(row)
        for (method, tokens), found in sorted(groups.items(), key=lambda g: (-g[0][1], g[0][0])):
            experts = [r["same_experts"] for r in found if "same_experts" in r]
            seconds = [r["cpu_seconds"] for r in found if "cpu_seconds" in r]
            cells = [
                *(method, f"{tokens:,}", str(len(found))),
                spread([r["kl"] for r in found], 5),
                spread([r["kl"] / even for r in found], 3),
                f"{statistics.fmean(r['top1'] for r in found):.2%}",
                f"{statistics.fmean(experts):.2%}" if experts else "",
                f"{statistics.fmean(seconds):.0f}" if seconds else "",
                f"{statistics.fmean(seconds) / model.weights * 1e6:.2f}" if seconds else "",
            ]
            text.append("| " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("step", choices=["tokens", "calibrate", "evaluate", "table"])
    parser.add_argument("--text", type=Path, default=Path())
    parser.add_argument("--work", type=Path, default=Path())
    parser.add_argument("--smollm2", type=Path, default=Path())
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--model", action="append", choices=sorted(MODELS))
    parser.add_argument("--method", action="append", choices=sorted(METHODS))
    parser.add_argument("--seed", action="append", type=int, choices=SEEDS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options.text, options.work, options.smollm2, options.peers)
    models = options.model or list(MODELS)
    if options.step == "tokens":
        save_tokens(bench)
    elif options.step == "calibrate":
        run_calibrations(bench, models, options.method or list(METHODS), options.seed or SEEDS)
    elif options.step == "evaluate":
        evaluate(bench, models)
    else:
        (RESULTS / "calibration.md").write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main()
