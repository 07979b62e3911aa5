"""Decisions: levels, patterns, fusion groups, and what is refused."""

import pytest

from mxfp4.converters.decide import Action, Decision, decide, default_level
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role, classify
from mxfp4.errors import RecipeError

H, INNER, EXPERTS, VOCAB = 128, 192, 4, 512
CONFIG = {
    "model_type": "toy",
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_experts": EXPERTS,
    "vocab_size": VOCAB,
}


def model(inner=INNER, dtype="BF16"):
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, H),
        "lm_head.weight": (VOCAB, H),
    }
    for layer in range(2):
        base = f"model.layers.{layer}"
        shapes[f"{base}.input_layernorm.weight"] = (H,)
        for leaf in "qkvo":
            shapes[f"{base}.self_attn.{leaf}_proj.weight"] = (H, H)
        shapes[f"{base}.self_attn.q_proj.bias"] = (H,)
        shapes[f"{base}.self_attn.g_proj.weight"] = (H, H)
        shapes[f"{base}.mlp.gate.weight"] = (EXPERTS, H)
        for owner in (*(f"experts.{e}" for e in range(EXPERTS)), "shared_expert"):
            shapes[f"{base}.mlp.{owner}.gate_proj.weight"] = (inner, H)
            shapes[f"{base}.mlp.{owner}.up_proj.weight"] = (inner, H)
            shapes[f"{base}.mlp.{owner}.down_proj.weight"] = (H, inner)
        shapes[f"{base}.mlp.latent_in_proj.weight"] = (64, H)
    shapes["model.layers.1.something_new.weight"] = (H, H)
    return [TensorInfo(name, dtype, shape) for name, shape in shapes.items()]


def decisions(recipe, **kwargs):
    tensors = model(**kwargs)
    return decide(tensors, classify(tensors, CONFIG), recipe)


def quantized(found):
    return {name for name, decision in found.items() if decision.action is Action.QUANTIZE}


def roles_at(level):
    found = decisions(Recipe(level=level))
    return {str(found[name].role.role) for name in quantized(found)}


def test_each_level_adds_its_roles():
    assert roles_at(Level.EXPERTS) == {"expert"}
    assert roles_at(Level.MOE) == {"expert", "shared_expert"}
    assert roles_at(Level.LINEAR) == {"expert", "shared_expert", "attention"}
    everything = {"expert", "shared_expert", "attention", "attention_gate", "other_linear"}
    assert roles_at(Level.ALL) == everything


def test_unknown_names_are_kept_at_every_level_and_say_so():
    for level in Level:
        decision = decisions(Recipe(level=level))["model.layers.1.something_new.weight"]
        assert decision.action is Action.KEEP
        assert not decision.role.recognised
        assert decision.reason.startswith("not recognised")


def test_the_default_level_follows_the_model():
    tensors = model()
    roles = classify(tensors, CONFIG)
    assert default_level(roles) is Level.EXPERTS
    dense = [info for info in tensors if ".experts." not in info.name]
    assert default_level(classify(dense, {**CONFIG, "num_experts": 0})) is Level.LINEAR
    assert quantized(decisions(Recipe())) == quantized(decisions(Recipe(level=Level.EXPERTS)))


def test_every_decision_has_its_role_and_a_reason():
    found = decisions(Recipe(level=Level.LINEAR))
    assert [info.name for info in model()] == list(found)
    assert all(isinstance(decision, Decision) and decision.reason for decision in found.values())


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.self_attn.o_proj.weight",
        "*layers.0.self_attn.o_*",
        r"re:.*layers\.0\.self_attn\.o_proj",
    ],
)
def test_exact_names_globs_and_expressions_mean_the_same(pattern):
    everything = quantized(decisions(Recipe(level=Level.LINEAR)))
    rest = quantized(decisions(Recipe(level=Level.LINEAR, keep=(pattern,))))
    assert everything - rest == {"model.layers.0.self_attn.o_proj.weight"}


def test_keeping_one_of_a_fusion_group_keeps_the_group():
    recipe = Recipe(level=Level.LINEAR, keep=("model.layers.0.self_attn.k_proj",))
    found = decisions(recipe)
    for leaf in "qkv":
        assert found[f"model.layers.0.self_attn.{leaf}_proj.weight"].action is Action.KEEP
        assert found[f"model.layers.1.self_attn.{leaf}_proj.weight"].action is Action.QUANTIZE
    assert "k_proj" in found["model.layers.0.self_attn.q_proj.weight"].reason
    assert found["model.layers.0.self_attn.o_proj.weight"].action is Action.QUANTIZE


def test_one_kept_expert_keeps_the_experts_of_its_layer():
    found = decisions(Recipe(keep=("model.layers.0.mlp.experts.2.down_proj",)))
    layers = {found[name].role.layer for name in quantized(found)}
    assert layers == {1}


def test_keep_wins_over_quantize():
    recipe = Recipe(
        level=Level.EXPERTS, keep=("*layers.0.self_attn.*",), quantize=("*.self_attn.[qkvo]_proj",)
    )
    found = decisions(recipe)
    assert found["model.layers.0.self_attn.o_proj.weight"].action is Action.KEEP
    assert found["model.layers.1.self_attn.o_proj.weight"].action is Action.QUANTIZE
    assert found["model.layers.1.self_attn.q_proj.bias"].action is Action.KEEP


def test_asking_for_a_part_of_a_fusion_group_is_refused():
    with pytest.raises(RecipeError, match="fuse") as caught:
        decisions(Recipe(level=Level.EXPERTS, quantize=("model.layers.0.self_attn.q_proj.weight",)))
    assert "whole group" in caught.value.hint


@pytest.mark.parametrize("origin", ["keep", "quantize"])
@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("model.layers.0.self_attn.q_pro", "model.layers.0.self_attn.q_proj"),
        ("model.layers.7.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("*.block_sparse_moe.experts.*", "experts"),
        ("re:layers.0.self_attn.q_proj", "q_proj"),
        ("model.layers.0.self_attn", "write model.layers.0.self_attn.*"),
    ],
)
def test_a_pattern_without_a_hit_names_its_neighbours(origin, pattern, hint):
    with pytest.raises(RecipeError, match="matches 0 tensors") as caught:
        decisions(Recipe.from_mapping({origin: [pattern]}))
    assert origin in caught.value.message
    assert hint in caught.value.hint


def test_a_broken_expression_is_a_recipe_error():
    with pytest.raises(RecipeError, match="no regular expression"):
        decisions(Recipe(keep=("re:(",)))


@pytest.mark.parametrize(
    ("pattern", "role"),
    [
        ("*.mlp.gate", Role.ROUTER),
        ("*.mlp.*", Role.ROUTER),
        ("lm_head", Role.LM_HEAD),
        ("*embed*", Role.EMBEDDING),
        ("*norm", Role.NORM),
    ],
)
def test_protected_roles_are_refused_until_spelled_out(pattern, role):
    with pytest.raises(RecipeError, match=f"would quantize a {role}") as caught:
        decisions(Recipe(quantize=(pattern,)))
    assert f"--force-role {role}=quantize" in caught.value.hint
    assert caught.value.tensor


def test_a_forced_role_is_quantized():
    recipe = Recipe(quantize=("lm_head",), force_roles=frozenset({Role.LM_HEAD}))
    assert "lm_head.weight" in quantized(decisions(recipe))
    forced = quantized(decisions(Recipe(force_roles=frozenset({Role.ROUTER}))))
    assert "model.layers.0.mlp.gate.weight" in forced


def test_forcing_a_prediction_block_spares_its_router_and_norms():
    shapes = {
        "mtp.layers.0.mlp.gate_proj.weight": (INNER, H),
        "mtp.layers.0.mlp.up_proj.weight": (INNER, H),
        "mtp.layers.0.mlp.gate.weight": (EXPERTS, H),
        "mtp.layers.0.embed_tokens.weight": (VOCAB, H),
    }
    tensors = [TensorInfo(name, "BF16", shape) for name, shape in shapes.items()]
    recipe = Recipe(force_roles=frozenset({Role.MTP}))
    found = decide(tensors, classify(tensors, CONFIG), recipe)
    assert quantized(found) == set(list(shapes)[:2])


def test_an_odd_contraction_length_blocks_and_names_itself():
    found = decisions(Recipe(level=Level.LINEAR), inner=200)
    blocked = {name for name, decision in found.items() if decision.blocked}
    assert blocked == {
        f"model.layers.{layer}.mlp.{owner}.down_proj.weight"
        for layer in range(2)
        for owner in (*(f"experts.{e}" for e in range(EXPERTS)), "shared_expert")
    }
    assert all("200 along axis 1" in found[name].reason for name in blocked)
    expert = found["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert expert.action is Action.KEEP
    assert not expert.blocked
    assert found["model.layers.0.mlp.shared_expert.up_proj.weight"].action is Action.QUANTIZE


def test_what_is_kept_on_purpose_is_not_blocked():
    recipe = Recipe(level=Level.LINEAR, keep=("*.experts.*", "*.shared_expert.*"))
    found = decisions(recipe, inner=200)
    assert not any(decision.blocked for decision in found.values())


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "I8"])
def test_packed_tensors_are_kept_with_their_role(dtype):
    found = decisions(Recipe(level=Level.LINEAR), dtype=dtype)
    assert not quantized(found)
    decision = found["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert decision.role.role is Role.EXPERT
    assert f"stored packed as {dtype}" in decision.reason


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_floats_are_quantized(dtype):
    assert quantized(decisions(Recipe(), dtype=dtype))


def test_a_gate_follows_the_projection_it_is_fused_with():
    base = "model.layers.0.linear_attn"
    shapes = {
        f"{base}.in_proj_qkv.weight": (256, H),
        f"{base}.in_proj_z.weight": (H, H),
        f"{base}.in_proj_a.weight": (4, H),
        f"{base}.in_proj_b.weight": (4, H),
        f"{base}.conv1d.weight": (256, 1, 4),
        f"{base}.out_proj.weight": (H, H),
    }
    tensors = [TensorInfo(name, "BF16", shape) for name, shape in shapes.items()]
    found = decide(tensors, classify(tensors, CONFIG), Recipe(level=Level.LINEAR))
    assert quantized(found) == {
        f"{base}.{leaf}.weight" for leaf in ("in_proj_qkv", "in_proj_z", "out_proj")
    }
    kept = decide(tensors, classify(tensors, CONFIG), Recipe(level=Level.MOE))
    assert not quantized(kept)


def test_prediction_blocks_are_kept_but_can_be_asked_for():
    tensors = [*model(), TensorInfo("mtp.layers.0.mlp.up_proj.weight", "BF16", (INNER, H))]
    tensors.append(TensorInfo("mtp.layers.0.mlp.gate_proj.weight", "BF16", (INNER, H)))
    tensors.append(TensorInfo("mtp.layers.0.mlp.gate.weight", "BF16", (EXPERTS, H)))
    roles = classify(tensors, CONFIG)
    for level in Level:
        found = decide(tensors, roles, Recipe(level=level))
        assert not any(name.startswith("mtp") for name in quantized(found))
    found = decide(tensors, roles, Recipe(quantize=("mtp.*_proj",)))
    assert {n for n in quantized(found) if n.startswith("mtp")} == {
        "mtp.layers.0.mlp.up_proj.weight",
        "mtp.layers.0.mlp.gate_proj.weight",
    }
    with pytest.raises(RecipeError, match="would quantize a router"):
        decide(tensors, roles, Recipe(quantize=("mtp.*",)))


def test_a_stacked_square_bank_without_any_clue_is_blocked_not_guessed():
    tensors = [
        TensorInfo(f"model.layers.0.mlp.experts.{leaf}", "BF16", (EXPERTS, H, H))
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    found = decide(tensors, classify(tensors, CONFIG), Recipe())
    assert not quantized(found)
    assert all(decision.blocked for decision in found.values())
    assert all("axis is unknown" in decision.reason for decision in found.values())


def test_flattened_experts_count_their_own_rows():
    def flattened(inner):
        shapes = {
            "transformer.blocks.0.ffn.router.layer.weight": (EXPERTS, H),
            **{
                f"transformer.blocks.0.ffn.experts.mlp.{leaf}": (EXPERTS * inner, H)
                for leaf in ("w1", "v1", "w2")
            },
        }
        tensors = [TensorInfo(name, "BF16", shape) for name, shape in shapes.items()]
        return decide(tensors, classify(tensors, CONFIG), Recipe())

    fine = flattened(96)["transformer.blocks.0.ffn.experts.mlp.w2"]
    assert (fine.action, fine.role.axis) == (Action.QUANTIZE, 0)
    assert fine.role.contraction_length((EXPERTS * 96, H)) == 96
    # 4 * 72 rows are a multiple of 32, but a block would cross from one expert into the next.
    odd = flattened(72)["transformer.blocks.0.ffn.experts.mlp.w2"]
    assert (odd.action, odd.blocked) == (Action.KEEP, True)
