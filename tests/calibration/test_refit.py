"""Routers re-fitted on request: the closed form, when it is used, what is written and told."""

import json
import threading
from dataclasses import replace

import pytest
import torch

from mxfp4.calibration.calibrate import (
    CalibrationOptions,
    calibrate,
    calibrate_from,
    collect_statistics,
)
from mxfp4.calibration.methods import MethodOptions
from mxfp4.calibration.refit import Regression
from mxfp4.calibration.routers import check_routers
from mxfp4.calibration.samples import Samples
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role
from mxfp4.converters.verify import verify
from mxfp4.errors import InterruptedConversionError, RecipeError

LINEAR = Recipe(level=Level.LINEAR)
REFIT = CalibrationOptions(MethodOptions("even", refit_routers=True))


@pytest.fixture(scope="module")
def text_samples():
    """Tokens whose order means something to no model, but enough of them to fit a router."""
    tokens = torch.randint(0, 2048, (32, 64), generator=torch.Generator().manual_seed(3))
    return Samples(tokens, tuple(f"domain{i % 4}" for i in range(32)))


@pytest.fixture(scope="module")
def refitted(tmp_path_factory, tiny_moe, text_samples):
    """The example rounded to nearest with re-fitted routers, and its report."""
    folder = tmp_path_factory.mktemp("refitted") / "out"
    report = calibrate(tiny_moe, folder, text_samples, LINEAR, REFIT)
    return folder, report.to_json()


def test_closed_form_is_the_least_of_its_sum():
    """Against plain gradient descent on the sum itself."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, source = draw(3, 8), draw(50, 8)
    inputs = source + 0.3 * draw(50, 8)
    regression = Regression.empty(8, 3)
    half = torch.arange(50) % 2
    regression.add(inputs, source @ weight.T - inputs @ weight.T, half)
    found = weight + regression.solve([0, 1], 0.1)
    ridge = 0.1 * (inputs.T @ inputs).diagonal().mean()
    descending = weight.clone().requires_grad_()
    for _ in range(3000):
        loss = (inputs @ descending.T - source @ weight.T).square().sum()
        loss = loss + ridge * (descending - weight).square().sum()
        (slope,) = torch.autograd.grad(loss, descending)
        descending.data -= 0.002 * slope
    torch.testing.assert_close(found, descending.detach(), atol=1e-9, rtol=1e-9)
    for number in (0, 1):
        mine = half == number
        left = (inputs[mine] @ found.T - source[mine] @ weight.T).square().sum()
        assert regression.error(found - weight, number) == pytest.approx(float(left))


def test_inputs_as_in_the_source_leave_a_router_as_it_is():
    regression = Regression.empty(8, 3)
    regression.add(torch.randn(20, 8), torch.zeros(20, 3), torch.arange(20) % 2)
    assert not regression.solve([0, 1], 0.01).any()
    assert not Regression.empty(8, 3).solve([0], 0.01).any()


def test_only_routers_that_gain_are_changed_and_all_is_told(builder, tiny_moe, refitted):
    folder, report = refitted
    source, output = builder.read(tiny_moe), builder.read(folder)
    changed = {n for n in source if n in output and output[n] != source[n]}
    facts = {n: f for layer in report["layers"] for n, f in layer["routers"].items()}
    assert sorted(facts) == [f"model.layers.{n}.mlp.gate.weight" for n in range(4)]
    assert changed == {name for name, found in facts.items() if found["refitted"]}
    assert changed
    for name, found in facts.items():
        better = found["same_experts_refitted"] > found["same_experts"]
        assert found["refitted"] is better
        if found["refitted"]:
            assert found["logit_error_refitted"] < found["logit_error"]
            assert output[name][:2] == source[name][:2]
    summary = report["summary"]
    assert summary["refitted_routers"] == summary["changed_tensors"] == sorted(changed)
    assert report["options"]["refit_routers"] is True


def test_more_tokens_reach_the_experts_of_the_source(tmp_path, tiny_moe, text_samples, refitted):
    plain = replace(REFIT, method=MethodOptions("even"))
    calibrate(tiny_moe, tmp_path / "plain", text_samples, LINEAR, plain)
    fresh = torch.randint(0, 2048, (16, 64), generator=torch.Generator().manual_seed(4))
    samples = Samples(fresh, ("other",) * 16)
    before = check_routers(tiny_moe, tmp_path / "plain", samples).to_json()["summary"]
    after = check_routers(tiny_moe, refitted[0], samples).to_json()["summary"]
    assert after["same_set"] > before["same_set"]
    assert after["router_kl"] < before["router_kl"]
    assert after["routers_refitted"] == after["protected_changed"] != []
    assert before["routers_refitted"] == before["protected_changed"] == []


def test_verify_knows_that_routers_were_changed_on_purpose(tiny_moe, refitted):
    result = verify(refitted[0], tiny_moe, deep=True)
    assert result.ok, result.to_json()
    count = len(refitted[1]["summary"]["refitted_routers"])
    assert any(note.startswith(f"{count} kept tensors were changed") for note in result.notes)


def test_a_stopped_refit_continues_to_the_same_bytes(builder, tmp_path, small_moe, small_samples):
    refit = CalibrationOptions(MethodOptions("gptq", refit_routers=True))
    calibrate(small_moe, tmp_path / "whole", small_samples, LINEAR, refit)
    stop = threading.Event()

    def on_layer(done, total):
        if done == 2:
            stop.set()

    arguments = (small_moe, tmp_path / "out", small_samples, LINEAR, refit)
    with pytest.raises(InterruptedConversionError):
        calibrate(*arguments, on_layer=on_layer, stop=stop)
    seen = []
    calibrate(*arguments, on_layer=lambda done, total: seen.append(done))
    assert seen == [2, 3]
    assert builder.read(tmp_path / "out") == builder.read(tmp_path / "whole")
    reports = [
        json.loads((tmp_path / name / "mxfp4_calibration.json").read_text())["layers"]
        for name in ("out", "whole")
    ]
    assert reports[0] == reports[1]


def test_batches_and_memory_do_not_matter(builder, tmp_path, small_moe, small_samples):
    """A router sees its tokens in the same order however they are cut into batches."""
    for name, memory in (("one", 4 << 30), ("many", 1)):
        options = replace(REFIT, memory_bytes=memory)
        calibrate(small_moe, tmp_path / name, small_samples, LINEAR, options)
    one, many = builder.read(tmp_path / "one"), builder.read(tmp_path / "many")
    for name, (_, _, raw) in one.items():
        first, second = (
            torch.frombuffer(bytearray(r), dtype=torch.bfloat16).float()
            for r in (raw, many[name][2])
        )
        if name.endswith("mlp.gate.weight"):
            torch.testing.assert_close(first, second, atol=1e-2, rtol=1e-2)


def test_what_cannot_be_done_is_refused(builder, tmp_path, small_moe, small_samples, runnable):
    stats = collect_statistics(small_moe, tmp_path / "stats", small_samples, LINEAR)
    with pytest.raises(RecipeError, match="which statistics of the source do not hold"):
        calibrate_from(small_moe, tmp_path / "a", stats, LINEAR, REFIT.method)
    forced = Recipe(
        level=Level.LINEAR, quantize=("*.mlp.gate",), force_roles=frozenset({Role.ROUTER})
    )
    with pytest.raises(RecipeError, match="no routers to re-fit"):
        calibrate(small_moe, tmp_path / "b", small_samples, forced, REFIT)


def test_command_line(invoke, tmp_path, tiny_moe, texts):
    out = tmp_path / "out"
    arguments = ["--tokens", 1024, "--sequence-length", 64, *[f"--text={t}" for t in texts]]
    shown = invoke(
        "calibrate", tiny_moe, out, "--level", "linear", "--method", "even", "--refit-routers",
        "--check-routers", *arguments,
    ).output  # fmt: skip
    summary = json.loads((out / "mxfp4_calibration.json").read_text())["summary"]
    count = len(summary["refitted_routers"])
    assert count
    assert f"routers  {count} of 4 re-fitted" in shown
    assert f"refitted {count} routers, on request" in shown
    page = (out / "mxfp4_calibration.html").read_text()
    assert "held-out tokens with the source" in page
    assert page.count("re-fitted") >= count
    invoke(
        "calibrate", tiny_moe, "--collect", tmp_path / "c", "--refit-routers", *arguments, code=2
    )
