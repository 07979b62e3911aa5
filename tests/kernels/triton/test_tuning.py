"""Tuning results are kept per device, shape and kernel source, and the table of results reads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mxfp4.cli.bench import bench
from mxfp4.cli.tune import tune
from mxfp4.errors import CorruptCheckpointError
from mxfp4.kernels import report, tuning
from mxfp4.kernels.triton import tuner
from mxfp4.kernels.triton.configs import TABLES, Regime, TileConfig

ROOT = Path(__file__).parents[3]


def test_entries_survive_and_add_up(tmp_path):
    path = tmp_path / "below" / "tuning.json"
    first = {tuning.entry_key("GPU", (64, 32), Regime.DECODE): TileConfig(16, 64, 4, 2)}
    second = {tuning.entry_key("GPU", (64, 32), Regime.LARGE): TileConfig(128, 64, 8, 2)}
    assert tuning.load(path) == {}
    tuning.store(first, path)
    tuning.store(second, path)
    assert tuning.load(path) == {**first, **second}
    assert [entry.name for entry in path.parent.iterdir()] == ["tuning.json"]


def test_keys_name_the_source_of_the_kernels(monkeypatch, tmp_path):
    key = tuning.entry_key("GPU", (64, 32), Regime.DECODE)
    assert "triton 3" in key
    assert key.startswith("GPU|64x32|decode|")
    assert tuning.fingerprint().split("|")[1] in key


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "tuning.json"
    for text in ("{", '{"key": {"colour": 1}}', "[]"):
        path.write_text(text)
        with pytest.raises(CorruptCheckpointError, match="tune again"):
            tuning.load(path)


def test_candidates_start_with_the_shipped_tile_and_do_not_repeat():
    base = TABLES["sm_90"][Regime.DECODE]
    found = list(tuner.candidates(base))
    assert found[0] == base
    assert len(set(found)) == len(found)
    assert all(config.tokens == base.tokens for config in found)


def test_pruning_keeps_what_passes_and_is_close_to_the_best(monkeypatch):
    issue = {2: 2.6, 3: 3.0, 4: 9.0, 5: 2.7}

    def check(case):
        failures = ("spills",) if case.stages == 5 else ()
        return tuner.gate.Verdict(case.name, issue_per_weight=issue[case.stages], failures=failures)

    monkeypatch.setattr(tuner.gate, "check", check)
    every = list(tuner.candidates(TABLES["sm_90"][Regime.DECODE]))
    kept = tuner.prune("sm_90", Regime.DECODE, every)
    assert {config.stages for config in kept} == {2, 3}


def test_tuning_without_a_gpu_says_what_is_possible():
    result = CliRunner().invoke(tune, ["64x64", "--device", "cpu"])
    assert result.exit_code == 1
    assert "--prune-only sm_90" in result.output
    assert CliRunner().invoke(tune, ["64x65"]).exit_code == 2


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The benchmark as it runs without a GPU."""
    out = tmp_path_factory.mktemp("bench") / "kernels.json"
    script = ROOT / "benchmarks" / "bench_kernels.py"
    done = subprocess.run(
        [sys.executable, script, "--out", out],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_benchmark_rehearses_and_its_report_reads(rehearsed, tmp_path):
    found = json.loads(rehearsed.read_text())
    assert found["environment"]["rehearsal"] is True
    assert found["correctness"][0]["worst_share_of_floor"] <= 1.05
    assert {"dense", "mixtures", "codec", "roofs"} <= set(found)
    plot = tmp_path / "plot.svg"
    result = CliRunner().invoke(bench, ["report", str(rehearsed), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "no GPU was measured" in result.output
    assert result.output.count("\n| ") == 2 + len(found["mixtures"]) + len(found["codec"]) + 1
    assert plot.read_text().startswith("<svg")


def test_report_refuses_other_files(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="bench_kernels"):
        report.load_results(path)
