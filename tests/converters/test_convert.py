"""What is in the output: the right bytes, names and config, however the run was cut up."""

import json
import math
import os

import numpy as np
import pytest

from mxfp4.converters.convert import RunOptions, convert, plan_conversion
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.errors import LockedError, NonFiniteError, NoSpaceError, SourceChangedError
from mxfp4.kernels.rows import decode_rows, encode_rows

INDEX = "model.safetensors.index.json"


def expected_pair(bits, dtype="BF16"):
    """Codes and scales of an [N, K] matrix, encoded whole."""
    encoded = encode_rows(np.ascontiguousarray(bits), dtype)
    return encoded.codes, encoded.scales


def stored_pair(tensors, module):
    codes, scales = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
    assert codes[0] == scales[0] == "U8"
    return (
        np.frombuffer(codes[2], np.uint8).reshape(codes[1]),
        np.frombuffer(scales[2], np.uint8).reshape(scales[1]),
    )


def assert_module(tensors, module, bits, dtype="BF16"):
    for stored, wanted in zip(
        stored_pair(tensors, module), expected_pair(bits, dtype), strict=True
    ):
        assert np.array_equal(stored, wanted), module


def test_experts_are_quantized_and_all_else_is_byte_identical(moe_folder, tmp_path, builder):
    convert(moe_folder, tmp_path / "out")
    source, output = builder.read(moe_folder), builder.read(tmp_path / "out")
    for name, (dtype, shape, raw) in source.items():
        if ".experts." in name:
            assert name not in output
            bits = np.frombuffer(raw, np.uint16).reshape(shape)
            assert_module(output, name.removesuffix(".weight"), bits)
        else:
            assert output[name] == (dtype, shape, raw)
    assert len(output) == len(source) + sum(".experts." in name for name in source)


def test_files_of_the_output(moe_folder, tmp_path, builder):
    out = tmp_path / "out"
    convert(moe_folder, out, options=OutputOptions(max_shard_bytes=20_000))
    tensors = builder.read(out)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    for path in out.glob("*.safetensors"):
        held = {name for name, file in index["weight_map"].items() if file == path.name}
        assert sum(len(tensors[name][2]) for name in held) <= 20_000
    for module in {name.rsplit(".", 1)[0] for name in tensors if name.endswith("_packed")}:
        assert (
            index["weight_map"][f"{module}.weight_packed"]
            == (index["weight_map"][f"{module}.weight_scale"])
        )
    for name in ("tokenizer.json", "code/modeling.py", "README.md"):
        assert (out / name).read_bytes() == (moe_folder / name).read_bytes()
    before, after = (json.loads((f / "config.json").read_text()) for f in (moe_folder, out))
    assert after.pop("quantization_config")["format"] == "mxfp4-pack-quantized"
    assert after == before


def test_the_config_has_the_keys_that_every_consumer_accepts(moe_folder, tmp_path):
    convert(moe_folder, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    ignore = found.pop("ignore")
    assert found == {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": None,
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "transform_config": {},
        "version": "0.19.0",
    }
    assert all(pattern.startswith("re:.*") for pattern in ignore)
    assert any("lm_head" in pattern for pattern in ignore)


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (RunOptions(workers=1), OutputOptions()),
        (RunOptions(workers=2, slab_bytes=64), OutputOptions()),
        (RunOptions(workers=1, slab_bytes=1000), OutputOptions()),
        (RunOptions(workers=3, slab_bytes=4096), OutputOptions(max_shard_bytes=9_000)),
        (RunOptions(workers=2), OutputOptions(max_shard_bytes=1)),
        (RunOptions(workers=2), OutputOptions(layout="same")),
    ],
)
def test_same_bytes_whatever_slab_worker_count_and_shard_size(
    run, options, moe_folder, tmp_path, builder
):
    convert(moe_folder, tmp_path / "reference", run=RunOptions(workers=1))
    convert(moe_folder, tmp_path / "out", options=options, run=run)
    assert builder.read(tmp_path / "out") == builder.read(tmp_path / "reference")
    if options == OutputOptions():
        assert builder.hashes(tmp_path / "out") == builder.hashes(tmp_path / "reference")
    if options.layout == "same":
        names = {path.name for path in moe_folder.glob("*.safetensors")}
        assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == names


@pytest.mark.parametrize("level", list(Level))
def test_levels_widen_what_is_quantized(level, moe_folder, tmp_path, builder):
    convert(moe_folder, tmp_path / "out", Recipe(level=level))
    output = builder.read(tmp_path / "out")
    packed = {name.removesuffix(".weight_packed") for name in output if name.endswith("_packed")}
    attention = {name for name in packed if "self_attn" in name}
    assert len(attention) == (8 if level in (Level.LINEAR, Level.ALL) else 0)
    assert len(packed - attention) == 24
    for name in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.norm"):
        assert f"{name}.weight" in output


def test_dense_models_default_to_all_linears(tmp_path, builder):
    rng = np.random.default_rng(1)
    shapes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    tensors = {
        f"model.layers.0.mlp.{name}.weight": ("F32", rng.normal(size=shape).astype(np.float32))
        for name, shape in shapes.items()
    }
    tensors |= {
        f"model.layers.0.self_attn.{name}_proj.weight": (
            "F16",
            rng.normal(size=(64, 64)).astype(np.float16).view(np.uint16),
        )
        for name in "qkvo"
    }
    tensors["model.layers.0.input_layernorm.weight"] = ("F32", np.ones(64, np.float32))
    tensors["model.embed_tokens.weight"] = ("F16", np.ones((128, 64), np.uint16))
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "intermediate_size": 96,
    }
    folder = builder.write(tmp_path / "source", [tensors], config, index=False)
    report = convert(folder, tmp_path / "out")
    assert report.plan.level is Level.LINEAR
    output = builder.read(tmp_path / "out")
    for name, (dtype, array) in tensors.items():
        if "_proj" in name:
            bits = array.view(np.uint32) if dtype == "F32" else array
            assert_module(output, name.removesuffix(".weight"), bits, dtype)
        else:
            assert output[name] == (dtype, array.shape, array.tobytes())


def bank_source(builder, folder, gate_up, down, config):
    base = "model.layers.0."
    tensors = {
        base + "mlp.experts.gate_up_proj": ("BF16", gate_up),
        base + "mlp.experts.down_proj": ("BF16", down),
        base + "mlp.router.weight": ("BF16", np.ones((4, 64), np.uint16)),
        base + "input_layernorm.weight": ("BF16", np.ones(64, np.uint16)),
        "model.embed_tokens.weight": ("BF16", np.ones((128, 64), np.uint16)),
    }
    return builder.write(folder, [tensors], config, index=False)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("slab_bytes", [256, 1 << 20])
def test_stacked_banks_become_one_matrix_per_expert(transposed, slab_bytes, tmp_path, builder):
    experts, hidden, inter = 4, 64, 96
    rng = np.random.default_rng(2)
    gate_up = builder.bf16(rng.normal(size=(experts, 2 * inter, hidden)))
    down = builder.bf16(rng.normal(size=(experts, hidden, inter)))
    folder = bank_source(
        builder,
        tmp_path / "source",
        gate_up.transpose(0, 2, 1) if transposed else gate_up,
        down.transpose(0, 2, 1) if transposed else down,
        builder.moe_config(num_hidden_layers=1, moe_intermediate_size=inter, model_type="new_moe"),
    )
    convert(folder, tmp_path / "out", run=RunOptions(slab_bytes=slab_bytes))
    output = builder.read(tmp_path / "out")
    for expert in range(experts):
        base = f"model.layers.0.mlp.experts.{expert}."
        assert_module(output, base + "gate_proj", gate_up[expert, :inter])
        assert_module(output, base + "up_proj", gate_up[expert, inter:])
        assert_module(output, base + "down_proj", down[expert])


def test_interleaved_bank_of_gpt_oss(tmp_path, builder):
    experts, hidden, inter = 4, 64, 64
    rng = np.random.default_rng(3)
    gate_up = builder.bf16(rng.normal(size=(experts, hidden, 2 * inter)))
    down = builder.bf16(rng.normal(size=(experts, inter, hidden)))
    config = builder.moe_config(
        num_hidden_layers=1,
        intermediate_size=inter,
        num_local_experts=experts,
        model_type="gpt_oss",
        architectures=["GptOssForCausalLM"],
    )
    folder = bank_source(builder, tmp_path / "source", gate_up, down, config)
    convert(folder, tmp_path / "out")
    output = builder.read(tmp_path / "out")
    for expert in range(experts):
        base = f"model.layers.0.mlp.experts.{expert}."
        assert_module(output, base + "gate_proj", gate_up[expert, :, 0::2].T)
        assert_module(output, base + "up_proj", gate_up[expert, :, 1::2].T)
        assert_module(output, base + "down_proj", down[expert].T)


def test_a_hub_cache_of_symlinks_is_a_folder_like_any_other(moe_folder, tmp_path, builder):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(p for p in moe_folder.iterdir() if p.is_file())):
        os.rename(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "gone.json").symlink_to("../../blobs/none")
    report = convert(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert any("gone.json is a symlink" in warning for warning in report.plan.warnings)
    assert any(name.endswith("_packed") for name in builder.read(tmp_path / "out"))


def test_stray_weights_are_reported_and_not_read(moe_folder, tmp_path, builder):
    (moe_folder / "consolidated.safetensors").write_bytes(b"not even a header")
    (moe_folder / "pytorch_model.bin").write_bytes(b"x")
    (moe_folder / "original").mkdir()
    (moe_folder / "original" / "model.safetensors").write_bytes(b"x")
    report = convert(moe_folder, tmp_path / "out")
    (warning,) = [text for text in report.plan.warnings if "were not read" in text]
    assert "2 weight file(s)" in warning
    assert "consolidated.safetensors" in warning
    assert warning in (tmp_path / "out" / "mxfp4_report.md").read_text()
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 1
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_keep_patterns_keep_all_experts_of_the_layer(moe_folder, tmp_path, builder):
    recipe = Recipe(keep=("model.layers.0.mlp.experts.2.up_proj",))
    report = convert(moe_folder, tmp_path / "out", recipe)
    output = builder.read(tmp_path / "out")
    # Engines have one scheme for all routed experts of a layer.
    for expert in range(4):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            assert f"model.layers.0.mlp.experts.{expert}.{leaf}.weight" in output
    assert report.plan.totals["quantized"] == 12


def nan_in(moe_folder, builder, name):
    path = moe_folder / "model-00001-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start = json.loads(raw[8 : 8 + length])[name]["data_offsets"][0]
    raw[8 + length + start + 10 : 8 + length + start + 12] = np.uint16(0x7FC0).tobytes()
    path.write_bytes(raw)


def test_nonfinite_tensors_can_be_kept_on_request(moe_folder, tmp_path, builder):
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    nan_in(moe_folder, builder, name)
    with pytest.raises(NonFiniteError) as caught:
        convert(moe_folder, tmp_path / "refused")
    assert (caught.value.tensor, caught.value.index) == (name, (0, 5))
    report = convert(moe_folder, tmp_path / "out", run=RunOptions(keep_nonfinite=True))
    source, output = builder.read(moe_folder), builder.read(tmp_path / "out")
    assert output[name] == source[name]
    kept = [t for t in report.plan.tensors if "NaN" in t.decision.reason]
    assert len(kept) == 12
    assert all(".layers.0.mlp.experts." in t.info.name for t in kept)
    assert "first at [0, 5]" in (tmp_path / "out" / "mxfp4_report.md").read_text()


def test_nonfinite_values_in_kept_tensors_are_copied(moe_folder, tmp_path, builder):
    nan_in(moe_folder, builder, "model.embed_tokens.weight")
    convert(moe_folder, tmp_path / "out")
    name = "model.embed_tokens.weight"
    assert builder.read(tmp_path / "out")[name] == builder.read(moe_folder)[name]


def test_odd_shapes_can_be_kept_on_request(tmp_path, builder):
    tensors = builder.moe()
    for leaf, shape in (("gate", (40, 64)), ("up", (40, 64)), ("down", (64, 40))):
        name = f"model.layers.1.mlp.experts.2.{leaf}_proj.weight"
        tensors[name] = ("BF16", np.zeros(shape, np.uint16))
    folder = builder.write(tmp_path / "source", [tensors], builder.moe_config(), index=False)
    report = convert(folder, tmp_path / "out", run=RunOptions(keep_odd_shapes=True))
    assert report.plan.totals["quantized"] == 12
    assert report.to_json()["not_as_asked"][0]["tensor"].endswith("2.down_proj.weight")
    assert "no multiple of 32" in (tmp_path / "out" / "mxfp4_report.md").read_text()


def test_a_source_that_changes_during_the_run_is_noticed(moe_folder, tmp_path, builder):
    path = moe_folder / "model-00002-of-00003.safetensors"
    calls = []

    def quantizer(bits, dtype):
        calls.append(1)
        if len(calls) == 12:
            os.utime(path, (1, 1))
        return encode_rows(bits, dtype, statistics=True)

    options, run = OutputOptions(layout="same"), RunOptions(workers=1)
    with pytest.raises(SourceChangedError, match="changed during the run") as caught:
        convert(moe_folder, tmp_path / "out", options=options, run=run, quantizer=quantizer)
    assert caught.value.file == path.name
    assert not (tmp_path / "out" / path.name).exists()
    assert not (tmp_path / "out" / INDEX).exists()


def test_two_conversions_into_one_folder_are_refused(moe_folder, tmp_path):
    seen = []

    def quantizer(bits, dtype):
        if not seen:
            with pytest.raises(LockedError) as caught:
                convert(moe_folder, tmp_path / "out")
            seen.append(caught.value)
        return encode_rows(bits, dtype, statistics=True)

    convert(moe_folder, tmp_path / "out", quantizer=quantizer, run=RunOptions(workers=1))
    assert len(seen) == 1
    convert(moe_folder, tmp_path / "out")


def test_disk_that_is_too_small_is_an_error_before_work(moe_folder, tmp_path, small_disk):
    with pytest.raises(NoSpaceError, match="the disk has"):
        convert(moe_folder, small_disk / "out")
    assert not list((small_disk / "out").glob("*.safetensors"))


def test_zero_sized_tensors_pass_through(tmp_path, builder):
    tensors = builder.moe()
    tensors["model.layers.0.empty"] = ("BF16", np.zeros((0, 64), np.uint16))
    folder = builder.write(tmp_path / "source", [tensors], builder.moe_config(), index=False)
    convert(folder, tmp_path / "out")
    assert builder.read(tmp_path / "out")["model.layers.0.empty"] == ("BF16", (0, 64), b"")


def test_error_statistics_are_those_of_the_decoded_output(moe_folder, tmp_path, builder):
    report = convert(moe_folder, tmp_path / "out", run=RunOptions(slab_bytes=512))
    source, output = builder.read(moe_folder), builder.read(tmp_path / "out")
    signal = error = 0.0
    for name, (_, shape, raw) in source.items():
        if ".experts." in name:
            bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
            exact = bits.view(np.float32).astype(np.float64).reshape(shape)
            decoded = decode_rows(*stored_pair(output, name.removesuffix(".weight")), "F32").astype(
                np.float64
            )
            signal += (exact**2).sum()
            error += ((exact - decoded) ** 2).sum()
    assert math.isclose(
        report.to_json()["error"]["relative_l2"], (error / signal) ** 0.5, rel_tol=1e-6
    )


def test_planning_reads_headers_only(tmp_path, builder):
    tensors = {name: (dtype, array.shape) for name, (dtype, array) in builder.moe().items()}
    folder = builder.write(tmp_path / "source", [], builder.moe_config(), index=False)
    tensors["model.layers.0.self_attn.q_proj.weight"] = ("BF16", (1 << 20, 1 << 20))
    builder.sparse(folder / "model.safetensors", tensors)
    plan = plan_conversion(folder)
    assert plan.totals["bytes_before"] > 1 << 41
    assert plan.totals["quantized"] == 24
