"""Every MXFP4 layout into every other one: the same codes and scale bytes, under other names."""

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from mxfp4.converters.convert import RunOptions, convert
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.verify import verify

_spec = importlib.util.spec_from_file_location("layouts", Path(__file__).with_name("layouts.py"))
assert _spec is not None
assert _spec.loader is not None
layouts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layouts)

SOURCES = [name for name in layouts.WRITERS if name != "bf16"]
TARGETS = [name for name in layouts.WRITERS if name != "ling"]
CODES = layouts.random_codes()


def model_for(source, target):
    """The one architecture that a target exists for; gpt-oss's own where it can be."""
    if target == "gpt-oss" or (source == "gpt-oss" and target != "mlx"):
        return "gpt_oss"
    return "qwen3_moe"


@pytest.mark.parametrize(
    ("source", "target"),
    [pair for pair in itertools.product(SOURCES, TARGETS) if pair != ("gpt-oss", "bf16")],
)
def test_every_ordered_pair(source, target, tmp_path, builder):
    model = model_for(source, target)
    folder = layouts.write_source(builder, tmp_path / "source", source, CODES, model)
    output = tmp_path / "out"
    run = RunOptions(workers=1, slab_bytes=1000)
    convert(folder, output, options=OutputOptions(format=target), run=run)
    expected = layouts.WRITERS[target](CODES, model) | layouts.kept_tensors(builder)
    assert builder.read(output) == layouts.as_read(expected)
    result = verify(output, folder, deep=True)
    assert result.ok, result.findings
    config = json.loads((output / "config.json").read_text())
    assert "expert_dtype" not in config or target == "deepseek-v4"
    assert ("quantization_config" in config) == (target != "bf16")
    assert ("quantization" in config) == (target == "mlx")


def test_the_bf16_form_of_gpt_oss_is_stacked_and_transposed(tmp_path, builder):
    folder = layouts.write_source(builder, tmp_path / "s", "gpt-oss", CODES, "gpt_oss")
    options = OutputOptions(format="bf16")
    for name, slab in (("a", 1000), ("b", 1 << 20)):
        convert(folder, tmp_path / name, options=options, run=RunOptions(slab_bytes=slab))
        output = builder.read(tmp_path / name)
        for layer in range(layouts.LAYERS):
            base = f"model.layers.{layer}.mlp.experts."
            dtype, shape, raw = output[base + "gate_up_proj"]
            assert (dtype, shape) == ("BF16", (4, layouts.HIDDEN, 2 * layouts.INTER))
            bits = np.frombuffer(raw, np.uint16).reshape(shape)
            found = (bits.astype(np.uint32) << 16).view(np.float32)
            for expert in range(layouts.EXPERTS):
                for lane, projection in enumerate(("gate_proj", "up_proj")):
                    wanted = layouts.values(*CODES[layer, expert, projection])
                    assert np.array_equal(found[expert, :, lane::2], wanted.T)
            assert output[base + "down_proj"][1] == (4, layouts.INTER, layouts.HIDDEN)
    assert builder.read(tmp_path / "a") == builder.read(tmp_path / "b")
    assert verify(tmp_path / "a", folder, deep=True).ok


@pytest.mark.parametrize("target", ["compressed-tensors", "gpt-oss", "mlx", "gguf-blocks", "fp8"])
@pytest.mark.parametrize("source", ["compressed-tensors", "gpt-oss", "mlx"])
def test_bytes_do_not_depend_on_slabs_workers_and_shards(source, target, tmp_path, builder):
    model = model_for(source, target)
    folder = layouts.write_source(builder, tmp_path / "source", source, CODES, model)
    found = []
    for number, (slab, shard, layout) in enumerate(
        ((1 << 20, 5 * 10**9, "pack"), (64, 20_000, "pack"), (3000, 5 * 10**9, "same"))
    ):
        convert(
            folder,
            tmp_path / str(number),
            options=OutputOptions(target, shard, layout),
            run=RunOptions(workers=2, slab_bytes=slab),
        )
        found.append(builder.read(tmp_path / str(number)))
    assert found[0] == found[1] == found[2]


def bank(builder, rng, *shape):
    return "BF16", builder.bf16(rng.normal(0, 0.05, shape))


@pytest.mark.parametrize("slab_bytes", [500, 1 << 20])
def test_bf16_gpt_oss_is_transposed_and_stays_interleaved(slab_bytes, tmp_path, builder):
    from mxfp4.kernels.rows import encode_rows

    rng = np.random.default_rng(3)
    hidden, inter = layouts.HIDDEN, layouts.INTER
    base = "model.layers.0.mlp."
    tensors = layouts.kept_tensors(builder) | {
        base + "experts.gate_up_proj": bank(builder, rng, 4, hidden, 2 * inter),
        base + "experts.down_proj": bank(builder, rng, 4, inter, hidden),
        base + "experts.gate_up_proj_bias": bank(builder, rng, 4, 2 * inter),
        base + "experts.down_proj_bias": bank(builder, rng, 4, hidden),
    }
    config = layouts.config_of(builder, "bf16", "gpt_oss")
    folder = builder.write(tmp_path / "source", builder.split(tensors, 3), config)
    options, run = OutputOptions(format="gpt-oss"), RunOptions(slab_bytes=slab_bytes)
    convert(folder, tmp_path / "out", options=options, run=run)
    output = builder.read(tmp_path / "out")
    for leaf in ("gate_up_proj", "down_proj"):
        bits = tensors[f"{base}experts.{leaf}"][1]
        bias = f"{base}experts.{leaf}_bias"
        assert output[bias] == layouts.as_read(tensors)[bias]
        rows = np.ascontiguousarray(bits.transpose(0, 2, 1))
        encoded = encode_rows(rows.reshape(-1, rows.shape[-1]), "BF16")
        blocks, scales = (output[f"{base}experts.{leaf}_{name}"] for name in ("blocks", "scales"))
        assert blocks[:2] == ("U8", (*rows.shape[:2], rows.shape[2] // 32, 16))
        assert blocks[2] == encoded.codes.tobytes()
        assert scales[2] == encoded.scales.tobytes()
    assert verify(tmp_path / "out", folder, deep=True).ok
