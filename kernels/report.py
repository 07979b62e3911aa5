"""Turn the JSON of `benchmarks/bench_kernels.py` into a table of text and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mxfp4.errors import CorruptCheckpointError

WIDTH, HEIGHT, MARGIN = 720, 400, 60
COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#b7950b", "#34495e", "#d35400")


def load_results(path: Path) -> dict[str, Any]:
    """The content of a result file; `CorruptCheckpointError` if it is not one."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        found["environment"]["rehearsal"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"not a result of bench_kernels.py ({error!r})", file=str(path)
        ) from error
    return found


def table(results: Mapping[str, Any]) -> str:
    """All results as a Markdown table, under a line that says where they were measured."""
    facts = results["environment"]
    if facts["rehearsal"]:
        head = "Rehearsal in the interpreter: no GPU was measured, the times mean nothing."
    else:
        head = f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}"
    lines = [head, "", "| what | tokens | us | over bf16 | of roof |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in _rows(results)]
    return "\n".join(lines)


def plot(results: Mapping[str, Any]) -> str:
    """An SVG of the speed over bfloat16 against the number of tokens, one line for each layer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for section, name in (("dense", "layer"), ("mixtures", "name")):
        for entry in results.get(section, []):
            if "over_bf16" in entry:
                point = entry["tokens"], entry["over_bf16"]
                lines.setdefault(entry[name], []).append(point)
    title = "speed over bfloat16 by tokens"
    if results["environment"]["rehearsal"]:
        title += " (rehearsal: meaningless)"
    return _svg(title, lines)


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for entry in results.get("dense", []):
        what = f"{entry['layer']} {entry['rows']}x{entry['columns']}"
        yield _row(what, entry, "mxfp4")
    for entry in results.get("mixtures", []):
        yield _row(f"{entry['name']}, {entry['experts']} experts", entry, "mxfp4 grouped")
    for entry in results.get("codec", []):
        spent = entry["times"][entry["operation"]]["median_us"]
        what = f"{entry['operation']} {entry['dtype']}"
        yield what, "", f"{spent:.1f}", "", f"{entry['share_of_copy']:.0%}"


def _row(what: str, entry: Mapping[str, Any], name: str) -> tuple[str, ...]:
    ratio = f"{entry['over_bf16']:.2f}x" if "over_bf16" in entry else ""
    spent = entry["times"][name]["median_us"]
    return what, str(entry["tokens"]), f"{spent:.1f}", ratio, f"{entry['share_of_roof']:.0%}"


def _svg(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    points = [point for line in lines.values() for point in line]
    most_x = max((math.log2(x) for x, _ in points), default=1.0) or 1.0
    most_y = max((y for _, y in points), default=1.0) * 1.1

    def place(x: float, y: float) -> str:
        across = MARGIN + math.log2(x) / most_x * (WIDTH - 2 * MARGIN)
        return f"{across:.1f},{HEIGHT - MARGIN - y / most_y * (HEIGHT - 2 * MARGIN):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{title}</text>',
    ]
    for y in range(math.ceil(most_y)):
        left, right = place(1, y), place(2**most_x, y)
        parts.append(f'<polyline points="{left} {right}" stroke="#ddd" fill="none"/>')
        parts.append(f'<text x="{MARGIN - 24}" y="{left.split(",")[1]}">{y}x</text>')
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{place(x, 0).split(",")[0]}" y="{HEIGHT - MARGIN + 18}">{x}</text>')
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(place(x, y) for x, y in sorted(line))
        parts.append(f'<polyline points="{path}" stroke="{colour}" fill="none" stroke-width="2"/>')
        parts.append(
            f'<text x="{WIDTH - 240}" y="{44 + 16 * number}" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
