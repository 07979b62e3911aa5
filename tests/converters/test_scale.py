"""Planning a 2.8T-parameter checkpoint needs headers and little memory."""

import json
import resource

import pytest

LAYERS, EXPERTS, HIDDEN, INTER = 60, 1_053, 7_168, 2_048
SHARDS = 1_122
PARAMETERS = 2.78e12


def huge(folder, builder):
    """190,395 tensors over 1,122 sparse shards with true headers."""
    tensors = {"model.embed_tokens.weight": ("BF16", (163_840, HIDDEN))}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for expert in range(EXPERTS):
            name = f"{base}mlp.experts.{expert}."
            tensors[name + "gate_proj.weight"] = ("BF16", (INTER, HIDDEN))
            tensors[name + "up_proj.weight"] = ("BF16", (INTER, HIDDEN))
            tensors[name + "down_proj.weight"] = ("BF16", (HIDDEN, INTER))
        for projection in "qkvo":
            tensors[f"{base}self_attn.{projection}_proj.weight"] = ("BF16", (HIDDEN, HIDDEN))
        tensors[base + "mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
        tensors[base + "mlp.gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
        tensors[base + "input_layernorm.weight"] = ("BF16", (HIDDEN,))
        tensors[base + "post_attention_layernorm.weight"] = ("BF16", (HIDDEN,))
        for leaf in ("q_norm", "k_norm", "q_proj.bias", "k_proj.bias", "v_proj.bias", "sinks"):
            tensors[f"{base}self_attn.{leaf}"] = ("BF16", (HIDDEN,))
        if layer < 12:
            tensors[base + "self_attn.o_proj.bias"] = ("BF16", (HIDDEN,))
    tensors["model.norm.weight"] = ("BF16", (HIDDEN,))
    tensors["lm_head.weight"] = ("BF16", (163_840, HIDDEN))
    folder.mkdir()
    names = list(tensors)
    edges = [round(i * len(names) / SHARDS) for i in range(SHARDS + 1)]
    weight_map = {}
    for number in range(SHARDS):
        held = names[edges[number] : edges[number + 1]]
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        builder.sparse(folder / file, {name: tensors[name] for name in held})
        weight_map.update(dict.fromkeys(held, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = builder.moe_config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTER,
        num_experts=EXPERTS,
        num_hidden_layers=LAYERS,
        vocab_size=163_840,
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder, len(tensors)


@pytest.fixture(scope="module")
def huge_folder(tmp_path_factory, builder):
    return huge(tmp_path_factory.mktemp("huge") / "source", builder)


def test_plan_of_a_huge_checkpoint_is_bounded_in_memory(huge_folder, tmp_path, command):
    folder, count = huge_folder
    assert count == 190_395
    with open(tmp_path / "plan.json", "w+") as target:
        process = command("plan", folder, "--json", stdout=target)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        target.seek(0)
        document = json.load(target)
    assert document["totals"]["parameters"] > PARAMETERS
    assert document["totals"]["quantized"] == LAYERS * EXPERTS * 3
    assert len(document["tensors"]) == count
    # ru_maxrss is that of the largest child so far; the bound holds for all and so for this one.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 600 * 1024
