"""Whole calibrations of the example: what is written, what is protected, what survives a stop."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mxfp4
from mxfp4.calibration.calibrate import (
    CalibrationOptions,
    calibrate,
    calibrate_from,
    collect_statistics,
)
from mxfp4.calibration.methods import METHODS, MethodOptions
from mxfp4.calibration.streaming.weights import Weights
from mxfp4.converters.checkpoint import open_checkpoint
from mxfp4.converters.convert import convert
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.verify import verify
from mxfp4.errors import (
    InterruptedConversionError,
    OutputExistsError,
    ResumeError,
    TensorNotFoundError,
)

LINEAR = Recipe(level=Level.LINEAR)


def options(method, **changes):
    return CalibrationOptions(MethodOptions(method, **changes))


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_moe):
    """The example converted without calibration."""
    folder = tmp_path_factory.mktemp("plain") / "out"
    convert(tiny_moe, folder, LINEAR)
    return folder


@pytest.fixture(scope="module")
def fine(tmp_path_factory, tiny_moe, few_samples):
    """The example calibrated with the most thorough method, and its report."""
    folder = tmp_path_factory.mktemp("fine") / "out"
    report = calibrate(tiny_moe, folder, few_samples, LINEAR, options("gptq+"))
    return folder, report.to_json()


def test_output_is_a_plain_conversion_with_other_codes(builder, plain, fine):
    folder, _ = fine
    before, after = builder.read(plain), builder.read(folder)
    assert list(before) == list(after)
    changed = set()
    for name, (dtype, shape, raw) in before.items():
        assert after[name][:2] == (dtype, shape)
        if after[name][2] != raw:
            changed.add(name)
    assert changed
    assert all(name.endswith((".weight_packed", ".weight_scale")) for name in changed)
    for name in ("config.json", "model.safetensors.index.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (plain / name).read_bytes()
    assert not (folder / ".mxfp4" / "calibration").exists()


def test_even_gives_the_bytes_of_a_plain_conversion(
    builder, tmp_path, tiny_moe, plain, few_samples
):
    calibrate(tiny_moe, tmp_path / "out", few_samples, LINEAR, options("even"))
    assert builder.read(tmp_path / "out") == builder.read(plain)


def test_no_module_ends_worse_than_even_by_the_measure_it_was_made_for(fine):
    _, report = fine
    modules = {k: v for layer in report["layers"] for k, v in layer["modules"].items()}
    assert len(modules) == 400
    assert all(facts["output_error"] <= facts["output_error_even"] for facts in modules.values())
    starved = [k for k, v in modules.items() if v["tokens"] < 4 * 128]
    assert sorted(starved) == report["summary"]["few_tokens"]
    untouched = [k for k, v in modules.items() if v["tokens"] == 0]
    assert untouched  # random tokens do not reach every expert
    assert set(untouched) <= set(report["summary"]["few_tokens"])


def test_a_fold_inside_an_expert_cancels(fine, tiny_moe):
    folder, report = fine
    assert [record["layer"] for record in report["layers"]] == [0, 1, 2, 3]
    with (
        Weights(open_checkpoint(folder)) as written,
        Weights(open_checkpoint(tiny_moe)) as source,
    ):
        name = "model.layers.1.mlp.experts.3."
        up, down = written.module(name + "up_proj"), written.module(name + "down_proj")
        wanted = source.module(name + "up_proj").float(), source.module(name + "down_proj").float()
        # A fold moves a power of two from a column of down to a row of up, and back again.
        ratio = (up.norm(dim=1) / wanted[0].norm(dim=1)).log2().round().exp2()
        for got, want in ((up / ratio[:, None], wanted[0]), (down * ratio, wanted[1])):
            assert (got - want).norm() / want.norm() < 0.25


@pytest.fixture(scope="module")
def small(tmp_path_factory, small_moe, small_samples):
    """`small_moe` calibrated in one go."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    calibrate(small_moe, folder, small_samples, LINEAR, options("gptq+"))
    return folder


def continued(source, folder, samples, method="gptq+"):
    """Calibrate again; returns the counts of done layers that were told."""
    seen = []
    calibrate(
        source,
        folder,
        samples,
        LINEAR,
        options(method),
        on_layer=lambda done, total: seen.append(done),
    )
    return seen


@pytest.mark.parametrize("when", [1, 2])
def test_a_stopped_calibration_continues_to_the_same_bytes(
    builder, tmp_path, small_moe, small_samples, small, when
):
    stop = threading.Event()

    def on_layer(done, total):
        if done == when:
            stop.set()

    arguments = (small_moe, tmp_path / "out", small_samples, LINEAR, options("gptq+"))
    with pytest.raises(InterruptedConversionError):
        calibrate(*arguments, on_layer=on_layer, stop=stop)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert continued(small_moe, tmp_path / "out", small_samples)[0] == when
    whole, parts = builder.hashes(small), builder.hashes(tmp_path / "out")
    for hashes in (whole, parts):
        del hashes["mxfp4_calibration.json"]  # names its own folder
    assert parts == whole
    assert continued(small_moe, tmp_path / "out", small_samples) == []  # nothing is left to do
    assert builder.hashes(tmp_path / "out")["mxfp4_manifest.json"] == whole["mxfp4_manifest.json"]


def test_a_killed_calibration_continues_to_the_same_bytes(
    builder, tmp_path, small_moe, small_samples, small
):
    """Killed for good while a layer is being worked on, not asked to stop."""
    tokens = tmp_path / "tokens.pt"
    torch.save((small_samples.tokens, small_samples.domains), tokens)
    program = """
import os, sys, torch
from mxfp4.calibration import store
from mxfp4.calibration.calibrate import CalibrationOptions, MethodOptions, calibrate
from mxfp4.calibration.samples import Samples
from mxfp4.converters.recipe import Level, Recipe

save = store.CodeStore.save

def dying(self, number, result):
    if number == 1:
        os.kill(os.getpid(), 9)
    save(self, number, result)

store.CodeStore.save = dying
options = CalibrationOptions(MethodOptions("gptq+"))
samples = Samples(*torch.load(sys.argv[1]))
calibrate(sys.argv[2], sys.argv[3], samples, Recipe(level=Level.LINEAR), options)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tokens, small_moe, tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(Path(mxfp4.__file__).parent.parent)},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert continued(small_moe, tmp_path / "out", small_samples) == [1, 2, 3]
    assert builder.read(tmp_path / "out") == builder.read(small)


def test_other_settings_do_not_continue_an_unfinished_calibration(
    tmp_path, small_moe, small_samples
):
    stop = threading.Event()
    stop.set()
    arguments = (small_moe, tmp_path / "out", small_samples, LINEAR)
    with pytest.raises(InterruptedConversionError):
        calibrate(*arguments, options("search"), stop=stop)
    with pytest.raises(ResumeError, match="other settings"):
        calibrate(*arguments, options("gptq"))
    other = replace(small_samples, tokens=small_samples.tokens.flip(0))
    with pytest.raises(ResumeError, match="other settings"):
        calibrate(small_moe, tmp_path / "out", other, LINEAR, options("search"))
    assert continued(small_moe, tmp_path / "out", small_samples, "search")[0] == 1


def test_a_folder_that_is_in_use_is_refused_before_the_work(tmp_path, tiny_moe, few_samples):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(OutputExistsError):
        calibrate(tiny_moe, tmp_path / "out", few_samples, LINEAR, options("gptq"))


def test_statistics_are_enough_to_choose_codes(builder, tmp_path, small_moe, small_samples, small):
    found = collect_statistics(small_moe, tmp_path / "stats", small_samples, LINEAR)
    assert len(found.modules) == 3 * (4 + 4 * 3)
    assert not list((tmp_path / "stats").glob("hidden-*"))
    calibrate_from(small_moe, tmp_path / "a", found, LINEAR, MethodOptions("gptq"))
    calibrate_from(small_moe, tmp_path / "b", found, LINEAR, MethodOptions("gptq"))
    first = builder.read(tmp_path / "a")
    assert first == builder.read(tmp_path / "b")
    assert {n: v[:2] for n, v in first.items()} == {
        n: v[:2] for n, v in builder.read(small).items()
    }
    direct = calibrate(small_moe, tmp_path / "c", small_samples, LINEAR, options("gptq"))
    # In the first layer nothing is rounded before: attention sees the same inputs both ways.
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    assert first[name] == builder.read(tmp_path / "c")[name]
    assert direct.layers[0]["modules"][name.removesuffix(".weight_packed")]["tokens"] == 384


def test_statistics_of_another_level_are_refused(tmp_path, small_moe, small_samples):
    found = collect_statistics(small_moe, tmp_path / "stats", small_samples)
    with pytest.raises(TensorNotFoundError, match="no moments"):
        calibrate_from(small_moe, tmp_path / "out", found, LINEAR)
    with pytest.raises(OutputExistsError):
        collect_statistics(small_moe, tmp_path / "stats", small_samples)


def test_verify_knows_calibrated_codes(small_moe, small):
    result = verify(small, small_moe, deep=True)
    assert result.ok, result.to_json()
    assert any("calibration" in note for note in result.notes)


def test_report_lists_every_choice(fine):
    folder, report = fine
    stored = json.loads((folder / "mxfp4_calibration.json").read_text())
    assert stored == json.loads(json.dumps(report))
    assert stored["options"]["method"] == "gptq+"
    assert stored["options"]["fold_norms"] is False
    assert set(METHODS) == {"even", "search", "gptq", "gptq+"}
    assert stored["summary"]["changed_tensors"] == []
    assert sum(stored["layers"][0]["tokens_per_expert"]["model.layers.0.mlp.experts"]) == 512 * 4
