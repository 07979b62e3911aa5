"""The generated ignore list: exact both ways, free of prefixes, short, and the same for engines
that match beginnings and for engines that match whole names."""

import functools
import json
import re
from pathlib import Path

import pytest

from mxfp4.converters.decide import decide
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.ignore import (
    check_ignore,
    expert_modules,
    ignore_patterns,
    modules_by_action,
)
from mxfp4.converters.ignore_check import Matcher, NameSet
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role, classify
from mxfp4.errors import RecipeError

CORPUS_FILE = Path(__file__).parents[1] / "data" / "architectures.json"


@functools.cache
def corpus():
    return json.loads(CORPUS_FILE.read_text())


def modules(name, recipe):
    entry = corpus()[name]
    tensors = [TensorInfo(t["name"], t["dtype"], tuple(t["shape"])) for t in entry["tensors"]]
    return modules_by_action(decide(tensors, classify(tensors, entry["config"]), recipe))


def hits(patterns, name, how=re.match):
    return any(how(pattern.removeprefix("re:"), name) for pattern in patterns)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("name", list(corpus()))
def test_every_module_is_on_its_side_by_brute_force(name, level):
    quantized, kept = modules(name, Recipe(level=level))
    patterns = ignore_patterns(quantized, kept)
    for how in (re.match, re.fullmatch):
        for prefix in ("", "language_model.", "model."):
            assert not [m for m in quantized if hits(patterns, prefix + m, how)]
            assert not [m for m in kept if not hits(patterns, prefix + m, how)]
    assert all(re.match(r"re:\.\*\\b.*\$$", pattern) for pattern in patterns)
    assert len(patterns) <= 50
    assert patterns == sorted(set(patterns))


def test_a_router_that_is_a_bare_parameter_is_listed():
    shapes = {
        "model.layers.0.mlp.gate.weight": (8, 128),
        "model.layers.0.mlp.gate_weight": (8, 128),
        "model.layers.0.mlp.experts.gate_up_proj": (8, 384, 128),
        "model.layers.0.mlp.experts.down_proj": (8, 128, 192),
        "lm_head.weight": (512, 128),
    }
    tensors = [TensorInfo(name, "BF16", shape) for name, shape in shapes.items()]
    config = {"hidden_size": 128, "num_experts": 8, "num_hidden_layers": 1, "vocab_size": 512}
    quantized, kept = modules_by_action(decide(tensors, classify(tensors, config), Recipe()))
    assert len(quantized) == 3 * 8
    assert "model.layers.0.mlp.experts.7.up_proj" in quantized
    patterns = ignore_patterns(quantized, kept)
    assert r"re:.*\bmlp\.gate$" in patterns
    assert r"re:.*\bmlp\.gate_weight$" in patterns
    assert r"re:.*\blm_head$" in patterns


def test_prediction_blocks_are_listed_under_every_spelling():
    names = {
        "deepseek_v3": "model.layers.2.mlp.experts.0.up_proj",
        "qwen3_next": "mtp.layers.0.mlp.experts.0.up_proj",
        "mimo_v2_flash": "model.mtp.layers.0.mlp.up_proj",
    }
    for name, module in names.items():
        quantized, kept = modules(name, Recipe(level=Level.LINEAR))
        assert kept[module].role is Role.MTP
        patterns = ignore_patterns(quantized, kept)
        tail = module.split("layers.")[1].split(".", 1)[1]
        for spelling in ("mtp.layers.0.", "model.mtp.layers.0.", "mtp.0.", "model.layers.2."):
            assert hits(patterns, spelling + tail), (name, spelling)


def test_no_container_is_named_alone():
    quantized, kept = modules("qwen3_next", Recipe(level=Level.EXPERTS))
    patterns = ignore_patterns(quantized, kept)
    parents = {"linear_attn", "self_attn", "mlp", "model.layers.0", "model"}
    assert not [p for p in patterns for parent in parents if p == rf"re:.*\b{parent}$"]
    assert not hits(patterns, "model.layers.0.linear_attn", re.fullmatch)


def test_fusions_of_engines_are_listed_with_their_parts_and_never_for_quantized_ones():
    quantized, kept = modules("qwen3_5_moe", Recipe(level=Level.LINEAR))
    patterns = ignore_patterns(quantized, kept)
    base = "model.language_model.layers.0.linear_attn"
    assert hits(patterns, f"{base}.in_proj_ba")
    assert not hits(patterns, f"{base}.in_proj_qkvz")
    assert not hits(patterns, "model.language_model.layers.1.self_attn.qkv_proj")
    quantized, kept = modules("qwen3_5_moe", Recipe(level=Level.EXPERTS))
    patterns = ignore_patterns(quantized, kept)
    assert hits(patterns, f"{base}.in_proj_qkvz")
    assert hits(patterns, "model.language_model.layers.1.self_attn.qkv_proj")
    assert not hits(patterns, "model.language_model.layers.1.mlp.experts.3.gate_up_proj")


def test_layers_that_differ_are_spelled_out():
    recipe = Recipe(level=Level.LINEAR, keep=("model.layers.1.self_attn.*",))
    quantized, kept = modules("qwen3", recipe)
    patterns = ignore_patterns(quantized, kept)
    assert hits(patterns, "model.layers.1.self_attn.q_proj")
    assert not hits(patterns, "model.layers.0.self_attn.q_proj")
    assert not hits(patterns, "model.layers.11.self_attn.q_proj")
    assert r"re:.*\blayers\.1\.self_attn\.q_proj$" in patterns


def test_towers_are_one_pattern():
    quantized, kept = modules("qwen3_vl", Recipe(level=Level.LINEAR))
    patterns = ignore_patterns(quantized, kept)
    assert [p for p in patterns if "visual" in p] == [r"re:.*\bvisual\..*$"]
    quantized, kept = modules("llava", Recipe(level=Level.LINEAR))
    patterns = ignore_patterns(quantized, kept)
    assert r"re:.*\bvision_tower\..*$" in patterns
    assert r"re:.*\bmulti_modal_projector\..*$" in patterns


def test_check_sees_both_kinds_of_error():
    quantized = ["model.layers.0.mlp.experts.0.gate_proj"]
    kept = ["model.layers.0.mlp.gate", "lm_head"]
    check_ignore([r"re:.*\bmlp\.gate$", r"re:.*\blm_head$"], quantized, kept)
    check_ignore(["model.layers.0.mlp.gate", "lm_head"], quantized, kept)
    with pytest.raises(RecipeError, match="no ignore pattern hits it"):
        check_ignore([r"re:.*\blm_head$"], quantized, kept)
    with pytest.raises(RecipeError, match="stored packed"):
        check_ignore(["re:.*gate.*", "lm_head"], quantized, kept)
    with pytest.raises(RecipeError, match="only the beginning"):
        check_ignore(["re:.*mlp.gate", "lm_head"], ["model.layers.0.mlp.gate_proj"], kept)


def test_the_short_proof_equals_the_long_one():
    """Numbers that a pattern mentions are told apart, digit runs inside longer ones are not."""
    names = [f"model.layers.{layer}.mlp.gate" for layer in range(130)]
    for numbers in ("1", "(?:1|11|111)", r"\d+", "(?:0|129)"):
        pattern = rf"re:.*\blayers\.{numbers}\.mlp\.gate$"
        wanted = {name for name in names if re.fullmatch(pattern[3:], name)}
        check_ignore([pattern], set(names) - wanted, wanted)
        matcher = Matcher([pattern])
        assert matcher.mentioned is not None
        if len(wanted) < len(names):
            stray = next(iter(set(names) - wanted))
            with pytest.raises(RecipeError):
                check_ignore([pattern], set(names) - wanted - {stray}, wanted | {stray})
    free = Matcher(["re:.*layers.[0-4]+.mlp.gate$"])
    assert free.mentioned is None
    assert len(list(NameSet(names).representatives(free))) == len(names)


def test_indistinguishable_sides_are_an_error():
    role = modules("qwen3", Recipe())[1]["lm_head"]
    with pytest.raises(RecipeError):
        ignore_patterns(["lm_head"], {"lm_head": role})


def test_expert_modules_cover_projections_and_experts():
    entry = corpus()["gpt_oss"]
    tensors = [TensorInfo(t["name"], t["dtype"], tuple(t["shape"])) for t in entry["tensors"]]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bank = classify(tensors, entry["config"])[name].bank
    assert bank is not None
    found = list(expert_modules(name, bank))
    assert found[:2] == [f"model.layers.0.mlp.experts.0.{leaf}_proj" for leaf in ("gate", "up")]
    assert len(found) == 16


def test_names_with_odd_characters_survive():
    role = modules("qwen3", Recipe())[1]["lm_head"]
    kept = {"model.layers.0.a-b+c%d.proj": role, "model.layers.0.x(1).proj": role}
    patterns = ignore_patterns(["model.layers.0.mlp.proj"], kept)
    assert hits(patterns, "model.layers.5.a-b+c%d.proj")
    assert not hits(patterns, "model.layers.0.mlp.proj")
