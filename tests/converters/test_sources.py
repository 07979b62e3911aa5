"""FP8, INT4 and NVFP4 sources: what is quantized is exactly what they dequantize to in float32."""

import json

import ml_dtypes
import numpy as np
import pytest

from mxfp4.converters.convert import RunOptions, convert, plan_conversion
from mxfp4.converters.inspection import inspect
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.verify import verify
from mxfp4.errors import CheckpointError, NonFiniteError, RecipeError
from mxfp4.kernels.rows import encode_rows

HIDDEN, INTER = 160, 224
SHAPES = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def kept(builder):
    return {
        "model.embed_tokens.weight": ("BF16", np.ones((128, HIDDEN), np.uint16)),
        "model.layers.0.input_layernorm.weight": ("BF16", np.ones(HIDDEN, np.uint16)),
    }


def write(builder, folder, make, quantization=None, **options):
    """One dense layer; every companion lies in another shard than its weight."""
    weights, scales, extra = {}, {}, {}
    expected = {}
    rng = np.random.default_rng(7)
    for name, (rows, columns) in SHAPES.items():
        base = f"model.layers.0.mlp.{name}"
        stored, expected[base] = make(rng, rows, columns, **options)
        for number, (leaf, tensor) in enumerate(stored.items()):
            (weights, scales, extra)[min(number, 2)][base + leaf] = tensor
    config = dict(CONFIG)
    if quantization is not None:
        config["quantization_config"] = quantization
    shards = [weights, {**kept(builder), **scales}, extra]
    return builder.write(folder, [shard for shard in shards if shard], config), expected


def fp8(rng, rows, columns, *, block, scale_dtype="F32", leaf=".weight_scale_inv", shape=None):
    raw = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    raw[(raw & 0x7F) == 0x7F] = 0x41
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if scale_dtype in ("U8", "F8_E8M0"):
        stored = rng.integers(110, 130, grid, dtype=np.uint8)
        scales = np.exp2(stored.astype(np.float32) - 127)
    else:
        scales = np.exp2(rng.normal(-6, 1, grid)).astype(np.float32)
        stored = scales
        if scale_dtype == "BF16":
            stored = (scales.view(np.uint32) >> 16).astype(np.uint16)
            scales = (stored.astype(np.uint32) << 16).view(np.float32)
    spread = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:rows, :columns]
    values = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * spread
    if shape is not None:
        stored = stored.reshape(shape)
    return {".weight": ("F8_E4M3", raw), leaf: (scale_dtype, stored)}, values


def assert_encoded(output, expected):
    for module, values in expected.items():
        encoded = encode_rows(np.ascontiguousarray(values, np.float32), "F32")
        assert output[f"{module}.weight_packed"][2] == encoded.codes.tobytes(), module
        assert output[f"{module}.weight_scale"][2] == encoded.scales.tobytes(), module


FP8_KINDS = {
    "128x128": {"block": (128, 128)},
    "128x128 as BF16": {"block": (128, 128), "scale_dtype": "BF16"},
    "128x128 as F8_E8M0": {"block": (128, 128), "scale_dtype": "F8_E8M0", "leaf": ".scale"},
    "128x128 as U8": {"block": (128, 128), "scale_dtype": "U8"},
    "32x32 as F8_E8M0": {"block": (32, 32), "scale_dtype": "F8_E8M0", "leaf": ".scale"},
    "MXFP8": {"block": (1, 32), "scale_dtype": "U8", "leaf": ".weight_scale"},
    "per tensor": {"block": (512, 512), "leaf": ".weight_scale", "shape": ()},
    "per tensor [1]": {"block": (512, 512), "leaf": ".weight_scale", "shape": (1,)},
    "per channel": {"block": (1, 512), "leaf": ".weight_scale"},
    "per channel [N]": {"block": (1, 512), "leaf": ".weight_scale", "shape": (-1,)},
}


@pytest.mark.parametrize("slab_bytes", [2000, 1 << 20])
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8_is_dequantized_to_float32_and_then_quantized(kind, slab_bytes, tmp_path, builder):
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder, expected = write(builder, tmp_path / "s", fp8, quantization, **FP8_KINDS[kind])
    report = convert(folder, tmp_path / "out", run=RunOptions(slab_bytes=slab_bytes))
    output = builder.read(tmp_path / "out")
    assert_encoded(output, expected)
    assert set(output) == {
        f"{m}.weight_{leaf}" for m in expected for leaf in ("packed", "scale")
    } | {*kept(builder)}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert verify(tmp_path / "out", folder, deep=True).ok
    assert any("3 FP8 tensor(s) are decoded" in text for text in report.plan.warnings)


def int4(rng, rows, columns, *, group=32):
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    packed = codes.reshape(rows, -1, 8).astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))
    words = np.bitwise_or.reduce(packed, axis=-1).view(np.int32)
    scales = (np.exp2(rng.normal(-6, 1, (rows, columns // group))).astype(np.float32)).view(
        np.uint32
    ) >> 16
    values = (codes.astype(np.float32) - 8) * np.repeat(
        (scales << 16).view(np.float32), group, axis=1
    )
    shape = np.array([rows, columns], np.int64)
    return {
        ".weight_packed": ("I32", words),
        ".weight_scale": ("BF16", scales.astype(np.uint16)),
        ".weight_shape": ("I64", shape),
    }, values


def nvfp4(rng, rows, columns, *, modelopt):
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = rng.uniform(1, 400, (rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
    overall = np.array(0.0123 if modelopt else 812.5, np.float32)
    wide = scales.astype(np.float32)
    combined = wide * overall if modelopt else wide / overall
    values = E2M1[codes] * np.repeat(combined, 16, axis=1)
    names = (
        (".weight", ".weight_scale", ".weight_scale_2")
        if modelopt
        else (".weight_packed", ".weight_scale", ".weight_global_scale")
    )
    tensors = (
        ("U8", codes[:, 0::2] | (codes[:, 1::2] << 4)),
        ("F8_E4M3", scales.view(np.uint8)),
        ("F32", overall if modelopt else overall.reshape(1)),
    )
    extra = {".input_scale": ("F32", np.ones((), np.float32))}
    return dict(zip(names, tensors, strict=True)) | extra, values


OTHERS = {
    "INT4": (int4, {}),
    "NVFP4 compressed-tensors": (nvfp4, {"modelopt": False}),
    "NVFP4 ModelOpt": (nvfp4, {"modelopt": True}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_four_bit_sources_are_dequantized_to_float32(kind, tmp_path, builder):
    make, options = OTHERS[kind]
    folder, expected = write(builder, tmp_path / "s", make, {"quant_method": "any"}, **options)
    report = convert(folder, tmp_path / "out", run=RunOptions(slab_bytes=3000))
    output = builder.read(tmp_path / "out")
    assert_encoded(output, expected)
    stale = ("weight_shape", "input_scale", "weight_global_scale", "weight_scale_2")
    assert not [name for name in output if name.endswith(stale)]
    assert report.plan.totals["dropped"] == 3
    assert verify(tmp_path / "out", folder, deep=True).ok


def rounded(values):
    return np.ascontiguousarray(values).astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("kind", [*FP8_KINDS, *OTHERS])
def test_everything_decodes_to_the_nearest_bf16(kind, tmp_path, builder):
    make, options = OTHERS.get(kind, (fp8, FP8_KINDS.get(kind)))
    folder, expected = write(builder, tmp_path / "s", make, {"quant_method": "any"}, **options)
    convert(folder, tmp_path / "out", options=OutputOptions(format="bf16"))
    output = builder.read(tmp_path / "out")
    for module, values in expected.items():
        assert output[f"{module}.weight"] == ("BF16", values.shape, rounded(values).tobytes())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert verify(tmp_path / "out", folder, deep=True).ok


def moe_fp8(builder, folder, scale_dtype="F32"):
    """Experts and attention in FP8; routers, norms and embeddings in BF16."""
    rng = np.random.default_rng(9)
    tensors, values = {}, {}
    leaf = ".weight_scale_inv"
    for name, (dtype, bits) in builder.moe().items():
        if "proj" in name:
            stored, values[name] = fp8(
                rng, *bits.shape, block=(128, 128), scale_dtype=scale_dtype, leaf=leaf
            )
            module = name.removesuffix(".weight")
            tensors |= {module + key: tensor for key, tensor in stored.items()}
        else:
            tensors[name] = dtype, bits
    config = builder.moe_config(
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    return builder.write(folder, builder.split(tensors, 3), config), values


@pytest.mark.parametrize("scale_dtype", ["F32", "U8"])
def test_mimo_keeps_dense_fp8_layers(scale_dtype, tmp_path, builder):
    folder, values = moe_fp8(builder, tmp_path / "source", scale_dtype)
    convert(folder, tmp_path / "out", options=OutputOptions(format="mimo"))
    source, output = builder.read(folder), builder.read(tmp_path / "out")
    for name in values:
        scale = name + "_scale_inv"
        if ".experts." in name:
            encoded = encode_rows(np.ascontiguousarray(values[name]), "F32")
            assert output[name][::2] == ("U8", encoded.codes.tobytes())
            assert output[name + "_scale"][::2] == ("U8", encoded.scales.tobytes())
            assert scale not in output
        else:
            assert output[name] == source[name]
            # An engine copies scales by value: an E8M0 byte must not be called U8.
            assert output[scale][0] == ("F8_E8M0" if scale_dtype == "U8" else "F32")
            assert output[scale][1:] == source[scale][1:]
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (found["quant_method"], found["store_dtype"]) == ("fp8", "mxfp4")
    assert found["ignored_layers"] == [
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
        "lm_head",
    ]
    assert verify(tmp_path / "out", folder, deep=True).ok


def test_compressed_tensors_decodes_dense_fp8_layers_and_ignores_them(tmp_path, builder):
    folder, values = moe_fp8(builder, tmp_path / "source")
    report = convert(folder, tmp_path / "out")
    output = builder.read(tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert output[name] == ("BF16", (64, 64), rounded(values[name]).tobytes())
    assert not any("scale_inv" in name for name in output)
    assert any("q_proj" in pattern or "self_attn" in pattern for pattern in report.plan.ignore)
    assert report.plan.totals["decoded"] == 8
    assert verify(tmp_path / "out", folder, deep=True).ok


def test_experts_only_layouts_refuse_wider_levels(tmp_path, builder, moe_folder):
    for name in ("mxfp4", "mimo", "deepseek-v4"):
        with pytest.raises(RecipeError, match="holds expert weights only"):
            plan_conversion(moe_folder, Recipe(level=Level.LINEAR), OutputOptions(format=name))


def test_fp8_output_counts_blocks_that_lose_something(tmp_path, builder):
    rng = np.random.default_rng(2)

    def mxfp4(rng_, rows, columns):
        codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
        scales = rng.integers(120, 130, (rows, columns // 32), dtype=np.uint8)
        if rows == HIDDEN:
            scales[0, 0], scales[0, 1], codes[0, 3], codes[0, 40] = 100, 140, 1, 1
        values = E2M1[codes] * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=1)
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return {".weight_packed": ("U8", packed), ".weight_scale": ("U8", scales)}, values

    folder, expected = write(builder, tmp_path / "s", mxfp4, {"quant_method": "x"})
    report = convert(folder, tmp_path / "out", options=OutputOptions(format="fp8"))
    assert report.to_json()["lossy_blocks"] == 1
    assert "1 FP8 block(s)" in (tmp_path / "out" / "mxfp4_report.md").read_text()
    output = builder.read(tmp_path / "out")
    for module, values in expected.items():
        dtype, shape, raw = output[f"{module}.weight"]
        scale_dtype, grid, scales = output[f"{module}.weight_scale_inv"]
        assert (dtype, scale_dtype) == ("F8_E4M3", "F32")
        assert grid == (2, 2)
        spread = np.repeat(np.repeat(np.frombuffer(scales, "<f4").reshape(grid), 128, 0), 128, 1)
        decoded = np.frombuffer(raw, ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(shape)
        exact = decoded * spread[: shape[0], : shape[1]] == values
        assert exact.all() == ("down_proj" not in module)
    assert verify(tmp_path / "out", folder, deep=True).ok


GATE = "model.layers.0.mlp.gate_proj"

WRONG = {
    "FP8 without scale": (
        {f"{GATE}.weight": ("F8_E4M3", np.zeros((64, 64), np.uint8))},
        "has no scale",
    ),
    "one byte without scale": (
        {f"{GATE}.weight": ("U8", np.zeros((64, 32), np.uint8))},
        "never taken for FP8",
    ),
    "packed without scale": (
        {f"{GATE}.weight_packed": ("U8", np.zeros((64, 32), np.uint8))},
        "has no scale beside it",
    ),
    "INT4 without scale": (
        {f"{GATE}.weight_packed": ("I32", np.zeros((64, 8), np.int32))},
        "has no scale",
    ),
    "scale without weight": (
        {
            f"{GATE}.weight_scale": ("U8", np.zeros((64, 2), np.uint8)),
            "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", np.zeros((64, 64), np.uint8)),
            "model.layers.0.mlp.up_proj.weight_scale": ("F32", np.ones((1,), np.float32)),
        },
        "have no weight beside them",
    ),
    "scale of another shape": (
        {
            f"{GATE}.weight": ("U8", np.zeros((64, 32), np.uint8)),
            f"{GATE}.weight_scale": ("U8", np.zeros((64, 3), np.uint8)),
        },
        "do not belong together",
    ),
    "FP8 scale of another shape": (
        {
            f"{GATE}.weight": ("F8_E4M3", np.zeros((64, 64), np.uint8)),
            f"{GATE}.weight_scale_inv": ("F32", np.ones((3, 5), np.float32)),
        },
        "fits no known block",
    ),
    "two forms of one weight": (
        {
            f"{GATE}.weight": ("BF16", np.zeros((64, 64), np.uint16)),
            f"{GATE}.weight_packed": ("U8", np.zeros((64, 32), np.uint8)),
            f"{GATE}.weight_scale": ("U8", np.zeros((64, 2), np.uint8)),
        },
        "both hold this weight",
    ),
    "INT8": (
        {
            f"{GATE}.weight": ("I8", np.zeros((64, 64), np.int8)),
            f"{GATE}.weight_scale": ("F32", np.ones((64, 1), np.float32)),
        },
        "is no layout that is read here",
    ),
    "GPTQ": (
        {f"{GATE}.qweight": ("I32", np.zeros((8, 64), np.int32))},
        "GPTQ or AWQ weights are not read",
    ),
    "asymmetric INT4": (
        {
            f"{GATE}.weight_packed": ("I32", np.zeros((64, 8), np.int32)),
            f"{GATE}.weight_scale": ("BF16", np.zeros((64, 2), np.uint16)),
            f"{GATE}.weight_zero_point": ("I32", np.zeros((8, 2), np.int32)),
        },
        "weight_zero_point is not read",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_add_up_is_named(kind, tmp_path, builder):
    tensors, message = WRONG[kind]
    builder_dtypes = {**kept(builder), **tensors}
    folder = builder.write(tmp_path / "s", [builder_dtypes], CONFIG)
    with pytest.raises(CheckpointError, match=message) as caught:
        plan_conversion(folder)
    assert "model.layers.0.mlp." in caught.value.tensor


def test_scale_byte_255_is_refused_with_its_place(tmp_path, builder):
    tensors = {
        **kept(builder),
        f"{GATE}.weight_packed": ("U8", np.zeros((64, 32), np.uint8)),
        f"{GATE}.weight_scale": ("U8", np.zeros((64, 2), np.uint8)),
    }
    tensors[f"{GATE}.weight_scale"][1][5, 1] = 255
    config = {**CONFIG, "quantization_config": {"quant_method": "x"}}
    folder = builder.write(tmp_path / "s", [tensors], config)
    with pytest.raises(NonFiniteError, match="scale byte of 255") as caught:
        convert(folder, tmp_path / "out")
    assert caught.value.tensor == f"{GATE}.weight_packed"
    assert caught.value.index == (5, 32)


def test_nan_in_fp8_is_named_and_can_be_kept(tmp_path, builder):
    folder, _ = write(builder, tmp_path / "s", fp8, {"quant_method": "fp8"}, block=(128, 128))
    path = folder / "model-00001-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    start = header["model.layers.0.mlp.down_proj.weight"]["data_offsets"][0]
    raw[8 + length + start + 3 * INTER + 7] = 0x7F
    path.write_bytes(raw)
    with pytest.raises(NonFiniteError) as caught:
        convert(folder, tmp_path / "refused")
    assert caught.value.index == (3, 7)
    assert caught.value.tensor == "model.layers.0.mlp.down_proj.weight"
    report = convert(folder, tmp_path / "out", run=RunOptions(keep_nonfinite=True))
    (reason,) = [
        t.decision.reason for t in report.plan.tensors if t.info.name.endswith("down_proj.weight")
    ]
    assert "1 NaN or infinite value(s), first at [3, 7]" in reason


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [
        ("128x128", "FP8 with scales of 128 x 128 (3 modules)"),
        ("per tensor", "FP8 per tensor (3 modules)"),
        ("INT4", "INT4 (3 modules)"),
        ("NVFP4 ModelOpt", "NVFP4 (3 modules)"),
    ],
)
def test_inspection_tells_what_is_stored(kind, phrase, tmp_path, builder):
    make, options = OTHERS.get(kind, (fp8, FP8_KINDS.get(kind)))
    folder, _ = write(builder, tmp_path / "s", make, {"quant_method": "any"}, **options)
    found = inspect(folder)
    assert found.storage == phrase
    assert found.problems == ()
    # Companions count for the role of their weight.
    parts = 3 if "NVFP4" in kind else 2
    assert sum(row["tensors"] for row in found.by_role if row["role"] == "mlp") == 3 * parts


def test_inspection_names_what_does_not_add_up(tmp_path, builder):
    tensors, message = WRONG["FP8 without scale"]
    folder = builder.write(tmp_path / "s", [{**kept(builder), **tensors}], CONFIG)
    assert any(message in problem for problem in inspect(folder).problems)
