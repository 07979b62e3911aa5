"""Tensor names as families: the same name with its numbers taken out.

`model.layers.3.mlp.experts.17.w1.weight` is member (3, 17) of the family
`model.layers.#.mlp.experts.#.w1.weight`. A checkpoint of half a million tensors has a few dozen
families, so everything that needs thought is done once per family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mxfp4.converters.roles import words
from mxfp4.errors import UnsupportedFormatError

_INDEX = re.compile(r"\.(\d+)(?=\.|$)")
_ANY_INDEX = re.compile(r"(?:(?<=\.)|(?<=\.expert_)|(?<=\.experts_))(\d+)(?=\.|$)")
_PARAMETER = re.compile(
    r"weight|bias|weight_\d+|(weight_)?(packed|scale|scale_inv|shape|zero_point|g_idx)"
    r"|input_scale|output_scale|[kv]_scale|qweight|qzeros|scales|lora_[AB]|weight_global_scale"
)
_PACKED_SUFFIX = re.compile(r"_(blocks|scales)$")


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A name pattern. `text` has `#` for every index; `segments` are its lower-cased parts.

    `layer_at` is the position of the layer index in `segments` (None outside a layer stack) and
    `layer_slot` tells which of the indices it is. `path` is the module below the layer (the whole
    module outside a stack), `parameter` the last part, "" for a bare parameter, `prefix` what comes
    before the layer index, and `stack` the same as one string.
    """

    text: str
    segments: tuple[str, ...]
    layer_at: int | None
    layer_slot: int | None
    path: tuple[str, ...]
    parameter: str
    prefix: tuple[str, ...]
    stack: str

    @property
    def leaf(self) -> str:
        """Last part of the module, without an index."""
        return next((part for part in reversed(self.path) if "#" not in part), "")

    @property
    def words(self) -> tuple[str, ...]:
        """The path without indices."""
        return tuple(part for part in self.path if part != "#")

    def slot_at(self, position: int) -> int:
        """Which of the indices stands at a position of the path."""
        start = 0 if self.layer_at is None else self.layer_at + 1
        return ".".join(self.segments[: start + position + 1]).count("#") - 1

    def text_until(self, length: int) -> str:
        """The family text up to so many parts of the path."""
        start = 0 if self.layer_at is None else self.layer_at + 1
        return ".".join(self.text.split(".")[: start + length])


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Family text and indices of a tensor or module name; `spell` is the inverse.

    Raises `UnsupportedFormatError` for a name with the character that stands for an index.
    """
    if "#" in name:
        raise UnsupportedFormatError("names with '#' are not supported", tensor=name)
    if "expert_" in name or "experts_" in name:
        parts = _ANY_INDEX.split(name)
        return "#".join(parts[::2]), tuple(parts[1::2])
    parts = _INDEX.split(name)
    return ".#".join(parts[::2]), tuple(parts[1::2])


def spell(family: str, members: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """The names of a family with the given indices."""
    template = family.replace("%", "%%").replace("#", "%s")
    for indices in members:
        yield template % indices


def parse_family(text: str) -> Family:
    """Cut a family text into prefix, layer, path and parameter."""
    segments = tuple(text.split("."))
    layer_at, layer_slot = _find_layer(segments)
    start = 0 if layer_at is None else layer_at + 1
    path, parameter = list(segments[start:]), ""
    if path and _PARAMETER.fullmatch(path[-1]):
        parameter = path.pop()
    elif path and (found := _PACKED_SUFFIX.search(path[-1])):
        path[-1], parameter = path[-1][: found.start()], found.group(1)
    lowered = tuple(part.lower() for part in path)
    prefix = tuple(part.lower() for part in segments[: layer_at or 0])
    lower = tuple(map(str.lower, segments))
    stack = ".".join(prefix)
    return Family(text, lower, layer_at, layer_slot, lowered, parameter, prefix, stack)


def _find_layer(segments: tuple[str, ...]) -> tuple[int | None, int | None]:
    slot = -1
    for position, segment in enumerate(segments):
        slot += "#" in segment
        if segment == "#" and _counts_layers(segments[position - 1].lower()):
            return position, slot
    return None, None


def _counts_layers(word: str) -> bool:
    return word in words.STACKS or words.STACK_ENDINGS.fullmatch(word) is not None
