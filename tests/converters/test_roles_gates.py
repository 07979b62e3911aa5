"""One row per gate-like name: the same word is a router, a projection or an output gate."""

import pytest

from mxfp4.converters.decide import Action, decide
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role, classify
from mxfp4.errors import UnsupportedFormatError

HIDDEN, INNER, EXPERTS = 128, 192, 8
CONFIG = {
    "model_type": "toy",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_experts": EXPERTS,
}
SURROUNDINGS = [
    ("model.embed_tokens.weight", (512, HIDDEN)),
    ("model.layers.0.input_layernorm.weight", (HIDDEN,)),
    *(
        (f"model.layers.0.mlp.experts.{expert}.{leaf}.weight", shape)
        for expert in range(EXPERTS)
        for leaf, shape in (
            ("gate_proj", (INNER, HIDDEN)),
            ("up_proj", (INNER, HIDDEN)),
            ("down_proj", (HIDDEN, INNER)),
        )
    ),
    *((f"model.layers.0.self_attn.{leaf}_proj.weight", (HIDDEN, HIDDEN)) for leaf in "qkvo"),
]
QUANTIZE, KEEP = Action.QUANTIZE, Action.KEEP

TABLE = [
    # name below the layer, shape, role, action at level linear
    ("mlp.gate.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.gate.weight", (EXPERTS + 1, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.gate.weight", (17, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.gate.wg.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.gate.weight_1", (HIDDEN, EXPERTS), Role.ROUTER, KEEP),
    ("mlp.gate.gate_network.0.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.gate.weight_noise.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.gate.down_proj.weight", (64, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.gate.router_mlp.fc1.weight", (64, 64), Role.ROUTER, KEEP),
    ("mlp.gate.e_score_correction_bias", (EXPERTS,), Role.ROUTER_BIAS, KEEP),
    ("mlp.gate.bias", (EXPERTS,), Role.ROUTER_BIAS, KEEP),
    ("mlp.gate.expert_bias", (EXPERTS,), Role.ROUTER_BIAS, KEEP),
    ("mlp.gate_weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.router.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.router.layer.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.router.classifier.weight", (EXPERTS + 4, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.router.gate.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.router.proj.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.router_gate.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.primary_router.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.an_unheard_of_name.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("gate.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("router.weight", (EXPERTS, HIDDEN), Role.ROUTER, KEEP),
    ("mlp.shared_expert_gate.weight", (1, HIDDEN), Role.SHARED_EXPERT_GATE, KEEP),
    ("mlp.gate_proj.weight", (INNER, HIDDEN), Role.MLP, QUANTIZE),
    ("mlp.gate_up_proj.weight", (2 * INNER, HIDDEN), Role.MLP, QUANTIZE),
    ("feed_forward.gate_proj.weight", (INNER, HIDDEN), Role.MLP, QUANTIZE),
    ("mlp.experts.0.gate_proj.weight", (INNER, HIDDEN), Role.EXPERT, QUANTIZE),
    ("mlp.experts.gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN), Role.EXPERT, QUANTIZE),
    ("mlp.shared_expert.gate_proj.weight", (INNER, HIDDEN), Role.SHARED_EXPERT, QUANTIZE),
    ("self_attn.gate_proj.weight", (HIDDEN, HIDDEN), Role.ATTENTION_GATE, KEEP),
    ("self_attn.g_proj.weight", (HIDDEN, HIDDEN), Role.ATTENTION_GATE, KEEP),
    ("self_attn.g_proj.weight", (4, HIDDEN), Role.ATTENTION_GATE, KEEP),
    ("self_attn.output_gate.weight", (HIDDEN, HIDDEN), Role.ATTENTION_GATE, KEEP),
    ("self_attn.gate.weight", (HIDDEN, HIDDEN), Role.ATTENTION_GATE, KEEP),
    ("self_attn.gate_norm.weight", (HIDDEN,), Role.NORM, KEEP),
    ("mlp.gate_norm.weight", (HIDDEN,), Role.NORM, KEEP),
    ("per_layer_input_gate.weight", (32, HIDDEN), Role.OTHER_LINEAR, KEEP),
    ("altup.modality_router.weight", (4, HIDDEN), Role.OTHER_LINEAR, KEEP),
    ("mlp_res_proj.weight", (1, HIDDEN), Role.OTHER_LINEAR, KEEP),
    ("self_attn.f_a_proj.weight", (32, HIDDEN), Role.SSM_SMALL, KEEP),
    ("self_attn.b_proj.weight", (32, HIDDEN), Role.SSM_SMALL, KEEP),
    ("self_attn.index_q_proj.weight", (HIDDEN, HIDDEN), Role.INDEXER, KEEP),
    ("self_attn.indexer.wq_b.weight", (HIDDEN, HIDDEN), Role.INDEXER, KEEP),
    ("mlp.routed_expert_down_proj.weight", (64, HIDDEN), Role.OTHER_LINEAR, KEEP),
    ("mlp.fc1_latent_proj.weight", (64, HIDDEN), Role.OTHER_LINEAR, KEEP),
    ("mlp.unheard_of.weight", (INNER, HIDDEN), Role.OTHER_LINEAR, KEEP),
]


@pytest.mark.parametrize(
    ("name", "shape", "role", "action"), TABLE, ids=[f"{row[0]}-{row[1][0]}" for row in TABLE]
)
def test_truth_table(name, shape, role, action):
    full = "model.layers.0." + name
    others = [TensorInfo(n, "BF16", s) for n, s in SURROUNDINGS if n != full]
    tensors = [*others, TensorInfo(full, "BF16", shape)]
    roles = classify(tensors, CONFIG)
    assert roles[full].role is role, roles[full].evidence
    assert decide(tensors, roles, Recipe(level=Level.LINEAR))[full].action is action


def test_a_bare_gate_inside_experts_is_a_projection_only_with_its_twin():
    def tensors(leaves):
        yield TensorInfo("model.layers.0.block_sparse_moe.primary_router.weight", "BF16", (8, 128))
        for expert in range(EXPERTS):
            for leaf, shape in leaves.items():
                name = f"model.layers.0.block_sparse_moe.experts.{expert}.{leaf}.weight"
                yield TensorInfo(name, "BF16", shape)

    gated = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    roles = classify(list(tensors(gated)), CONFIG)
    assert sum(role.role is Role.EXPERT for role in roles.values()) == 3 * EXPERTS
    lone = {"gate": (64, HIDDEN), "w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
    roles = classify(list(tensors(lone)), CONFIG)
    gates = [role for name, role in roles.items() if name.endswith(".gate.weight")]
    assert {role.role for role in gates} == {Role.OTHER_LINEAR}
    assert not any(role.recognised for role in gates)


def test_a_router_word_is_found_without_any_config():
    tensors = [TensorInfo(name, "BF16", shape) for name, shape in SURROUNDINGS]
    for spelling in ("gate", "router", "gate.wg", "router.classifier", "made_up"):
        name = f"model.layers.0.mlp.{spelling}.weight"
        roles = classify([*tensors, TensorInfo(name, "BF16", (EXPERTS, HIDDEN))], None)
        assert roles[name].role is Role.ROUTER


def test_strange_names_do_not_break_the_rules():
    names = ["", "weight", "bias", "0", "layers.0", "layers.0.weight", "a.b.", ".", "..", "x.0.1.2"]
    names += ["layers.0.experts", "experts.0", "experts.weight", "model.layers.00.mlp.gate.weight"]
    for shape in ((), (0,), (8,), (8, 128), (8, 128, 128), (1, 1, 1, 1)):
        roles = classify([TensorInfo(name, "BF16", shape) for name in names], CONFIG)
        assert list(roles) == names
        assert all(role.evidence for role in roles.values())
    with pytest.raises(UnsupportedFormatError):
        classify([TensorInfo("a.#.b", "BF16", (8,))], CONFIG)


@pytest.mark.parametrize(
    "config", [{}, {"text_config": {}}, {"num_experts": "8"}, {"num_hidden_layers": None}]
)
def test_configs_that_say_nothing_are_like_none(config):
    tensors = [TensorInfo(name, "BF16", shape) for name, shape in SURROUNDINGS]
    there = {name: (role.role, role.axis) for name, role in classify(tensors, config).items()}
    none = {name: (role.role, role.axis) for name, role in classify(tensors, None).items()}
    assert there == none


@pytest.mark.parametrize(("layers", "late"), [(3, 1), (5, 3), (30, 0)])
def test_a_few_layers_past_the_count_predict_many_do_not(layers, late):
    tensors = [
        TensorInfo(f"model.layers.{layer}.mlp.up_proj.weight", "BF16", (INNER, HIDDEN))
        for layer in range(layers)
    ]
    roles = classify(tensors, CONFIG)
    assert sum(role.role is Role.MTP for role in roles.values()) == late
