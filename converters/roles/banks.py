"""Stacked experts: on which axis a bank is summed, decided once per block for all its tensors.

A bank reads width H and writes width H through I hidden units. Stored as `[E, N, K]` the "in"
tensor is `[E, I or 2I, H]` and the "out" tensor `[E, H, I]`; stored as `[E, K, N]` they are
`[E, H, I or 2I]` and `[E, I, H]`. One tensor alone may look like either, the pair rarely does.
"""

from __future__ import annotations

from dataclasses import dataclass

from mxfp4.converters.roles import words
from mxfp4.converters.roles.facts import ModelFacts
from mxfp4.converters.roles.scenes import Path, Scene, Shape
from mxfp4.converters.roles.types import Arrangement, ExpertBank

INTERLEAVED = (("gpt_oss", "gate_up_proj"), ("inkling", "w13"))
"""Beginnings of model types, and the leaf whose rows alternate; shapes do not tell."""

INPUT_MAJOR_MODELS = ("gpt_oss", "openai_privacy_filter", "llama4", "aria", "openmoe")
"""Model types that store `[E, K, N]`, asked only when every width is equal."""


@dataclass(frozen=True, slots=True)
class BankLayout:
    """`input_major` is True for `[E, K, N]`, None if nothing decides; `fused` if N holds two."""

    input_major: bool | None
    fused: bool
    evidence: str


def bank_layout(scene: Scene, container: Path, facts: ModelFacts) -> BankLayout:
    """Compare the tensors that enter the experts with those that leave them.

    Where a bank alone does not tell, another bank of the same layer with the same words does.
    """
    layout = _own_layout(scene, container, facts)
    if layout.input_major is not None:
        return layout
    for other, leaves in scene.leaves.items():
        if other != container and leaves & scene.leaves.get(container, set()):
            found = _own_layout(scene, other, facts)
            if found.input_major is not None:
                text = f"{layout.evidence}; stored like '{'.'.join(other)}': {found.evidence}"
                return BankLayout(found.input_major, layout.fused, text)
    return layout


def _own_layout(scene: Scene, container: Path, facts: ModelFacts) -> BankLayout:
    inside: dict[str, Shape] = {}
    outside: dict[str, Shape] = {}
    for leaf, shape in scene.matrices_under(container).items():
        if len(shape) == 3 and not words.ROUTER.fullmatch(leaf):
            stem = words.stem(leaf)
            if words.FFN_OUT.fullmatch(stem) and not words.FFN_IN.fullmatch(stem):
                outside[leaf] = shape
            elif words.FFN_IN.fullmatch(stem):
                inside[leaf] = shape
    if "linear_v" in inside and "linear_1" in inside:
        outside["linear_1"] = inside.pop("linear_1")
    widths = _widths(scene, container, facts)
    for name, (_, a, b) in inside.items():
        for _, c, d in outside.values():
            standard = b == c and a in (d, 2 * d)
            swapped = a == d and b in (c, 2 * c)
            if standard != swapped:
                fused = a == 2 * d if standard else b == 2 * c
                order = "[E, N, K]" if standard else "[E, K, N]"
                return BankLayout(swapped, fused, f"{name} against its counterpart gives {order}")
            if standard and swapped:
                return _by_width(a, b, widths, facts)
    return _alone(inside, outside, widths, facts)


def _alone(
    inside: dict[str, Shape], outside: dict[str, Shape], widths: tuple[int, ...], facts: ModelFacts
) -> BankLayout:
    for name, (_, a, b) in inside.items():
        layout = _by_width(a, b, widths, facts)
        return BankLayout(layout.input_major, words.stem(name) in words.FUSED_IN, layout.evidence)
    for _, c, d in outside.values():
        return _by_width(d, c, widths, facts)
    return BankLayout(None, False, "no projection of this bank has a name that tells its direction")


def _by_width(a: int, b: int, widths: tuple[int, ...], facts: ModelFacts) -> BankLayout:
    for width in widths:
        if (a == width) != (b == width):
            order = "[E, K, N]" if a == width else "[E, N, K]"
            return BankLayout(a == width, False, f"the experts' input width {width} gives {order}")
    if facts.model_type.startswith(INPUT_MAJOR_MODELS):
        return BankLayout(True, False, f"all widths are equal; {facts.model_type} stores [E, K, N]")
    return BankLayout(None, False, f"[{a}, {b}] fits both orders and no width decides")


def _widths(scene: Scene, container: Path, facts: ModelFacts) -> tuple[int, ...]:
    """Latent widths count only where the block really has projections into them."""
    block = container[:-1]
    latent = any(words.LATENT.fullmatch(leaf) for leaf in scene.leaves.get(block, ()))
    widths = list(facts.expert_widths[1:] if latent else facts.expert_widths[:1])
    widths += facts.expert_widths
    for path, shape in scene.weights.items():
        if words.ROUTER.fullmatch(path[-1]) and len(shape) == 2 and path[:-1] == block:
            widths.append(shape[1])
    return tuple(widths)


def stacked_bank(leaf: str, shape: Shape, layout: BankLayout, facts: ModelFacts) -> ExpertBank:
    """The bank of one rank-3 tensor `[E, ., .]` under a decided layout."""
    projections, arrangement = projections_of(leaf, layout.fused, facts)
    return ExpertBank(
        expert_count=shape[0],
        output_axis=2 if layout.input_major else 1,
        projections=projections,
        arrangement=arrangement,
    )


def projections_of(
    leaf: str, fused: bool, facts: ModelFacts
) -> tuple[tuple[str, ...], Arrangement]:
    """What lies along N: one projection, or two and in which order."""
    stem = words.stem(leaf)
    if not fused or words.FFN_OUT.fullmatch(stem):
        return (("down_proj",) if stem == "output_linear" else (stem,)), "single"
    interleaved = any(
        facts.model_type.startswith(model) and stem == name for model, name in INTERLEAVED
    )
    pair = words.FUSED_IN.get(stem, ("gate_proj", "up_proj"))
    return pair, "interleaved" if interleaved else "concatenated"


def flattened_bank(
    scene: Scene, path: Path, shape: Shape, facts: ModelFacts
) -> tuple[int, ExpertBank] | None:
    """Axis and bank of experts stored below each other without an index, else None.

    `[E*I, H]` is summed over its columns on the way in, and over its rows on the way out if it
    has the shape of the way in, or half of it; `[E*H, I]` is summed over its columns. None, too, if
    the name does not tell the way.
    """
    leaf = path[-1]
    into = words.FFN_IN.fullmatch(leaf)
    down = bool(words.FFN_OUT.fullmatch(leaf)) and not into
    if not into and not down:
        return None
    inward = [
        other
        for name, other in scene.matrices_under(path[:-1]).items()
        if words.FFN_IN.fullmatch(name) and name != leaf and len(other) == 2
    ]
    for count in sorted(facts.expert_counts, reverse=True):
        if shape[0] % count or shape[0] == count:
            continue
        wide = shape[1] in facts.expert_widths
        tall = any(shape[0] == count * k and n == count * shape[1] for n, k in inward)
        if wide or (down and tall):
            alike = any(n == shape[1] and k in (shape[0], 2 * shape[0]) for k, n in inward)
            axis = 0 if down and alike else 1
            return axis, ExpertBank(count, 1 - axis, (leaf,), "single", flattened=True)
    return None
