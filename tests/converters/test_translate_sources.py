"""What surrounds translated weights: golden bytes, mixed sources, old configs, heads, sidecars."""

import json
from pathlib import Path

import numpy as np
import pytest

from mxfp4.converters.convert import convert, plan_conversion
from mxfp4.converters.formats import FORMATS
from mxfp4.converters.formats.gguf_blocks import gguf_to_rows, rows_to_gguf
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.verify import verify
from mxfp4.errors import CorruptCheckpointError, UnsupportedFormatError
from mxfp4.kernels.rows import encode_rows

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden_vectors.json").read_text())
LAYOUTS = GOLDEN["layouts"]
MODULE = "model.layers.0.mlp.experts.0.down_proj"
K3 = "language_model.model.layers."


def array(entry):
    dtype = {"U32": "<u4"}.get(entry["dtype"], "u1")
    return entry["dtype"], np.frombuffer(bytes.fromhex(entry["hex"]), dtype).reshape(entry["shape"])


def golden_tensors(layout):
    """One expert's down projection, as the golden file has it."""
    if layout == "gguf":
        rows = np.array([list(bytes.fromhex(row)) for row in LAYOUTS["gguf"]["rows_hex"]], np.uint8)
        return {f"{MODULE}.weight_gguf": ("U8", rows)}
    found = {
        leaf: array(entry)
        for leaf, entry in LAYOUTS[layout].items()
        if isinstance(entry, dict) and "hex" in entry
    }
    if layout == "gpt_oss":
        base = "model.layers.0.mlp.experts.down_proj"
        return {base + leaf: tensor for leaf, tensor in found.items()}
    if layout == "mlx":
        base = "model.layers.0.mlp.switch_mlp.down_proj."
        return {base + leaf: (tensor[0], tensor[1][None]) for leaf, tensor in found.items()}
    return {f"{MODULE}.{leaf}": tensor for leaf, tensor in found.items()}


GOLDEN_FORMATS = {
    "compressed-tensors": "compressed_tensors",
    "mxfp4": "quark_and_mimo_and_vllm_mxfp4",
    "quark": "quark_and_mimo_and_vllm_mxfp4",
    "mimo": "quark_and_mimo_and_vllm_mxfp4",
    "deepseek-v4": "deepseek_v4",
    "gpt-oss": "gpt_oss",
    "mlx": "mlx",
    "gguf-blocks": "gguf",
}


@pytest.mark.parametrize("source", sorted(set(GOLDEN_FORMATS.values())))
@pytest.mark.parametrize("target", GOLDEN_FORMATS)
def test_golden_layouts(source, target, tmp_path, builder):
    config = {
        "model_type": "gpt_oss" if target == "gpt-oss" else "qwen3_moe",
        "hidden_size": 4,
        "moe_intermediate_size": 64,
        "num_experts": 1,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "quantization_config": {"quant_method": "x"},
    }
    kept = {"model.layers.0.mlp.gate.weight": ("BF16", np.ones((1, 4), np.uint16))}
    folder = builder.write(tmp_path / "s", [golden_tensors(source), kept], config)
    convert(folder, tmp_path / "out", options=OutputOptions(format=target))
    output = builder.read(tmp_path / "out")
    expected = golden_tensors(GOLDEN_FORMATS[target]) | kept
    assert output == {n: (d, a.shape, a.tobytes()) for n, (d, a) in expected.items()}


def test_golden_values(tmp_path, builder):
    config = {"model_type": "qwen3_moe", "hidden_size": 4, "num_experts": 1, "vocab_size": 8}
    config |= {"quantization_config": {"quant_method": "x"}, "num_hidden_layers": 1}
    for source in sorted(set(GOLDEN_FORMATS.values()) - {"gpt_oss"}):
        folder = builder.write(tmp_path / source, [golden_tensors(source)], config)
        convert(folder, tmp_path / f"{source}-out", options=OutputOptions(format="bf16"))
        ((dtype, shape, raw),) = builder.read(tmp_path / f"{source}-out").values()
        assert (dtype, shape) == ("BF16", (4, 64))
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        wanted = np.array(LAYOUTS["values_float32"], np.float32)
        assert np.array_equal(bits, wanted.view(np.uint32).reshape(-1))


def test_golden_gguf_blocks_of_every_scale():
    for case in GOLDEN["decode"]:
        codes = np.frombuffer(bytes.fromhex(case["packed_hex"]), np.uint8)[None]
        block = np.frombuffer(bytes.fromhex(case["gguf_block_hex"]), np.uint8)[None]
        scales = np.full((1, 1), case["scale"], np.uint8)
        assert np.array_equal(rows_to_gguf(codes, scales), block)
        again = gguf_to_rows(block)
        assert np.array_equal(again[0], codes)
        assert np.array_equal(again[1], scales)


def test_golden_safetensors_file_is_read(tmp_path):
    from mxfp4.converters.header import read_header

    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes.fromhex(GOLDEN["safetensors"]["file_hex"]))
    infos = [tensor.info for tensor in read_header(path).tensors]
    assert [(i.name, i.dtype, i.shape) for i in infos] == [
        ("e8m0", "F8_E8M0", (3,)),
        ("f4", "F4", (2, 8)),
    ]


def k3(builder, rng):
    """Routed experts packed, everything else in BF16, as Kimi-K3 is published."""

    def normal(*shape):
        return "BF16", builder.bf16(rng.normal(0, 0.05, shape))

    tensors: dict[str, object] = {"language_model.model.embed_tokens.weight": normal(128, 128)}
    for layer in range(2):
        base = f"{K3}{layer}."
        tensors[base + "input_layernorm.weight"] = normal(128)
        tensors[base + "self_attn.q_proj.weight"] = normal(128, 128)
        tensors[base + "self_attn.o_proj.weight"] = normal(128, 128)
        if layer == 0:
            for name, shape in (("gate", (96, 128)), ("up", (96, 128)), ("down", (128, 96))):
                tensors[f"{base}mlp.{name}_proj.weight"] = normal(*shape)
            continue
        moe = base + "block_sparse_moe."
        tensors[moe + "gate.weight"] = normal(4, 128)
        tensors[moe + "routed_expert_down_proj.weight"] = normal(64, 128)
        tensors[moe + "routed_expert_up_proj.weight"] = normal(128, 64)
        for name, shape in (("gate", (64, 128)), ("up", (64, 128)), ("down", (128, 64))):
            tensors[f"{moe}shared_experts.{name}_proj.weight"] = normal(*shape)
        for expert in range(4):
            for name, (rows, columns) in (("w1", (32, 64)), ("w3", (32, 64)), ("w2", (64, 32))):
                module = f"{moe}experts.{expert}.{name}"
                codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
                codes[0, 0] = 0x88
                tensors[module + ".weight_packed"] = ("U8", codes)
                scales = rng.integers(0, 253, (rows, columns // 32), dtype=np.uint8)
                tensors[module + ".weight_scale"] = ("U8", scales)
    tensors["language_model.lm_head.weight"] = normal(128, 128)
    return tensors


K3_CONFIG = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 64,
        "vocab_size": 128,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
        },
    },
}


@pytest.fixture
def k3_folder(tmp_path, builder):
    tensors = k3(builder, np.random.default_rng(4))
    folder = builder.write(tmp_path / "k3", builder.split(tensors, 3), K3_CONFIG)
    # Five digits, then six, as published.
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in sorted(folder.glob("*.safetensors")):
        path.rename(folder / path.name.replace("-of-0", "-of-00"))
    index["weight_map"] = {n: f.replace("-of-0", "-of-00") for n, f in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_the_rest_of_a_partly_quantized_source_is_quantized(k3_folder, tmp_path, builder):
    output = tmp_path / "out"
    report = convert(k3_folder, output, Recipe(level=Level.MOE), OutputOptions(layout="same"))
    source, found = builder.read(k3_folder), builder.read(output)
    names = {path.name for path in k3_folder.glob("*.safetensors")}
    assert {path.name for path in output.glob("*.safetensors")} == names
    for name, (dtype, shape, raw) in source.items():
        if "shared_experts" in name or ".mlp." in name:
            encoded = encode_rows(np.frombuffer(raw, np.uint16).reshape(shape), dtype)
            assert found[name + "_packed"][2] == encoded.codes.tobytes()
            assert found[name + "_scale"][2] == encoded.scales.tobytes()
        else:
            assert found[name] == (dtype, shape, raw)
    totals = report.plan.totals
    assert (totals["quantized"], totals["passed"]) == (6, 12)
    config = json.loads((output / "config.json").read_text())
    assert "quantization_config" not in config
    entry = config["text_config"]["quantization_config"]
    assert entry["format"] == "mxfp4-pack-quantized"
    assert any("gate" in pattern for pattern in entry["ignore"])
    assert verify(output, k3_folder, deep=True).ok


def test_translating_a_finished_checkpoint_again_changes_nothing(k3_folder, tmp_path, builder):
    convert(k3_folder, tmp_path / "out", options=OutputOptions(layout="same"))
    assert builder.read(tmp_path / "out") == builder.read(k3_folder)


HIDING = {
    "top": {"quantization_config": {"quant_method": "x"}},
    "text_config": {"text_config": {"quantization_config": {"quant_method": "x"}}},
    "compression_config": {"compression_config": {"quant_method": "x"}},
    "nested compression_config": {"text_config": {"compression_config": {"quant_method": "x"}}},
    "both": {
        "quantization_config": {"quant_method": "x"},
        "text_config": {"quantization_config": {"quant_method": "y"}},
    },
    "deepseek": {
        "quantization_config": {"quant_method": "fp8"},
        "expert_dtype": "fp4",
        "scale_fmt": "ue8m0",
    },
}


@pytest.mark.parametrize("target", ["compressed-tensors", "bf16", "deepseek-v4"])
@pytest.mark.parametrize("kind", HIDING)
def test_old_configs_are_removed_wherever_they_hide(kind, target, k3_folder, tmp_path, builder):
    text = {k: v for k, v in K3_CONFIG["text_config"].items() if k != "quantization_config"}
    hidden = HIDING[kind]
    nested = {**text, **hidden.get("text_config", {})}
    config = {**K3_CONFIG, **hidden, "text_config": nested}
    (k3_folder / "config.json").write_text(json.dumps(config))
    for name in ("hf_quant_config.json", "quantization_config.json"):
        (k3_folder / name).write_text("{}")
    report = convert(k3_folder, tmp_path / "out", options=OutputOptions(format=target))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    entries = [
        place[key]
        for place in (found, found["text_config"])
        for key in ("quantization_config", "compression_config")
        if key in place
    ]
    assert len(entries) == (0 if target == "bf16" else 1)
    assert all(entry["quant_method"] not in ("x", "y") for entry in entries)
    nested_only = "quantization_config" not in hidden and "compression_config" not in hidden
    if entries:
        assert ("quantization_config" in found["text_config"]) == nested_only
    assert ("expert_dtype" in found) == (target == "deepseek-v4")
    assert ("scale_fmt" in found) is False
    for name in ("hf_quant_config.json", "quantization_config.json"):
        assert not (tmp_path / "out" / name).exists()
    assert any("hf_quant_config.json" in text for text in report.plan.warnings)


def test_a_config_that_contradicts_the_weights_is_refused(moe_folder, tmp_path):
    config = json.loads((moe_folder / "config.json").read_text())
    config["text_config"] = {"quantization_config": {"quant_method": "fp8"}}
    (moe_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormatError, match="already quantized"):
        convert(moe_folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("tied", "head", "expected"),
    [
        (True, "absent", "absent"),
        (True, "equal", "equal"),
        (True, "other", "different"),
        (False, "absent", "absent"),
        (False, "other", "different"),
    ],
)
def test_tied_heads(tied, head, expected, tmp_path, builder):
    tensors = builder.moe()
    if head == "absent":
        del tensors["lm_head.weight"]
    elif head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    config = builder.moe_config(tie_word_embeddings=tied)
    folder = builder.write(tmp_path / "s", builder.split(tensors, 3), config)
    report = convert(folder, tmp_path / "out")
    source, output = builder.read(folder), builder.read(tmp_path / "out")
    name = "lm_head.weight"
    assert output.get(name) == source.get(name)
    manifest = json.loads((tmp_path / "out" / "mxfp4_manifest.json").read_text())
    assert manifest["tied_head"] == {"tie_word_embeddings": tied, "lm_head": expected}
    text = (tmp_path / "out" / "mxfp4_report.md").read_text()
    assert ("differs from the embedding" in text) == (tied and expected == "different")
    assert ("`lm_head.weight` equals" in text) == (tied and expected == "equal")
    lost = any("there is no lm_head.weight" in warning for warning in report.plan.warnings)
    assert lost == (not tied and head == "absent")


def test_sidecars_outside_the_index_are_carried_and_reported(moe_folder, tmp_path, builder):
    extra = {"mtp.layers.0.mlp.weight": ("BF16", np.ones((4, 4), np.uint16))}
    (moe_folder / "mtp.safetensors").write_bytes(builder.file_bytes(extra, {"format": "pt"}))
    report = convert(moe_folder, tmp_path / "out")
    copied = (tmp_path / "out" / "mtp.safetensors").read_bytes()
    assert copied == (moe_folder / "mtp.safetensors").read_bytes()
    assert any("mtp.safetensors" in warning for warning in report.plan.warnings)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "mtp.layers.0.mlp.weight" not in index["weight_map"]
    assert verify(tmp_path / "out", moe_folder, deep=True).ok


def test_a_sidecar_that_repeats_a_tensor_is_refused(moe_folder, builder):
    extra = {"lm_head.weight": ("BF16", np.ones((4, 4), np.uint16))}
    (moe_folder / "mtp.safetensors").write_bytes(builder.file_bytes(extra))
    with pytest.raises(CorruptCheckpointError, match="the tensor is also in"):
        plan_conversion(moe_folder)


def test_stacks_need_every_expert(tmp_path, builder):
    tensors = {name: t for name, t in builder.moe().items() if ".experts.2." not in name}
    folder = builder.write(tmp_path / "s", [tensors], builder.moe_config())
    with pytest.raises(CorruptCheckpointError, match="expert 2 of 4 is not among"):
        plan_conversion(folder, options=OutputOptions(format="mlx"))


def test_layouts_of_one_architecture_refuse_others(moe_folder):
    with pytest.raises(UnsupportedFormatError, match="has no names for models of type"):
        plan_conversion(moe_folder, options=OutputOptions(format="gpt-oss"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_who_loads_it(name):
    assert FORMATS[name].summary
    assert FORMATS[name].name == name
