"""mlx-lm loads our output, decodes it to our bits, and computes what the decoded model computes."""

import json

import numpy as np
import pytest

from mxfp4.converters.convert import convert
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.kernels.rows import decode_rows

pytestmark = pytest.mark.consumer_mlx

TOKENS = [5, 17, 99, 3, 42, 7, 64, 21]


def floats(tensor):
    dtype, shape, raw = tensor
    assert dtype == "BF16"
    bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(shape)


@pytest.fixture
def source(tiny_copy):
    """The example with the keys that mlx-lm reads; transformers 5 spells them otherwise."""
    path = tiny_copy / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "num_experts": config["num_local_experts"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }
    path.unlink()  # the copy shares its files with the repository
    path.write_text(json.dumps(config))
    return tiny_copy


@pytest.mark.parametrize("level", [Level.EXPERTS, Level.LINEAR])
def test_logits_are_those_of_the_decoded_checkpoint(level, source, tmp_path, consumer, builder):
    packed = convert(
        source, tmp_path / "mlx", Recipe(level=level), OutputOptions(format="mlx")
    ).output
    plain = convert(packed, tmp_path / "plain", options=OutputOptions(format="bf16")).output
    ours = consumer("mlx", packed, tmp_path / "ours.npz", json.dumps(TOKENS))
    theirs = consumer("mlx", plain, tmp_path / "plain.npz", json.dumps(TOKENS))
    assert theirs["modules"] == 0
    found, expected = np.load(tmp_path / "ours.npz"), np.load(tmp_path / "plain.npz")
    decoded = builder.read(plain)
    names = [name for name in found.files if name != "logits"]
    assert ours["modules"] == len(names) > 0
    for name in names:
        if ".switch_mlp." in name:
            for expert, weight in enumerate(found[name]):
                module = name.replace(".switch_mlp.", f".experts.{expert}.")
                assert np.array_equal(weight, floats(decoded[f"{module}.weight"])), module
        else:
            assert np.array_equal(found[name], floats(decoded[f"{name}.weight"])), name
    assert np.allclose(found["logits"], expected["logits"], rtol=1e-4, atol=1e-4)
    best = [arrays["logits"].argmax(-1) for arrays in (found, expected)]
    assert np.array_equal(*best)


@pytest.mark.filterwarnings("default")
def test_gpt_oss_is_split_into_the_same_experts(gpt_oss, tmp_path, consumer, builder):
    """mlx-lm undoes the interleaving of gate and up; it does not load gpt-oss in BF16 at all."""
    packed = convert(gpt_oss, tmp_path / "packed", options=OutputOptions(format="gpt-oss")).output
    path = packed / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None}
    path.write_text(json.dumps(config))
    result = consumer("mlx", packed, tmp_path / "found.npz", json.dumps(TOKENS))
    assert result["modules"] == 2 * 3
    found = np.load(tmp_path / "found.npz")
    single = convert(packed, tmp_path / "single").output
    tensors = builder.read(single)
    for layer in range(2):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            base = f"model.layers.{layer}.mlp.experts."
            for expert, weight in enumerate(found[base + leaf]):
                codes, scales = (
                    np.frombuffer(raw, np.uint8).reshape(shape)
                    for _, shape, raw in (
                        tensors[f"{base}{expert}.{leaf}.weight_{part}"]
                        for part in ("packed", "scale")
                    )
                )
                assert np.array_equal(weight, decode_rows(codes, scales, "F32")), (leaf, expert)
