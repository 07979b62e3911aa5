"""DeepSeek-V4 as published: packed experts beside FP8 layers, told apart by their companions."""

import json

import numpy as np
import pytest

from mxfp4.converters.convert import convert
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.verify import verify

HIDDEN, INTER = 256, 128
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTER,
    "n_routed_experts": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


def tensors_of(builder):
    rng = np.random.default_rng(6)

    def normal(*shape):
        return "BF16", builder.bf16(rng.normal(0, 0.05, shape))

    def codes(rows, columns):
        return "I8", rng.integers(-128, 128, (rows, columns // 2), dtype=np.int8)

    def exponents(*shape):
        return "F8_E8M0", rng.integers(110, 130, shape, dtype=np.uint8)

    def fp8(rows, columns):
        return "F8_E4M3", rng.integers(0, 0x7F, (rows, columns), dtype=np.uint8)

    tensors: dict[str, object] = {"embed.weight": normal(64, HIDDEN), "norm.weight": normal(HIDDEN)}
    for prefix in ("layers.0.", "layers.1.", "mtp.0."):
        tensors[prefix + "attn_norm.weight"] = normal(HIDDEN)
        for name, shape in (("wq_a", (128, HIDDEN)), ("wo_b", (HIDDEN, 128))):
            tensors[f"{prefix}attn.{name}.weight"] = fp8(*shape)
            grid = (-(-shape[0] // 128), -(-shape[1] // 128))
            tensors[f"{prefix}attn.{name}.scale"] = exponents(*grid)
        tensors[prefix + "ffn.gate.weight"] = normal(4, HIDDEN)
        for name, (rows, columns) in (
            ("w1", (INTER, HIDDEN)),
            ("w3", (INTER, HIDDEN)),
            ("w2", (HIDDEN, INTER)),
        ):
            tensors[f"{prefix}ffn.shared_experts.{name}.weight"] = fp8(rows, columns)
            tensors[f"{prefix}ffn.shared_experts.{name}.scale"] = exponents(
                rows // 128, columns // 128
            )
            for expert in range(4):
                module = f"{prefix}ffn.experts.{expert}.{name}"
                tensors[module + ".weight"] = codes(rows, columns)
                tensors[module + ".scale"] = exponents(rows, columns // 32)
    tensors["head.weight"] = normal(64, HIDDEN)
    return tensors


@pytest.fixture
def source(tmp_path, builder):
    return builder.write(tmp_path / "source", builder.split(tensors_of(builder), 3), CONFIG)


def test_its_own_layout_changes_nothing(source, tmp_path, builder):
    convert(source, tmp_path / "out", options=OutputOptions(format="deepseek-v4"))
    assert builder.read(tmp_path / "out") == builder.read(source)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert verify(tmp_path / "out", source, deep=True).ok


def test_mimo_and_back(source, tmp_path, builder):
    convert(source, tmp_path / "mimo", options=OutputOptions(format="mimo"))
    found = builder.read(tmp_path / "mimo")
    assert found["layers.0.attn.wq_a.weight_scale_inv"][0] == "F8_E8M0"
    assert found["mtp.0.ffn.experts.3.w2.weight"][0] == "U8"
    assert found["mtp.0.ffn.experts.3.w2.weight_scale"][0] == "U8"
    assert not any(name.endswith(".scale") for name in found)
    config = json.loads((tmp_path / "mimo" / "config.json").read_text())
    assert "expert_dtype" not in config
    assert "scale_fmt" not in config["quantization_config"]
    options = OutputOptions(format="deepseek-v4")
    convert(tmp_path / "mimo", tmp_path / "back", options=options)
    assert builder.read(tmp_path / "back") == builder.read(source)


def test_compressed_tensors_decodes_what_is_no_mxfp4(source, tmp_path, builder):
    report = convert(source, tmp_path / "out")
    before, after = builder.read(source), builder.read(tmp_path / "out")
    for name, (dtype, _, raw) in before.items():
        if dtype == "I8":
            base = name.removesuffix(".weight")
            assert after[base + ".weight_packed"][::2] == ("U8", raw)
            assert after[base + ".weight_scale"][::2] == ("U8", before[base + ".scale"][2])
        elif dtype == "F8_E4M3":
            assert after[name][0] == "BF16"
    totals = report.plan.totals
    assert (totals["passed"], totals["decoded"], totals["quantized"]) == (36, 15, 0)
    assert verify(tmp_path / "out", source, deep=True).ok
