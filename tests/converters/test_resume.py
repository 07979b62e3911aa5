"""A conversion may die at any moment; the same command ends with the same bytes."""

import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from mxfp4.converters.convert import Progress, RunOptions, convert
from mxfp4.converters.plan import OutputOptions
from mxfp4.converters.status import status
from mxfp4.errors import InterruptedConversionError

INDEX = "model.safetensors.index.json"
KILLS = 20
FLAGS = ["--max-shard-size", "400kB", "--slab-size", "8KiB", "--workers", "2", "-q"]


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory, builder):
    """About 13 MB in 20 units: long enough to be killed anywhere in between."""
    tensors = builder.moe(layers=2, experts=16, hidden=256, inter=256, vocab=512)
    config = builder.moe_config(hidden_size=256, moe_intermediate_size=256, num_experts=16)
    folder = tmp_path_factory.mktemp("large") / "source"
    return builder.write(folder, builder.split(tensors, 4), config, extra={"tokenizer.json": "{}"})


@pytest.fixture(scope="module")
def uninterrupted(large_folder, tmp_path_factory, builder, command):
    """Hashes of an undisturbed run, and how long it took from start to end."""
    output = tmp_path_factory.mktemp("whole") / "out"
    started = time.monotonic()
    process = command("convert", large_folder, output, *FLAGS)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return builder.hashes(output), time.monotonic() - started


def assert_sound(output):
    """What must hold at any moment: no final file is half-written, nothing looks whole."""
    if (output / INDEX).exists():
        assert status(output).complete
        return
    for path in output.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        ends = [e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"]
        assert len(raw) == 8 + length + max(ends)


@pytest.mark.parametrize("number", range(KILLS))
def test_kill_9_at_a_random_moment(number, large_folder, uninterrupted, tmp_path, builder, command):
    hashes, seconds = uninterrupted
    output = tmp_path / "out"
    rng = random.Random(number)
    process = command("convert", large_folder, output, *FLAGS)
    time.sleep(rng.uniform(0.1, 1.0) * seconds)
    process.kill()
    process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0)
    if output.exists():
        assert_sound(output)
    again = command("convert", large_folder, output, *FLAGS)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert builder.hashes(output) == hashes
    assert not list((output / ".mxfp4" / "tmp").iterdir())
    assert status(output).complete


def test_killed_again_and_again_it_gets_there(
    large_folder, uninterrupted, tmp_path, builder, command
):
    hashes, seconds = uninterrupted
    output = tmp_path / "out"
    rng = random.Random(99)
    done = []
    for _ in range(6):
        process = command("convert", large_folder, output, *FLAGS)
        time.sleep(rng.uniform(0.4, 0.9) * seconds)
        process.kill()
        process.communicate()
        if (output / ".mxfp4" / "plan.json").exists():
            done.append(status(output).shards_done)
    assert done == sorted(done), "a finished shard was lost"
    process = command("convert", large_folder, output, *FLAGS)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert builder.hashes(output) == hashes


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_signals_leave_a_resumable_state(
    number, code, large_folder, uninterrupted, tmp_path, builder, command
):
    hashes, _ = uninterrupted
    output = tmp_path / "out"
    process = command("convert", large_folder, output, *FLAGS)
    plan = output / ".mxfp4" / "plan.json"
    deadline = time.monotonic() + 60
    while not plan.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code, errors
    assert "the same command continues" in errors
    assert_sound(output)
    assert not list((output / ".mxfp4" / "tmp").iterdir())
    process = command("convert", large_folder, output, *FLAGS)
    process.communicate()
    assert builder.hashes(output) == hashes


def test_stop_event_ends_the_run_between_slabs(moe_folder, tmp_path, builder):
    stop = threading.Event()
    progress = Progress(on_shard=lambda record: stop.set())
    options = OutputOptions(max_shard_bytes=9_000)
    run = RunOptions(workers=1)
    with pytest.raises(InterruptedConversionError):
        convert(moe_folder, tmp_path / "out", None, options, run, progress=progress, stop=stop)
    done = status(tmp_path / "out").shards_done
    assert done in (1, 2)  # the next shard may have been complete when the first was reported
    report = convert(moe_folder, tmp_path / "out", None, options, run)
    assert report.converted_shards == len(report.records) - done
    convert(moe_folder, tmp_path / "whole", None, options, run)
    assert builder.hashes(tmp_path / "out") == builder.hashes(tmp_path / "whole")


def test_a_finished_run_is_not_done_again(moe_folder, tmp_path):
    convert(moe_folder, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.safetensors")}
    report = convert(moe_folder, tmp_path / "out")
    assert report.converted_shards == 0
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_a_damaged_shard_is_the_only_one_written_again(moe_folder, tmp_path, builder):
    options = OutputOptions(max_shard_bytes=9_000)
    convert(moe_folder, tmp_path / "out", options=options)
    hashes = builder.hashes(tmp_path / "out")
    victim = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    os.truncate(victim, 100)
    report = convert(moe_folder, tmp_path / "out", options=options)
    assert report.converted_shards == 1
    assert builder.hashes(tmp_path / "out") == hashes


def test_a_failed_shard_keeps_the_finished_ones(moe_folder, tmp_path, builder):
    path = moe_folder / "model-00003-of-00003.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + length])["model.layers.1.mlp.experts.3.up_proj.weight"]
    place = 8 + length + entry["data_offsets"][0]
    bad = raw[:place] + np.uint16(0x7F80).tobytes() + raw[place + 2 :]
    path.write_bytes(bad)
    times = path.stat()
    run = RunOptions(workers=1)
    with pytest.raises(ValueError, match="NaN or an infinity"):
        convert(moe_folder, tmp_path / "out", options=OutputOptions(layout="same"), run=run)
    assert status(tmp_path / "out").shards_done == 2
    assert not list((tmp_path / "out" / ".mxfp4" / "tmp").iterdir())
    path.write_bytes(raw)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = convert(moe_folder, tmp_path / "out", options=OutputOptions(layout="same"), run=run)
    assert report.converted_shards == 1
