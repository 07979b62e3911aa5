"""Planning a 2.8T-parameter checkpoint needs headers and little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, EXPERTS, HIDDEN, INTER = 60, 1_053, 7_168, 2_048
SHARDS = 1_122
PARAMETERS = 2.78e12


def huge(folder, builder):
    """190,395 tensors over 1,122 sparse shards with true headers."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (163_840, HIDDEN))
    }
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


PLAN_AND_TELL_PEAK = """
import sys
from mxfp4.cli.main import main
main(["plan", sys.argv[1], "--json"], standalone_mode=False)
status = open("/proc/self/status").read()
print(status.split("VmHWM:")[1].split()[0], file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's peak per program")
def test_plan_of_a_huge_checkpoint_is_bounded_in_memory(huge_folder, tmp_path):
    folder, count = huge_folder
    assert count == 190_395
    with open(tmp_path / "plan.json", "w+") as target:
        done = subprocess.run(
            [sys.executable, "-c", PLAN_AND_TELL_PEAK, str(folder)],
            stdout=target,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        target.seek(0)
        document = json.load(target)
    assert document["totals"]["parameters"] > PARAMETERS
    assert document["totals"]["quantized"] == LAYERS * EXPERTS * 3
    assert len(document["tensors"]) == count
    assert int(done.stderr.split()[-1]) < 600 * 1024
