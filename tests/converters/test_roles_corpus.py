"""Forty architectures whose roles and contraction axes were measured, not read off their names."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxfp4.converters.decide import Action, decide
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role, classify

CORPUS_FILE = Path(__file__).parents[1] / "data" / "architectures.json"
QUANTIZED = {"expert", "shared_expert", "mlp", "attention"}
PACKED = ("F8", "U8", "I8")
# What a level may take or leave: output gates, state-space and latent projections, MLA inputs.
NOT_SCORED = {"ssm_proj", "shortconv", "mla_a", "latent_moe", "packed_fp4", "scale"}
NEVER = {
    "router",
    "router_bias",
    "shared_expert_gate",
    "embedding",
    "lm_head",
    "norm",
    "bias",
    "conv",
    "ssm_small",
    "indexer",
    "mtp",
    "vision",
    "vision_projector",
    "other",
    "other_linear",
}


@functools.cache
def corpus():
    return json.loads(CORPUS_FILE.read_text())


def architectures():
    return list(corpus())


def tensors_of(entry):
    return [TensorInfo(t["name"], t["dtype"], tuple(t["shape"])) for t in entry["tensors"]]


def scored(truth):
    return (
        truth.get("sub") not in NOT_SCORED
        and truth["class"] != "attention_gate"
        and not truth["dtype"].startswith(PACKED)
    )


@pytest.mark.parametrize("name", architectures())
def test_action_at_level_linear(name):
    entry = corpus()[name]
    tensors = tensors_of(entry)
    decisions = decide(tensors, classify(tensors, entry["config"]), Recipe(level=Level.LINEAR))
    wrong = []
    for truth in entry["tensors"]:
        if scored(truth):
            wanted = (
                truth["class"] in QUANTIZED and truth["shape"][truth["contract_axis"]] % 32 == 0
            )
            if (decisions[truth["name"]].action is Action.QUANTIZE) != wanted:
                wrong.append((truth, decisions[truth["name"]].reason))
    assert not wrong


@pytest.mark.parametrize("config_known", [True, False], ids=["config", "no config"])
@pytest.mark.parametrize("name", architectures())
def test_role_and_axis_of_everything_that_multiplies(name, config_known):
    entry = corpus()[name]
    roles = classify(tensors_of(entry), entry["config"] if config_known else None)
    wrong = [
        (truth, roles[truth["name"]])
        for truth in entry["tensors"]
        if truth["class"] in QUANTIZED
        and (
            roles[truth["name"]].role != truth["class"]
            or roles[truth["name"]].axis != truth["contract_axis"]
        )
    ]
    assert not wrong


@pytest.mark.parametrize("name", architectures())
def test_role_of_everything_else(name):
    entry = corpus()[name]
    roles = classify(tensors_of(entry), entry["config"])
    wrong = []
    for truth in entry["tensors"]:
        role = roles[truth["name"]]
        # The corpus calls norms and scales of one prediction block by their own roles.
        seen = {str(role.role), str(role.inner)}
        if role.kind == "scale" or role.inner is Role.OTHER:
            seen.add("other")
        if truth["class"] not in seen:
            wrong.append((truth, role))
    assert not wrong


def test_nothing_is_unrecognised():
    for name, entry in corpus().items():
        roles = classify(tensors_of(entry), entry["config"])
        assert [n for n, role in roles.items() if not role.recognised] == [], name


@pytest.mark.parametrize("name", [n for n in architectures() if corpus()[n].get("in_memory")])
def test_names_and_shapes_after_loading(name):
    """Parameters as a loaded model holds them: fused experts, renamed blocks."""
    entry = corpus()[name]
    rows = entry["in_memory"]
    tensors = [TensorInfo(row[0], "BF16", tuple(row[1])) for row in rows]
    roles = classify(tensors, entry["config"])
    for parameter, shape, role, axis in rows:
        assert roles[parameter].role == role, (parameter, shape)
        if role in QUANTIZED:
            assert roles[parameter].axis == axis, (parameter, shape)


def test_packed_sources_keep_their_true_role_and_are_not_packed_again():
    entry = corpus()["deepseek_v4_official_fp4"]
    tensors = tensors_of(entry)
    decisions = decide(tensors, classify(tensors, entry["config"]), Recipe(level=Level.LINEAR))
    packed = [t for t in entry["tensors"] if t["dtype"] == "I8" and not t["name"].startswith("mtp")]
    assert packed
    for truth in packed:
        decision = decisions[truth["name"]]
        assert decision.action is Action.KEEP
        assert decision.role.role is Role.EXPERT
        assert "packed as I8" in decision.reason
        assert not decision.blocked


def test_every_never_role_is_kept_at_every_level():
    for name, entry in corpus().items():
        tensors = tensors_of(entry)
        roles = classify(tensors, entry["config"])
        for level in (Level.EXPERTS, Level.MOE, Level.LINEAR):
            decisions = decide(tensors, roles, Recipe(level=level))
            for truth in entry["tensors"]:
                if truth["class"] in NEVER:
                    decision = decisions[truth["name"]]
                    assert decision.action is Action.KEEP, (name, level, truth, decision)


def test_layers_and_experts_are_numbered():
    entry = corpus()["deepseek_v3"]
    roles = classify(tensors_of(entry), entry["config"])
    role = roles["model.layers.1.mlp.experts.5.up_proj.weight"]
    assert (role.layer, role.expert) == (1, 5)
    assert role.group == "model.layers.1.mlp.experts:experts"
    late = roles["model.layers.2.mlp.experts.5.up_proj.weight"]
    assert (late.role, late.inner, late.layer) == (Role.MTP, Role.EXPERT, 2)
    fused = {roles[f"model.layers.0.self_attn.{leaf}.weight"].group for leaf in MLA_INPUTS}
    assert fused == {"model.layers.0.self_attn:qkv_a"}


MLA_INPUTS = ("q_a_proj", "kv_a_proj_with_mqa")


def bank_of(architecture, name):
    entry = corpus()[architecture]
    bank = classify(tensors_of(entry), entry["config"])[name].bank
    assert bank is not None
    return bank


def test_banks_tell_how_to_cut_them():
    bank = bank_of("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj")
    assert bank.projections == ("gate_proj", "up_proj")
    assert (bank.expert_count, bank.output_axis, bank.arrangement) == (8, 2, "interleaved")
    parent = "language_model.model.layers.0.feed_forward.experts"
    bank = bank_of("llama4", f"{parent}.gate_up_proj")
    assert (bank.output_axis, bank.arrangement) == (2, "concatenated")
    assert bank_of("llama4", f"{parent}.down_proj").projections == ("down_proj",)
    parent = "model.layers.0.block_sparse_moe"
    bank = bank_of("granitemoe", f"{parent}.input_linear.weight")
    assert (bank.projections, bank.output_axis) == (("gate_proj", "up_proj"), 1)
    assert bank_of("granitemoe", f"{parent}.output_linear.weight").projections == ("down_proj",)


def test_the_result_depends_on_nothing_but_the_set_of_tensors():
    entry = corpus()["qwen3_5_moe"]
    tensors = tensors_of(entry)
    there = classify(tensors, entry["config"])
    back = classify(list(reversed(tensors)), entry["config"])
    assert there == back
    assert list(there) == [info.name for info in tensors]


def test_the_result_is_the_same_in_every_process():
    """Sets of strings iterate differently per process; no evidence may depend on it."""
    code = (
        "import json, sys; from mxfp4.converters.header import TensorInfo;"
        "from mxfp4.converters.roles import classify;"
        "d = json.load(open(sys.argv[1]));"
        "print([(n, str(r)) for a in d.values() for n, r in classify([TensorInfo(t['name'],"
        " t['dtype'], tuple(t['shape'])) for t in a['tensors']], a['config']).items()])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(CORPUS_FILE)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=CORPUS_FILE.parents[2],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
