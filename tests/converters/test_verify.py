"""`verify` accepts what `convert` writes and finds every way to damage it."""

import json
import os
import struct

import numpy as np
import pytest

from mxfp4.converters.convert import RunOptions, convert
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.verify import verify

INDEX = "model.safetensors.index.json"
MODULE = "model.layers.0.mlp.experts.1.up_proj"
KEPT = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def pair(moe_folder, tmp_path):
    convert(moe_folder, tmp_path / "out", options=OutputOptions(max_shard_bytes=30_000))
    return moe_folder, tmp_path / "out"


def shard_of(output, tensor):
    return output / json.loads((output / INDEX).read_text())["weight_map"][tensor]


def place_of(path, tensor):
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return 8 + length + json.loads(raw[8 : 8 + length])[tensor]["data_offsets"][0]


def flip(output, tensor, offset=3, value=None):
    path = shard_of(output, tensor)
    raw = bytearray(path.read_bytes())
    place = place_of(path, tensor) + offset
    raw[place] = raw[place] ^ 1 if value is None else value
    path.write_bytes(raw)


def edit_config(output, change):
    path = output / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_header(output, tensor, change):
    path = shard_of(output, tensor)
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def problems(result):
    return "\n".join(f"{finding.place}: {finding.problem}" for finding in result.findings)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("rule", ["even", "floor", "rceil", "search"])
def test_fresh_output_has_no_differences(level, rule, moe_folder, tmp_path):
    convert(moe_folder, tmp_path / "out", Recipe(level=level, rule=rule))
    result = verify(tmp_path / "out", moe_folder, deep=True)
    assert result.ok, problems(result)
    assert result.checked["kept tensors"] + result.checked["quantized modules"] == 41
    assert 0.05 < result.statistics.relative_l2 < 0.2
    assert result.worst(3)[0][1] >= result.worst(3)[2][1]


def test_banks_and_options_verify_too(tmp_path, builder):
    rng = np.random.default_rng(5)
    tensors = {
        "model.embed_tokens.weight": ("BF16", np.ones((128, 64), np.uint16)),
        "model.layers.0.mlp.experts.gate_up_proj": (
            "BF16",
            builder.bf16(rng.normal(size=(4, 192, 64))),
        ),
        "model.layers.0.mlp.experts.down_proj": (
            "BF16",
            builder.bf16(rng.normal(size=(4, 64, 96))),
        ),
        "model.layers.0.mlp.gate.weight": ("BF16", np.ones((4, 64), np.uint16)),
    }
    config = builder.moe_config(num_hidden_layers=1, moe_intermediate_size=96)
    folder = builder.write(tmp_path / "source", [tensors], config, index=False)
    convert(folder, tmp_path / "out", run=RunOptions(workers=1))
    result = verify(tmp_path / "out", folder, deep=True)
    assert result.ok, problems(result)
    assert result.checked["quantized modules"] == 12


DAMAGE = {
    "codes": (lambda o: flip(o, f"{MODULE}.weight_packed"), f"{MODULE}: 1 bytes differ"),
    "scales": (lambda o: flip(o, f"{MODULE}.weight_scale"), f"{MODULE}: 1 bytes differ"),
    "kept": (lambda o: flip(o, KEPT), f"{KEPT}: kept, but its bytes differ"),
    "hash": (lambda o: flip(o, KEPT), "its SHA-256 is not the one in the manifest"),
    "NaN scale": (
        lambda o: flip(o, f"{MODULE}.weight_scale", value=255),
        "scale byte 255 stands for NaN",
    ),
    "overflowing scale": (
        lambda o: flip(o, f"{MODULE}.weight_scale", value=253),
        "scale byte 253 stands for a scale whose largest codes overflow",
    ),
    "cut shard": (
        lambda o: os.truncate(shard_of(o, KEPT), shard_of(o, KEPT).stat().st_size - 1),
        "the file is truncated",
    ),
    "lost shard": (lambda o: shard_of(o, KEPT).unlink(), "not in the folder"),
    "lost index": (lambda o: (o / INDEX).unlink(), "there is no index"),
    "lost config": (lambda o: (o / "config.json").unlink(), "there is no config.json"),
    "index total": (
        lambda o: (o / INDEX).write_text(
            json.dumps({**json.loads((o / INDEX).read_text()), "metadata": {"total_size": 1}})
        ),
        "total_size 1",
    ),
    "stray shard": (
        lambda o: (o / "model-old.safetensors").write_bytes(b"x"),
        "this file is not in the index",
    ),
    "metadata": (
        lambda o: edit_header(o, KEPT, lambda h: h.update(__metadata__={})),
        'lack {"format": "pt"}',
    ),
    "no quantization config": (
        lambda o: edit_config(o, lambda c: c.pop("quantization_config")),
        "packed modules, but no quantization_config",
    ),
    "other method": (
        lambda o: edit_config(o, lambda c: c["quantization_config"].update(quant_method="x")),
        "quant_method is 'x'",
    ),
    "other group": (
        lambda o: edit_config(
            o,
            lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(
                group_size=16
            ),
        ),
        "not MXFP4 weights",
    ),
    "target": (
        lambda o: edit_config(
            o,
            lambda c: c["quantization_config"]["config_groups"]["group_0"].update(targets=["X"]),
        ),
        "lacks the target 'Linear'",
    ),
    "ignore list too short": (
        lambda o: edit_config(o, lambda c: c["quantization_config"].update(ignore=[])),
        "left unquantized, but no ignore pattern hits it",
    ),
    "ignore list too wide": (
        lambda o: edit_config(
            o, lambda c: c["quantization_config"]["ignore"].append("re:.*up_proj$")
        ),
        "stored packed, but an ignore pattern hits it",
    ),
    "scales renamed": (
        lambda o: edit_header(
            o,
            f"{MODULE}.weight_scale",
            lambda h: h.update({f"{MODULE}.scale": h.pop(f"{MODULE}.weight_scale")}),
        ),
        "the index puts this tensor in",
    ),
    "manifest": (lambda o: (o / "mxfp4_manifest.json").write_text("{"), "this is not JSON"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(kind, pair):
    source, output = pair
    change, message = DAMAGE[kind]
    change(output)
    result = verify(output, source, deep=True)
    assert not result.ok
    assert message in problems(result)


def test_without_deep_or_source_data_are_not_read(pair):
    _, output = pair
    flip(output, f"{MODULE}.weight_packed")
    assert verify(output).ok
    assert not verify(output, deep=True).ok


def test_a_tensor_that_no_source_tensor_accounts_for(pair, builder):
    source, output = pair
    extra = builder.file_bytes({"mystery.weight": ("U8", np.zeros(1, np.uint8))}, {"format": "pt"})
    (output / "model-extra.safetensors").write_bytes(extra)
    index = json.loads((output / INDEX).read_text())
    index["weight_map"]["mystery.weight"] = "model-extra.safetensors"
    index["metadata"]["total_size"] += 1
    (output / INDEX).write_text(json.dumps(index))
    assert "mystery.weight: no source tensor accounts" in problems(verify(output, source))


def test_a_source_tensor_that_is_missing(pair, tmp_path, builder):
    _, output = pair
    tensors = {**builder.moe(), "model.layers.1.extra.weight": ("U8", np.zeros(4, np.uint8))}
    other = builder.write(tmp_path / "other", [tensors], builder.moe_config(), index=False)
    found = problems(verify(output, other))
    assert "model.layers.1.extra.weight: this source tensor is missing" in found


def test_output_of_unknown_origin_is_compared_by_name(pair):
    source, output = pair
    (output / "mxfp4_manifest.json").unlink()
    result = verify(output, source)
    assert result.ok, problems(result)
    assert any("no recipe on record" in note for note in result.notes)
