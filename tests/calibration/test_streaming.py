"""A model run block by block against the same model run by transformers."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mxfp4
from mxfp4.calibration.streaming.layout import Layout
from mxfp4.calibration.streaming.parts import BankPart, LinearPart, find_parts
from mxfp4.calibration.streaming.skeleton import ModelOptions, Skeleton
from mxfp4.calibration.streaming.weights import Weights
from mxfp4.converters.checkpoint import open_checkpoint
from mxfp4.converters.convert import convert
from mxfp4.converters.planning import make_plan
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.errors import TensorNotFoundError, UnsupportedFormatError

LINEAR = Recipe(level=Level.LINEAR)


def block_by_block(folder, tokens):
    with Weights(open_checkpoint(folder)) as weights:
        skeleton = Skeleton(Path(folder), weights, ModelOptions())
        assert all(p.is_meta for p in skeleton.layers.parameters())
        hidden = skeleton.embed(tokens)
        for number in range(len(skeleton.layers)):
            with skeleton.filled(number, weights):
                hidden = skeleton.run(number, hidden)
            assert all(p.is_meta for p in skeleton.layers.parameters())
        return skeleton.logits(hidden)


def test_source_gives_the_logits_of_transformers(tiny_moe, few_samples):
    tokens = few_samples.tokens[:2]
    model = AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
    torch.testing.assert_close(block_by_block(tiny_moe, tokens), wanted, atol=1e-3, rtol=1e-4)


def test_converted_gives_the_logits_of_its_dequantized_weights(
    tmp_path, builder, runnable, small_moe, small_samples
):
    convert(small_moe, tmp_path / "out", LINEAR)
    tokens = small_samples.tokens[:2]
    plain = {}
    with Weights(open_checkpoint(tmp_path / "out")) as weights:
        for name, (dtype, shape, raw) in builder.read(small_moe).items():
            module = name.removesuffix(".weight")
            value = weights.module(module) if len(shape) == 2 else weights.raw(name)
            assert tuple(value.shape) == shape
            bits = value.bfloat16().contiguous().view(torch.int16).numpy().view("u2")
            plain[name] = (dtype, bits)
            assert bits.nbytes == len(raw)
    folder = builder.write(tmp_path / "plain", [plain], runnable(3)[1])
    expected = block_by_block(folder, tokens)
    assert torch.equal(block_by_block(tmp_path / "out", tokens), expected)
    assert not torch.allclose(block_by_block(small_moe, tokens), expected, atol=1e-4)


def test_parts_are_all_quantized_modules_once(tiny_moe):
    plan = make_plan(open_checkpoint(tiny_moe), LINEAR)
    layout = Layout.of_plan(plan)
    wanted = {t.module for s in plan.shards for t in s.tasks if t.module is not None}
    found = []
    with Weights(plan.checkpoint, layout) as weights:
        skeleton = Skeleton(tiny_moe, weights, ModelOptions())
        for number, layer in enumerate(skeleton.layers):
            parts = find_parts(layer, f"model.layers.{number}", layout, plan)
            for part in parts:
                if isinstance(part, BankPart):
                    assert part.path == "mlp.experts"
                    slots = [s for side in (part.first, part.second) for e in side for s in side[e]]
                    assert [s.module.split(".")[-2] for s in part.first[7]] == ["7", "7"]
                else:
                    assert isinstance(part, LinearPart)
                    slots = list(part.slots)
                found += [slot.module for slot in slots]
    assert sorted(found) == sorted(wanted)


def test_slots_are_the_stored_matrices(tiny_moe):
    plan = make_plan(open_checkpoint(tiny_moe), LINEAR)
    layout = Layout.of_plan(plan)
    name, shape = "model.layers.2.mlp.experts.gate_up_proj", torch.Size([32, 256, 128])
    with Weights(plan.checkpoint, layout) as weights:
        stacked = weights.parameter(name, shape, torch.bfloat16)
        for slot in layout.slots(name, shape)[::9]:
            assert torch.equal(slot.of(stacked), weights.module(slot.module))


def test_weights_that_do_not_fit_the_config_are_named(tmp_path, builder, runnable, small_samples):
    tensors, config = runnable(1)
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    folder = builder.write(tmp_path / "a", [tensors], config)
    with pytest.raises(TensorNotFoundError, match=r"layers\.0\.self_attn\.q_norm"):
        block_by_block(folder, small_samples.tokens[:1])


def test_an_unknown_architecture_says_how_to_go_on(tmp_path, builder, small_samples):
    config = builder.moe_config(model_type="never_heard_of", architectures=["NeverHeardOf"])
    folder = builder.write(tmp_path / "a", [builder.moe()], config)
    with pytest.raises(UnsupportedFormatError, match="trust-remote-code"):
        block_by_block(folder, small_samples.tokens[:1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's resident size")
def test_memory_does_not_follow_the_number_of_layers(tmp_path, builder, runnable):
    """What a calibration still holds after 8 and after 32 layers of 3.7 MB each, source included.

    Not its peak, which moves by tens of MB with the moment at which temporaries are let go.
    """
    program = """
import sys, torch
from mxfp4.calibration.calibrate import CalibrationOptions, MethodOptions, calibrate
from mxfp4.calibration.samples import Samples
from mxfp4.converters.recipe import Level, Recipe

def tell(done, total):
    status = open("/proc/self/status").read()
    print(1024 * int(status.split("RssAnon:")[1].split()[0]), flush=True)

torch.set_num_threads(1)
tokens = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0))
samples = Samples(tokens, ("a",) * 4)
options = CalibrationOptions(MethodOptions("even", refit_routers=True))
calibrate(sys.argv[1], sys.argv[2], samples, Recipe(level=Level.LINEAR), options, on_layer=tell)
"""
    tensors, config = runnable(32, 128, experts=4, hidden=256, inter=512)
    folder = builder.write(tmp_path / "deep", builder.split(tensors, 3), config)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size > 32 * 3.6e6
    done = subprocess.run(
        [sys.executable, "-c", program, folder, tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(Path(mxfp4.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    held = [int(line) for line in done.stdout.split()]
    assert len(held) == 33
    assert held[32] - held[8] < 8e6  # 24 layers are 88 MB in BF16 and twice that in float32


def test_samples_halves_hold_every_domain(few_samples):
    for half in (0, 1):
        chosen = {
            d for d, h in zip(few_samples.domains, few_samples.halves, strict=True) if h == half
        }
        assert chosen == set(few_samples.domains)
    one = replace(few_samples, tokens=few_samples.tokens[:1], domains=("a",))
    assert one.halves == (0,)
