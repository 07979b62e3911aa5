"""What the commands print and return."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import termios

import pytest
from click.testing import CliRunner

from mxfp4.cli.main import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_convert_says_what_it_did_and_what_to_do_next(moe_folder, tmp_path):
    result = run("convert", moe_folder, tmp_path / "out")
    assert result.exit_code == 0
    assert "level experts, rule even" in result.stdout
    assert "expert -> mxfp4" in result.stdout
    assert "router  (kept)" in result.stdout
    assert f"next     mxfp4 verify {tmp_path / 'out'} --source {moe_folder}" in result.stdout
    again = run("convert", moe_folder, tmp_path / "out")
    assert "1 of them finished before" in again.stdout
    assert "continuing" in again.stderr


def test_quiet_says_nothing(moe_folder, tmp_path):
    result = run("convert", moe_folder, tmp_path / "out", "-q")
    assert (result.exit_code, result.output) == (0, "")
    result = run("verify", tmp_path / "out", "--source", moe_folder, "-q")
    assert (result.exit_code, result.output) == (0, "")


def test_verbose_names_every_shard(moe_folder, tmp_path):
    result = run("convert", moe_folder, tmp_path / "out", "-v", "--max-shard-size", "20kB")
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(f"{name}: " in result.stdout for name in shards)


def test_convert_json_is_one_document(moe_folder, tmp_path):
    result = run("convert", moe_folder, tmp_path / "out", "--json")
    document = json.loads(result.stdout)
    assert document["totals"]["quantized"] == 24
    assert document["shards_converted_now"] == 1
    assert document["error"]["elements"] == 24 * 32 * 64
    assert json.loads((tmp_path / "out" / "mxfp4_manifest.json").read_text()).items() <= (
        document.items()
    )


def test_log_json_tells_the_story(moe_folder, tmp_path):
    log = tmp_path / "log.jsonl"
    run("convert", moe_folder, tmp_path / "out", "-q", "--log-json", log)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "plan", "shard_done", "end"]
    assert all(event["ts"] > 1e9 for event in events)
    run("convert", moe_folder, tmp_path / "out", "-q", "--rule", "floor", "--log-json", log)
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], last["type"]) == ("error", "ResumeError")


def test_dry_run_writes_nothing(moe_folder, tmp_path):
    result = run("convert", moe_folder, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "expert -> mxfp4" in result.stdout
    assert not (tmp_path / "out").exists()
    document = json.loads(run("convert", moe_folder, "x", "--dry-run", "--json").stdout)
    assert document["totals"]["quantized"] == 24


def test_plan_json_has_a_row_for_every_tensor(moe_folder, builder):
    document = json.loads(run("plan", moe_folder, "--json", "--level", "linear").stdout)
    assert (document["model_type"], document["level"]) == ("qwen3_moe", "linear")
    stored = builder.read(moe_folder)
    assert {row["name"] for row in document["tensors"]} == set(stored)
    for row in document["tensors"]:
        assert set(row) == {"name", "shape", "dtype", "role", "action", "axis", "reason"}
        assert (row["dtype"], tuple(row["shape"])) == stored[row["name"]][:2]
        wanted = ".experts." in row["name"] or "self_attn" in row["name"]
        assert row["action"] == ("quantize" if wanted else "keep")
        assert row["axis"] == 1 if wanted else True
        assert row["reason"]
    totals = document["totals"]
    assert totals["bytes_before"] == sum(len(raw) for _, _, raw in stored.values())
    assert totals["quantized"] + totals["kept"] == totals["tensors"] == len(stored)
    assert totals["peak_memory_per_worker"] < 64 << 20


def test_plan_promises_the_bytes_that_convert_writes(moe_folder, tmp_path, builder):
    document = json.loads(run("plan", moe_folder, "--json").stdout)
    run("convert", moe_folder, tmp_path / "out", "-q")
    written = sum(len(raw) for _, _, raw in builder.read(tmp_path / "out").values())
    assert document["totals"]["bytes_after"] == written


def test_plan_shows_blocked_tensors_and_convert_refuses_them(tmp_path, builder):
    tensors = builder.moe()
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name] = ("BF16", tensors[name][1][:, :31].copy())
    folder = builder.write(tmp_path / "s", [tensors], builder.moe_config(), index=False)
    result = run("plan", folder)
    assert result.exit_code == 0
    assert f"blocked  {name}: expert, but 31 along axis 1" in result.stdout
    assert "next" not in result.stdout
    assert run("convert", folder, tmp_path / "out").exit_code == 3
    assert run("convert", folder, tmp_path / "out", "--keep", name, "-q").exit_code == 0


def test_plan_lists_tensors_and_parallel_sizes(moe_folder):
    result = run("plan", moe_folder, "--tensors", "--tp", "1,2")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in result.stdout
    assert "tensor parallel" in result.stdout
    document = json.loads(run("plan", moe_folder, "--tp", "1,2", "--json").stdout)
    assert {row["tp"] for row in document["tensor_parallel"]} == {1, 2}
    assert run("plan", moe_folder, "--tp", "none").exit_code == 2


def test_recipe_file_and_flags_add_up(moe_folder, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("level: linear\nkeep: ['*.self_attn.*']\nrule: floor\n")
    plan = json.loads(
        run("plan", moe_folder, "--json", "--recipe", recipe, "--keep", "*.layers.0.mlp.*").stdout
    )
    assert (plan["level"], plan["rule"], plan["totals"]["quantized"]) == ("linear", "floor", 12)
    plan = json.loads(
        run("plan", moe_folder, "--json", "--recipe", recipe, "--level", "experts").stdout
    )
    assert (plan["level"], plan["totals"]["quantized"]) == ("experts", 24)


def test_router_is_quantized_only_when_forced(moe_folder):
    flags = ["--quantize", "*.mlp.gate", "--force-role", "router=quantize", "--json"]
    plan = json.loads(run("plan", moe_folder, *flags).stdout)
    routers = [row for row in plan["tensors"] if row["role"] == "router"]
    assert [row["action"] for row in routers] == ["quantize", "quantize"]


def test_verify_reports_and_exits_5(moe_folder, tmp_path):
    output = tmp_path / "out"
    run("convert", moe_folder, output, "-q")
    result = run("verify", output, "--source", moe_folder, "--deep")
    assert result.exit_code == 0
    assert "no differences (24 packed modules" in result.stdout
    document = json.loads(run("verify", output, "--source", moe_folder, "--json").stdout)
    assert document["ok"]
    assert len(document["worst_modules"]) == 10
    (output / "model.safetensors.index.json").unlink()
    result = run("verify", output)
    assert result.exit_code == 5
    assert "there is no index" in result.stdout
    document = json.loads(run("verify", output, "--json").stdout)
    assert document["findings"][0]["place"] == "model.safetensors.index.json"


def test_inspect(moe_folder, tmp_path):
    result = run("inspect", moe_folder, "-v")
    assert "Qwen3MoeForCausalLM" in result.stdout
    assert "weights: unquantized BF16" in result.stdout
    run("convert", moe_folder, tmp_path / "out", "-q")
    document = json.loads(run("inspect", tmp_path / "out", "--json").stdout)
    assert document["storage"].startswith("compressed-tensors packed weights (24 modules")
    assert document["quantization"]["quant_method"] == "compressed-tensors"
    (moe_folder / "model.safetensors.index.json").unlink()
    assert "several shards without an index" in run("inspect", moe_folder).stdout
    assert run("inspect", tmp_path / "none").exit_code == 3


def test_status(moe_folder, tmp_path):
    output = tmp_path / "out"
    assert run("status", output).exit_code == 2
    run("convert", moe_folder, output, "-q")
    result = run("status", output)
    assert (result.exit_code, "complete, 1 of 1 shards" in result.stdout) == (0, True)
    (output / "model.safetensors.index.json").unlink()
    result = run("status", output, "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["complete"] is False


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_command(shell):
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_MXFP4_COMPLETE" in result.stdout


def test_completion_completes(command):
    environment = {
        **os.environ,
        "COMP_WORDS": "mxfp4 con",
        "COMP_CWORD": "1",
        "_MXFP4_COMPLETE": "bash_complete",
    }
    code = "from mxfp4.cli.main import main; main(prog_name='mxfp4')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "plain,convert" in done.stdout


def subcommands(name, command):
    """Words that lead to every command at the end of a tree."""
    children = getattr(command, "commands", None)
    if children is None:
        return [[name]]
    return [[name, *rest] for n, c in children.items() for rest in subcommands(n, c)]


def test_every_command_has_help_and_json():
    for name, command in main.commands.items():
        result = run(name, "--help")
        assert result.exit_code == 0
        for parts in subcommands(name, command):
            if name != "completion":
                assert "--json" in run(*parts, "--help").output, parts
        assert command.help


def test_terminal_gets_a_bar_and_a_pipe_gets_lines(moe_folder, tmp_path, command):
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))
    process = command("convert", moe_folder, tmp_path / "a", stderr=child)
    process.communicate()
    os.close(child)
    shown = ""
    with contextlib.suppress(OSError):  # Linux ends a closed terminal with an error
        while piece := os.read(parent, 65536):
            shown += piece.decode()
    os.close(parent)
    assert "convert: 100%" in shown
    process = command("convert", moe_folder, tmp_path / "b")
    _, errors = process.communicate()
    assert "%" not in errors


def test_a_traceback_only_with_debug(tmp_path):
    assert "Traceback" not in run("convert", tmp_path / "none", tmp_path / "out").output
    assert "Traceback" in run("convert", tmp_path / "none", tmp_path / "out", "--debug").output


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_nobody_reading_on_is_no_error(flags, moe_folder, command):
    process = command("plan", moe_folder, *flags)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert errors == ""
