"""Named settings for one published model: what its loaders insist on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mxfp4.converters.recipe import Level


@dataclass(frozen=True, slots=True)
class Preset:
    """Level, shard layout and format together; `summary` says why."""

    name: str
    summary: str
    level: Level
    layout: str
    format: str


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "kimi-k3",
            "routed experts only, the source's tensor and shard names, config in text_config: its "
            "loaders take every other module for unquantized, whatever the config says",
            Level.EXPERTS,
            "same",
            "compressed-tensors",
        ),
    )
}
"""Every preset by its command-line name."""
