"""Numbers that the rules lean on: widths, layer and expert counts, from config or structure.

Configs spell the same number in many ways and may nest the text model; what no config says is
measured on the tensors, and `ModelFacts.sources` tells which of the two was used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_NESTED = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
    "llm",
    "text_model_config",
    "decoder",
    "decoder_config",
    "backbone_config",
)
_HIDDEN = ("hidden_size", "d_model", "n_embd", "n_embed", "dim", "hidden_dim", "model_dim")
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_decoder_layers")
_VOCAB = ("vocab_size", "padded_vocab_size", "n_vocab", "vocabulary_size")
_EXPERTS = re.compile(
    r"(moe_)?(num|n|number_of)_((routed|local|primary|moe|total|sparse)_)?experts"
    r"|moe_num_(primary_|routed_)?experts|num_experts_per_layer|(moe_)?expert_count"
    r"|ffn_num_experts|(num_)?moe_experts|(moe_)?expert_num|num_switch_experts"
)
_EXTRA = re.compile(
    r"(zero|null|skip|identity|copy|constant)_experts?_num|(moe_)?(num|n)_(zero|null|skip|copy)_experts?"
    r"|(moe_)?(num|n)_shared_experts?"
)
_LATENT = ("routed_expert_hidden_size", "moe_latent_size", "moe_hidden_size", "expert_hidden_size")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known about the text trunk; 0 or empty where nothing is known.

    `router_rows` are the row counts that a router may have: the experts, plus skip, zero or shared
    ones. `expert_widths` are the widths that experts read, widest first.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    layer_count: int
    expert_counts: frozenset[int]
    router_rows: frozenset[int]
    expert_widths: tuple[int, ...]
    encoder_decoder: bool


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text trunk: itself, or a nested one."""
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            found = text_config(inner)
            if _first_int(found, _HIDDEN):
                return found
    return config


def nests_text(config: Mapping[str, Any]) -> bool:
    """Whether the text model is one of several parts of the model."""
    return any(isinstance(config.get(key), Mapping) for key in _NESTED[:4])


def read_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Facts from a config; whatever it does not say stays empty."""
    text = text_config(config)
    layers = _first_int(text, _LAYERS) or len(_block_types(text))
    experts = frozenset(count for count in _all_ints(text, _EXPERTS) if count > 1)
    extras = [count for count in _all_ints(text, _EXTRA) if count > 0]
    sums = {base + extra for base in experts for extra in (0, 1, *extras, sum(extras))}
    hidden = _first_int(text, _HIDDEN)
    latent = sorted(
        {value for key in _LATENT if (value := _int(text.get(key)))} - {hidden}, reverse=True
    )
    return ModelFacts(
        model_type=str(text.get("model_type") or config.get("model_type") or ""),
        hidden_size=hidden,
        vocab_size=_first_int(text, _VOCAB) or _first_int(config, _VOCAB),
        layer_count=layers,
        expert_counts=experts,
        router_rows=frozenset(sums),
        expert_widths=(*((hidden,) if hidden else ()), *latent),
        encoder_decoder=bool(config.get("is_encoder_decoder")),
    )


def complete_facts(
    facts: ModelFacts | None,
    embedding_shapes: Iterable[tuple[int, ...]],
    norm_lengths: Iterable[int],
    container_counts: Iterable[int],
    bank_counts: Iterable[int],
) -> ModelFacts:
    """Fill what the config left open with the widest embedding, the commonest norm and the sizes
    of the expert containers."""
    tables = sorted(embedding_shapes, reverse=True)
    norms = Counter(norm_lengths).most_common(1)
    hidden = (tables[0][1] if tables else 0) or (norms[0][0] if norms else 0)
    counted = frozenset(count for count in (*container_counts, *bank_counts) if count > 1)
    if facts is None:
        facts = ModelFacts("", 0, 0, 0, frozenset(), frozenset(), (), encoder_decoder=False)
    experts = facts.expert_counts or counted
    width = facts.hidden_size or hidden
    return replace(
        facts,
        hidden_size=width,
        vocab_size=facts.vocab_size or (tables[0][0] if tables else 0),
        expert_counts=experts,
        router_rows=facts.router_rows or experts | {count + 1 for count in experts},
        expert_widths=facts.expert_widths or ((width,) if width else ()),
    )


def _block_types(text: Mapping[str, Any]) -> Any:
    for key in ("layers_block_type", "block_types", "hybrid_override_pattern", "layer_types"):
        value = text.get(key)
        if isinstance(value, (list, str)) and value:
            return value
    return ()


def _walk(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and "vision" not in key and "audio" not in key:
            yield from _walk(value)
        else:
            yield key, value


def _all_ints(config: Mapping[str, Any], pattern: re.Pattern[str]) -> set[int]:
    found: set[int] = set()
    for key, value in _walk(config):
        if pattern.fullmatch(key):
            values = value if isinstance(value, list) else [value]
            found.update(_int(item) for item in values)
    return found - {0}


def _first_int(config: Mapping[str, Any], keys: Iterable[str]) -> int:
    return next((number for key in keys if (number := _int(config.get(key)))), 0)


def _int(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
