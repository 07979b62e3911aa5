"""A bar chart with a logarithmic scale as SVG, readable on light and dark pages."""

from __future__ import annotations

import math
from html import escape

WIDTH, LEFT, RIGHT, TOP, STEP, BAR = 860, 190, 90, 56, 34, 22


def bar_chart(title: str, bars: dict[str, float]) -> str:
    """One bar a name, with its value beside it; the scale has decades marked."""
    low = math.floor(math.log10(min(bars.values())))
    high = math.ceil(math.log10(max(bars.values())))
    height = TOP + STEP * len(bars) + 34
    span = WIDTH - LEFT - RIGHT

    def position(value: float) -> float:
        return LEFT + span * (math.log10(value) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    for decade in range(low, high + 1):
        x = position(10.0**decade)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 30}" stroke="#d0d0d0"/>'
            f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle" fill="#555555">'
            f"{10.0**decade:g}</text>"
        )
    for i, (name, value) in enumerate(bars.items()):
        y = TOP + STEP * i
        fill = "#1f6feb" if name.startswith("mxfp4") else "#9aa4b2"
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{position(value) - LEFT:.1f}" height="{BAR}" '
            f'fill="{fill}"/>'
            f'<text x="{position(value) + 8:.1f}" y="{y + 16}">{value:.3g}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
