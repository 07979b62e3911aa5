"""Configs of the layouts, engines and what they refuse, several layouts from one read."""

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner

from mxfp4.cli.main import main
from mxfp4.cli.targets import ENGINE_NAMES, PRESET_NAMES
from mxfp4.converters import convert as engine
from mxfp4.converters.convert import RunOptions, convert, convert_several, plan_conversion
from mxfp4.converters.engines import ENGINES, choose_layout, engine_remarks, options_for
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.presets import PRESETS
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.verify import verify
from mxfp4.errors import OutputError, RecipeError

SHARED = ("compressed-tensors", "mxfp4", "quark", "deepseek-v4", "mimo", "gguf-blocks")


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_command_line_names_are_those_of_the_tables():
    assert set(ENGINE_NAMES) == set(ENGINES)
    assert set(PRESET_NAMES) == set(PRESETS)


def test_several_layouts_from_one_read_are_those_of_single_conversions(
    moe_folder, tmp_path, monkeypatch
):
    read = []
    original = engine.Work.advance

    def advance(self, count):
        read.append(count)
        original(self, count)

    monkeypatch.setattr(engine.Work, "advance", advance)
    outputs = [(OutputOptions(format=name), tmp_path / "all" / name) for name in SHARED]
    reports = convert_several(moe_folder, outputs, run=RunOptions(slab_bytes=1000))
    tensors = sum(
        tensor.info.byte_count
        for shard in reports[0].plan.checkpoint.shards
        for tensor in shard.header.tensors
    )
    assert sum(read) == tensors
    for report, (options, folder) in zip(reports, outputs, strict=True):
        assert verify(folder, moe_folder, deep=True).ok
        single = convert(moe_folder, tmp_path / f"single-{options.format}", options=options)
        assert engine.manifest(single.plan, single.records) == engine.manifest(
            report.plan, report.records
        )


def test_several_layouts_resume_where_one_of_them_stopped(moe_folder, tmp_path, builder):
    outputs = [
        (OutputOptions(format=name, max_shard_bytes=20_000), tmp_path / name)
        for name in ("compressed-tensors", "quark")
    ]
    first = convert_several(moe_folder, outputs)
    expected = [builder.hashes(folder) for _, folder in outputs]
    lost = tmp_path / "quark" / first[1].records[2].shard
    os.unlink(lost)
    again = convert_several(moe_folder, outputs)
    assert [report.converted_shards for report in again] == [1, 1]
    assert [builder.hashes(folder) for _, folder in outputs] == expected


def test_layouts_that_stack_experts_are_read_by_themselves(moe_folder, tmp_path, builder):
    names = ("quark", "mlx", "compressed-tensors")
    options = [OutputOptions(format=name) for name in names]
    groups = engine.read_groups(moe_folder, options)
    assert [list(group) for group in groups] == [[0, 2], [1]]
    reports = convert_several(moe_folder, [(o, tmp_path / o.format) for o in options])
    assert [report.output.name for report in reports] == list(names)
    for each in options:
        single = tmp_path / f"single-{each.format}"
        convert(moe_folder, single, options=each)
        assert builder.read(single) == builder.read(tmp_path / each.format)
    with pytest.raises(OutputError, match="share one folder"):
        convert_several(moe_folder, [(OutputOptions(), tmp_path / "a")] * 2)
    with pytest.raises(RecipeError, match="do not cut this checkpoint into the same tensors"):
        plan_conversion(moe_folder, options=options[1], like=reports[0].plan)


def test_emit_and_for_write_one_folder_for_each_layout(moe_folder, tmp_path):
    result = run("convert", moe_folder, tmp_path / "a", "--emit", "compressed-tensors,mimo")
    assert result.exit_code == 0, result.output
    for name in ("compressed-tensors", "mimo"):
        assert verify(tmp_path / "a" / name, moe_folder, deep=True).ok
    result = run("convert", moe_folder, tmp_path / "d", "--for", "vllm", "--for", "mlx")
    assert result.exit_code == 0, result.output
    assert "mlx needs a read of its own" in result.output
    assert verify(tmp_path / "d" / "mlx", moe_folder, deep=True).ok
    result = run("convert", moe_folder, tmp_path / "b", "--for", "vllm", "--for", "sglang")
    assert result.exit_code == 0, result.output
    assert "vllm takes the layout compressed-tensors" in result.output
    assert "for sglang: SGLang loads MXFP4 of this model as Quark W4A4" in result.output
    found = config_of(tmp_path / "b" / "quark")["quantization_config"]
    assert found["global_quant_config"]["input_tensors"]["is_dynamic"] is True
    assert found["exclude"][-1] == "lm_head"
    result = run("convert", moe_folder, tmp_path / "c", "--for", "vllm", "--for", "transformers")
    assert result.exit_code == 0, result.output
    assert verify(tmp_path / "c", moe_folder).ok


def test_plan_says_what_an_engine_will_not_load(moe_folder):
    result = run("plan", moe_folder, "--for", "trtllm", "--level", "linear")
    assert result.exit_code == 0, result.output
    assert "trtllm will not load: 8 MXFP4 weights that are not routed experts" in result.output


CHOICES = {
    ("vllm", "qwen3_moe"): "compressed-tensors",
    ("vllm", "gpt_oss"): "gpt-oss",
    ("vllm", "deepseek_v4"): "deepseek-v4",
    ("sglang", "kimi_k3"): "compressed-tensors",
    ("sglang", "mimo_v2_flash"): "mimo",
    ("sglang", "qwen3_moe"): "quark",
    ("llama.cpp", "kimi_k3"): "compressed-tensors",
    ("llama.cpp", "qwen3_moe"): "bf16",
    ("mlx", "qwen3_moe"): "mlx",
    ("mlx", "unheard_of"): "bf16",
    ("tokenspeed", "kimi_k3"): "compressed-tensors",
    ("transformers", "llama"): "compressed-tensors",
}


@pytest.mark.parametrize(("name", "model"), CHOICES)
def test_engines_get_the_layout_they_load(name, model):
    assert choose_layout(name, {"model_type": model}).format == CHOICES[name, model]


def test_an_fp8_source_stays_fp8_for_vllm():
    config = {"model_type": "qwen3_moe", "quantization_config": {"quant_method": "fp8"}}
    assert choose_layout("vllm", config).format == "mimo"
    with pytest.raises(RecipeError, match="unknown engine"):
        choose_layout("x", config)


REMARKS = {
    "compressed-tensors in SGLang": (
        ("sglang", {}, Recipe()),
        "skipped without an error",
    ),
    "dense compressed-tensors in SGLang": (
        ("sglang", {}, Recipe(level=Level.LINEAR)),
        "has no scheme",
    ),
    "Quark W4A16 in SGLang": (("sglang", {"format": "quark"}, Recipe()), "is not recognised"),
    "FP8 activations in vLLM": (("vllm", {"activations": "fp8"}, Recipe()), "above 249"),
    "MLX in vLLM": (("vllm", {"format": "mlx"}, Recipe()), "has no reader for it"),
    "kept experts in the generic layout": (
        ("vllm", {"format": "mxfp4"}, Recipe(keep=("model.layers.0.mlp.experts.*",))),
        "12 routed experts that are not MXFP4",
    ),
}


@pytest.mark.parametrize("kind", REMARKS)
def test_acceptance_rules(kind, moe_folder):
    (name, options, recipe), message = REMARKS[kind]
    plan = plan_conversion(moe_folder, recipe, OutputOptions(**options))
    assert any(message in remark for remark in engine_remarks(name, plan))
    fitting = options_for("vllm", plan.checkpoint.config or {}, OutputOptions())
    assert engine_remarks("vllm", plan_conversion(moe_folder, options=fitting)) == ()


@pytest.mark.parametrize("activations", ["none", "mxfp4", "fp8"])
def test_activations_change_the_config_alone(activations, moe_folder, tmp_path, builder):
    convert(moe_folder, tmp_path / "plain")
    options = OutputOptions(activations=activations)
    convert(moe_folder, tmp_path / "out", options=options)
    assert builder.read(tmp_path / "out") == builder.read(tmp_path / "plain")
    group = config_of(tmp_path / "out")["quantization_config"]["config_groups"]["group_0"]
    inputs = group["input_activations"]
    seen = None if inputs is None else (inputs["num_bits"], inputs["group_size"], inputs["dynamic"])
    assert seen == {"none": None, "mxfp4": (4, 32, True), "fp8": (8, 128, True)}[activations]
    with pytest.raises(RecipeError, match="no way to ask for fp8 activations"):
        plan_conversion(moe_folder, options=OutputOptions(format="quark", activations="fp8"))


def test_preset_of_kimi_k3(tmp_path, builder):
    text = builder.moe_config(model_type="kimi_linear")
    config = {"model_type": "kimi_k3", "text_config": text}
    tensors = {f"language_model.{name}": tensor for name, tensor in builder.moe().items()}
    folder = builder.write(tmp_path / "s", builder.split(tensors, 3), config)
    result = run("convert", folder, tmp_path / "out", "--preset", "kimi-k3")
    assert result.exit_code == 0, result.output
    found = config_of(tmp_path / "out")
    assert "quantization_config" not in found
    assert found["text_config"]["quantization_config"]["quant_method"] == "compressed-tensors"
    names = {path.name for path in folder.glob("*.safetensors")}
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == names
    packed = [name for name in builder.read(tmp_path / "out") if name.endswith("_packed")]
    assert len(packed) == 24
    assert all(".experts." in name for name in packed)
    assert verify(tmp_path / "out", folder, deep=True).ok
    result = run("convert", folder, tmp_path / "x", "--preset", "kimi-k3", "--level", "all")
    assert result.exit_code == 2


def test_mlx_metadata_and_keys(moe_folder, tmp_path):
    convert(moe_folder, tmp_path / "out", options=OutputOptions(format="mlx"))
    found = config_of(tmp_path / "out")
    assert found["quantization"] == found["quantization_config"]
    assert found["quantization"] == {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    (path,) = (tmp_path / "out").glob("model*.safetensors")
    raw = path.read_bytes()
    length = int(np.frombuffer(raw[:8], "<u8")[0])
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "mlx"}
    assert verify(tmp_path / "out", moe_folder, deep=True).ok
