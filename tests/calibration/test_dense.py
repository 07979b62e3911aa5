"""Folds in a dense model with grouped-query attention: exact before rounding, better after it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mxfp4.calibration.calibrate import CalibrationOptions, calibrate
from mxfp4.calibration.compare import compare
from mxfp4.calibration.folds import Folds
from mxfp4.calibration.methods import MethodOptions
from mxfp4.calibration.samples import Samples
from mxfp4.calibration.streaming.capture import observe
from mxfp4.calibration.streaming.parts import LinearPart
from mxfp4.calibration.streaming.skeleton import ModelOptions
from mxfp4.calibration.streaming.walk import Visit, Walk
from mxfp4.converters.checkpoint import open_checkpoint
from mxfp4.converters.planning import make_plan
from mxfp4.converters.recipe import Level, Recipe

LINEAR = Recipe(level=Level.LINEAR)


@pytest.fixture(scope="module")
def dense(tmp_path_factory, builder):
    """A random Llama of two layers whose channels differ a lot in size."""
    rng = np.random.default_rng(0)
    gains = lambda n: ("BF16", builder.bf16(np.exp(rng.normal(0, 1.0, n))))  # noqa: E731

    def normal(*shape):
        return "BF16", builder.bf16(rng.normal(0, shape[-1] ** -0.5, shape))

    tensors = {"model.embed_tokens.weight": normal(128, 64), "model.norm.weight": gains(64)}
    for layer in range(2):
        base = f"model.layers.{layer}."
        tensors[base + "input_layernorm.weight"] = gains(64)
        tensors[base + "post_attention_layernorm.weight"] = gains(64)
        for name, shape in (
            ("self_attn.q_proj", (64, 64)),
            ("self_attn.k_proj", (32, 64)),
            ("self_attn.v_proj", (32, 64)),
            ("self_attn.o_proj", (64, 64)),
            ("mlp.gate_proj", (160, 64)),
            ("mlp.up_proj", (160, 64)),
            ("mlp.down_proj", (64, 160)),
        ):
            tensors[f"{base}{name}.weight"] = normal(*shape)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": True,
    }
    return builder.write(tmp_path_factory.mktemp("dense") / "source", [tensors], config)


@pytest.fixture(scope="module")
def tokens():
    drawn = torch.randint(0, 128, (24, 64), generator=torch.Generator().manual_seed(0))
    return Samples(drawn, tuple(f"domain{i % 3}" for i in range(24)))


def test_folds_change_weights_and_norms_and_nothing_else(dense, tokens, tmp_path):
    plan = make_plan(open_checkpoint(dense), LINEAR)
    seen = []

    def visit(visit: Visit) -> None:
        parts = [part for part in visit.parts if isinstance(part, LinearPart)]
        moments, _ = observe(visit, parts, [])
        before = [visit.run(batch) for batch in visit.batches]
        weights = {n: p.detach().clone() for n, p in visit.layer.named_parameters()}
        folds = Folds(visit, torch.bfloat16, norms=True)
        folded = folds.fold(parts, moments)
        after = [visit.run(batch) for batch in visit.batches]
        for one, two in zip(before, after, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
        again, _ = observe(visit, parts, [])
        for key, moment in folded.items():  # rescaled moments are those of the folded inputs
            torch.testing.assert_close(moment.mean(), again[key].mean(), rtol=1e-3, atol=1e-3)
        changed = [n for n, p in visit.layer.named_parameters() if not torch.equal(p, weights[n])]
        seen.append((sorted(changed), sorted(folds.changed), folds.notes))

    Walk(plan, tokens, tmp_path, ModelOptions()).go(0, visit, lambda number: None)
    for number, (changed, norms, notes) in enumerate(seen):
        base = f"model.layers.{number}."
        known = {base + "input_layernorm.weight", base + "post_attention_layernorm.weight"}
        assert set(norms) <= known  # a fold that would not help is left out
        assert {base + name for name in changed if "norm" in name} == set(norms)
        assert notes == []
    assert sum(len(norms) for _, norms, _ in seen) >= 2
    consumers = {name for changed, _, _ in seen for name in changed}
    assert consumers & {"self_attn.o_proj.weight", "mlp.down_proj.weight"}


def test_gptq_plus_writes_the_folded_norms_and_beats_even(builder, dense, tokens, tmp_path):
    kl = {}
    fresh = Samples(tokens.tokens.flip(1), tokens.domains)
    for method in ("even", "gptq", "gptq+"):
        out = tmp_path / method
        report = calibrate(dense, out, tokens, LINEAR, CalibrationOptions(MethodOptions(method)))
        kl[method] = compare(dense, out, fresh).to_json()["all"]["kl"]
        changed = report.to_json()["summary"]["changed_tensors"]
        source, written = builder.read(dense), builder.read(out)
        differing = sorted(n for n in source if n in written and source[n] != written[n])
        assert differing == changed
        assert all(name.endswith("layernorm.weight") for name in changed)
        assert bool(changed) == (method == "gptq+")
    assert kl["gptq"] < 0.9 * kl["even"]
    assert kl["gptq+"] < kl["gptq"]
    assert Path(tmp_path / "gptq+" / "mxfp4_calibration.json").is_file()
