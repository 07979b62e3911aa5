"""One page for people: what calibration did, and what routing became, as a heat map.

The page is a single HTML file with the map as inline SVG; it loads nothing.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxfp4.calibration.routers import METRICS

_TITLES = {
    "same_set": "same experts",
    "overlap": "experts shared",
    "same_first": "same first expert",
    "router_kl": "router KL (nats)",
    "load_shift": "load shift",
    "first_changed": "first changed here",
    "changed_clear": "changed, clear margin",
}
_HIGHER_IS_BETTER = frozenset({"same_set", "overlap", "same_first"})
_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _TOP = 104, 22, 70, 44
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .7rem; text-align: left }
th { border-bottom: 1px solid #999 } td { border-bottom: 1px solid #ddd }
.map { overflow-x: auto } code { overflow-wrap: anywhere }
"""


def page(calibration: Mapping[str, Any] | None, routing: Mapping[str, Any] | None) -> str:
    """The HTML page for the JSON of a calibration, of a router check, or of both."""
    parts = ["<h1>MXFP4 calibration</h1>"]
    if calibration is not None:
        parts.append(_calibration(calibration))
    if routing is not None:
        parts.append(_routing(routing))
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>MXFP4 calibration</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def heat_map(layers: Sequence[Mapping[str, Any]], metrics: Sequence[str] = METRICS) -> str:
    """SVG with one row per layer and one column per metric; each column has its own scale.

    A cell is the darker the further its value is from perfect, compared with the worst layer.
    """
    worst = {name: max((_distance(row, name) for row in layers), default=0.0) for name in metrics}
    width = _LEFT + _CELL_WIDTH * len(metrics)
    height = _TOP + _CELL_HEIGHT * len(layers)
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="11">',
        "<title>Routing by layer and metric</title>",
    ]
    for column, name in enumerate(metrics):
        x = _LEFT + column * _CELL_WIDTH + _CELL_WIDTH / 2
        pieces.append(_text(x, _TOP - 10, _TITLES.get(name, name), "middle"))
    for line, row in enumerate(layers):
        y = _TOP + line * _CELL_HEIGHT
        pieces.append(_text(_LEFT - 8, y + 15, f"layer {row['layer']}", "end"))
        for column, name in enumerate(metrics):
            share = _distance(row, name) / worst[name] if worst[name] else 0.0
            pieces.append(_cell(_LEFT + column * _CELL_WIDTH, y, share, _format(name, row[name])))
    return "".join([*pieces, "</svg>"])


def _distance(row: Mapping[str, Any], name: str) -> float:
    value = float(row[name])
    return 1 - value if name in _HIGHER_IS_BETTER else value


def _cell(x: float, y: float, share: float, text: str) -> str:
    """A rectangle from white to a dark red, with its value written in it."""
    red, other = 255 - round(75 * share), 250 - round(190 * share)
    ink = "#fff" if share > 0.65 else "#000"
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}" '
        f'fill="rgb({red},{other},{other})"/>'
        + _text(x + _CELL_WIDTH / 2, y + 15, text, "middle", ink)
    )


def _text(x: float, y: float, text: str, anchor: str, ink: str = "#000") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}">{html.escape(text)}</text>'
    )


def _format(name: str, value: float) -> str:
    return f"{value:.5f}" if name in ("router_kl", "load_shift") else f"{value:.2%}"


def _calibration(found: Mapping[str, Any]) -> str:
    summary, data, options = found["summary"], found["data"], found["options"]
    facts = [
        ("method", options["method"]),
        ("modules", f"{summary['modules']:,}"),
        ("tokens", f"{data['tokens']:,} in sequences of {data['sequence_length']:,}"),
        ("domains", ", ".join(data["domains"])),
        ("mean output error", f"{summary['mean_output_error']:.5f}"),
        ("the same without calibration", f"{summary['mean_output_error_even']:.5f}"),
        ("modules with few tokens", f"{len(summary['few_tokens']):,}"),
        ("of these written as without calibration", f"{len(summary['kept_even']):,}"),
    ]
    text = "<h2>Codes</h2>" + _rows(("", ""), facts)
    text += _refits(found["layers"])
    text += _names("Kept tensors that calibration changed", summary["changed_tensors"])
    text += _names("Written as without calibration", summary["kept_even"])
    return text + _names("Notes", summary["notes"])


def _routing(found: Mapping[str, Any]) -> str:
    summary = found["summary"]
    first = summary["first_divergence"]
    facts = [
        ("tokens", f"{found['tokens']:,}"),
        ("tokens with the same experts, mean over layers", f"{summary['same_set']:.2%}"),
        ("tokens with the same experts in all layers", f"{summary['never_changed']:.2%}"),
        ("router KL, mean over layers", f"{summary['router_kl']:.5f} nats"),
        (
            "first layer in which any token's experts differ",
            "none" if first is None else str(first),
        ),
        ("protected tensors", f"{summary['protected_tensors']:,}"),
        ("of these not byte for byte the source's", f"{len(summary['protected_changed']):,}"),
        ("routers re-fitted on request", f"{len(summary['routers_refitted']):,}"),
    ]
    text = "<h2>Routing</h2>" + _rows(("", ""), facts)
    text += f'<div class="map">{heat_map(found["layers"])}</div>'
    text += "<p>Each column is coloured on its own: white is perfect, dark is its worst layer.</p>"
    text += _names("Protected tensors that differ", summary["protected_changed"])
    hashes = [(name, entry["sha256"]) for name, entry in found["protected"].items()]
    return text + "<h2>Protected tensors</h2>" + _rows(("tensor", "SHA-256"), hashes)


def _refits(layers: Sequence[Mapping[str, Any]]) -> str:
    """How every router fared whose re-fit was asked for."""
    rows = [
        (
            name,
            f"{facts['same_experts']:.2%} → {facts['same_experts_refitted']:.2%}, "
            + ("re-fitted" if facts["refitted"] else "left as it was"),
        )
        for layer in layers
        for name, facts in layer.get("routers", {}).items()
    ]
    if not rows:
        return ""
    head = ("router", "held-out tokens with the source's experts, before and after a re-fit")
    return "<h3>Routers</h3>" + _rows(head, rows)


def _names(title: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    items = "".join(f"<li><code>{html.escape(name)}</code></li>" for name in names)
    return f"<h3>{html.escape(title)}</h3><ul>{items}</ul>"


def _rows(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    cell: Callable[[str], str] = html.escape
    lines = "".join(f"<tr><td>{cell(a)}</td><td>{cell(b)}</td></tr>" for a, b in rows)
    top = f"<tr><th>{cell(head[0])}</th><th>{cell(head[1])}</th></tr>" if any(head) else ""
    return f"<table>{top}{lines}</table>"
