"""Every kind of bad input ends with its own message, its exit code, and nothing half-written."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mxfp4.cli.main import main

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"
EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_index(change):
    return lambda folder, builder: edit_json(folder / INDEX, lambda v: change(v["weight_map"]))


def rewrite_shard(folder, name, change):
    """Parse a shard, let `change` edit header and data, write it back as it is."""
    raw = (folder / name).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    text = change(header, data)
    text = json.dumps(header).encode() if text is None else text
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


def poke(value):
    """Put one BF16 pattern into an expert."""

    def damage(folder, builder):
        def change(header, data):
            start = header[EXPERT]["data_offsets"][0] + 2 * 70
            data[start : start + 2] = np.uint16(value).tobytes()

        rewrite_shard(folder, FIRST, change)

    return damage


def cut(byte_count):
    def damage(folder, builder):
        path = folder / SECOND
        path.write_bytes(path.read_bytes()[:-byte_count])

    return damage


def append(folder, builder):
    path = folder / SECOND
    path.write_bytes(path.read_bytes() + b"x")


def header_text(text):
    def damage(folder, builder):
        rewrite_shard(folder, FIRST, lambda header, data: text)

    return damage


def header_entry(**changes):
    def damage(folder, builder):
        rewrite_shard(folder, FIRST, lambda header, data: header[EXPERT].update(changes))

    return damage


def duplicate_name(folder, builder):
    def change(header, data):
        text = json.dumps(header)
        again = json.dumps({EXPERT: header[EXPERT]})
        return (text[:-1] + "," + again[1:]).encode()

    rewrite_shard(folder, FIRST, change)


def same_tensor_twice(folder, builder):
    shards = builder.split(builder.moe(), 3)
    shards[1][EXPERT] = shards[0][EXPERT]
    builder.write(folder, shards, builder.moe_config())


def odd_shape(folder, builder):
    tensors = builder.moe()
    for leaf, shape in (("gate", (40, 64)), ("up", (40, 64)), ("down", (64, 40))):
        name = f"model.layers.1.mlp.experts.2.{leaf}_proj.weight"
        tensors[name] = ("BF16", np.zeros(shape, np.uint16))
    builder.write(folder, builder.split(tensors, 3), builder.moe_config())


def taken_name(folder, builder):
    tensors = builder.moe()
    name = EXPERT.removesuffix("weight") + "weight_scale"
    tensors[name] = ("U8", np.zeros((32, 2), np.uint8))
    builder.write(folder, builder.split(tensors, 3), builder.moe_config())


def quantized(folder, builder):
    edit_json(
        folder / "config.json", lambda v: v.update(quantization_config={"quant_method": "fp8"})
    )


def two_sets(folder, builder):
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00001.safetensors").write_bytes(
        builder.file_bytes({"x": ("U8", np.zeros(1, np.uint8))})
    )


def missing_member(folder, builder):
    (folder / INDEX).unlink()
    (folder / SECOND).unlink()


def only_bin(folder, builder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def no_weights(folder, builder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def write(name, text):
    return lambda folder, builder: (folder / name).write_text(text)


def remove(name):
    return lambda folder, builder: (folder / name).unlink()


BAD_SOURCES = {
    "config missing": (remove("config.json"), "no config.json in this folder", "--allow-missing"),
    "config not JSON": (write("config.json", "{"), "config.json: this is not JSON", "download"),
    "config a list": (write("config.json", "[]"), "expected a JSON object, found list", "download"),
    "index not JSON": (write(INDEX, "nope"), f"{INDEX}: this is not JSON", "download"),
    "index without map": (write(INDEX, "{}"), "no weight_map", "download the index"),
    "index empty": (write(INDEX, '{"weight_map": {}}'), "weight_map is empty", "download"),
    "index leads up": (
        edit_index(lambda m: m.update({EXPERT: "../evil.safetensors"})),
        "points outside the folder: '../evil.safetensors'",
        "do not use this checkpoint",
    ),
    "index absolute": (
        edit_index(lambda m: m.update({EXPERT: "/etc/x.safetensors"})),
        "points outside the folder: '/etc/x.safetensors'",
        "do not use this checkpoint",
    ),
    "shard missing": (remove(SECOND), f"not in the folder: {SECOND}", "download the missing"),
    "index names a phantom": (
        edit_index(lambda m: m.update({"phantom.weight": FIRST})),
        f"phantom.weight: the index puts this tensor in {FIRST}, but no shard holds it",
        "download both again",
    ),
    "index names the wrong shard": (
        edit_index(lambda m: m.update({EXPERT: SECOND})),
        f"puts this tensor in {SECOND}, but it is in {FIRST}",
        "download both again",
    ),
    "index lacks a tensor": (
        edit_index(lambda m: m.pop(EXPERT)),
        "1 tensor(s) of the shards are not in the index",
        "download both again",
    ),
    "tensor in two shards": (same_tensor_twice, f"also in {FIRST}", "keep one of the two"),
    "cut by a byte": (cut(1), f"{SECOND}: the file is truncated", "again"),
    "cut in half": (cut(9_000), f"{SECOND}: the file is truncated", "again"),
    "longer than its header": (append, "longer than its header says", "again"),
    "header not JSON": (header_text(b"{]"), f"{FIRST}: the header is not JSON", "again"),
    "header too long": (
        lambda folder, builder: (folder / FIRST).write_bytes(struct.pack("<Q", 10**9) + b"{}"),
        "the header claims 1,000,000,000 bytes",
        "again",
    ),
    "file of four bytes": (
        lambda folder, builder: (folder / FIRST).write_bytes(b"1234"),
        "4 bytes are too few",
        "again",
    ),
    "unknown dtype": (header_entry(dtype="Q4"), "unknown dtype 'Q4'", "known dtypes"),
    "shape against offsets": (header_entry(shape=[32, 63]), "needs 4,032 bytes", "again"),
    "hole between tensors": (header_entry(data_offsets=[0, 4096]), "a hole or an overlap", "again"),
    "duplicate name in a header": (duplicate_name, f"{EXPERT}: the header has this name twice", ""),
    "two shard sets": (two_sets, "several shard sets lie side by side", "move all but one"),
    "incomplete set": (missing_member, "2 of 3 shards of model-*-of-00003", "download the missing"),
    "other weight format": (only_bin, "only pytorch_model.bin", "save the model as safetensors"),
    "no weights": (no_weights, "no *.safetensors file", "the folder that holds the weights"),
    "NaN": (poke(0x7FC0), "a NaN or an infinity, first at index [1, 6]", "--on-nonfinite keep"),
    "infinity": (poke(0xFF80), "a NaN or an infinity, first at index [1, 6]", "--on-nonfinite"),
    "odd contraction axis": (odd_shape, "40 along axis 1 is no multiple of 32", "--keep"),
    "name taken": (taken_name, "would hold this name twice", "--keep"),
    "already quantized": (quantized, "already quantized (fp8)", "start from the BF16"),
}


@pytest.mark.parametrize("kind", BAD_SOURCES)
def test_bad_source(kind, moe_folder, tmp_path, builder):
    damage, message, hint = BAD_SOURCES[kind]
    damage(moe_folder, builder)
    before = builder.hashes(moe_folder)
    output = tmp_path / "out"
    result = run("convert", moe_folder, output)
    assert result.exit_code == 3, result.output
    assert message in result.output
    assert "hint: " in result.output
    assert hint in result.output
    assert builder.hashes(moe_folder) == before
    assert not list(output.rglob("*.safetensors*"))
    assert not list(output.rglob("*.part-*"))
    assert not (output / "config.json").exists()


@pytest.mark.parametrize("kind", ["NaN", "infinity"])
def test_bad_values_name_file_and_tensor(kind, moe_folder, tmp_path, builder):
    BAD_SOURCES[kind][0](moe_folder, builder)
    result = run("convert", moe_folder, tmp_path / "out", "--json")
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["file"], error["tensor"]) == ("NonFiniteError", FIRST, EXPERT)
    assert error["exit_code"] == result.exit_code == 3


def test_source_that_is_no_folder(tmp_path):
    result = run("convert", tmp_path / "nowhere", tmp_path / "out")
    assert result.exit_code == 3
    assert "there is no such folder" in result.output
    (tmp_path / "file").write_text("x")
    result = run("convert", tmp_path / "file", tmp_path / "out")
    assert result.exit_code == 3
    assert "this is not a folder" in result.output


def test_output_is_the_source_or_inside_it(moe_folder, tmp_path, builder):
    link = tmp_path / "link"
    link.symlink_to(moe_folder)
    before = builder.hashes(moe_folder)
    for output, message in [
        (moe_folder, "is the source folder"),
        (link, "is the source folder"),
        (moe_folder / "out", "lies inside the source"),
        (link / "deep" / "out", "lies inside the source"),
    ]:
        for flags in ([], ["--overwrite"]):
            result = run("convert", moe_folder, output, *flags)
            assert result.exit_code == 2
            assert message in result.output
    assert builder.hashes(moe_folder) == before
    assert not (moe_folder / ".mxfp4").exists()


def test_output_with_files_of_the_user(moe_folder, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    result = run("convert", moe_folder, output)
    assert result.exit_code == 2
    assert "not empty: it holds notes.txt" in result.output
    assert run("convert", moe_folder, output, "--overwrite", "-q").exit_code == 0
    assert (output / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "other.safetensors"])
def test_nothing_of_the_user_is_overwritten(name, moe_folder, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / name).write_text("mine")
    result = run("convert", moe_folder, output, "--overwrite")
    assert result.exit_code == 2
    assert f"{name} was not written by this tool" in result.output
    assert [p.name for p in output.iterdir() if p.name != ".mxfp4"] == [name]
    assert (output / name).read_text() == "mine"


def test_another_plan_names_the_first_difference(moe_folder, tmp_path, builder):
    output = tmp_path / "out"
    assert run("convert", moe_folder, output, "-q").exit_code == 0
    before = builder.hashes(output)
    result = run("convert", moe_folder, output, "--level", "linear")
    assert result.exit_code == 2
    assert "another plan: recipe.level was None, now 'linear'" in result.output
    result = run("convert", moe_folder, output, "--rule", "floor")
    assert "recipe.rule was 'even', now 'floor'" in result.output
    assert builder.hashes(output) == before
    (output / "mine.txt").write_text("mine")
    assert run("convert", moe_folder, output, "--level", "linear", "--overwrite").exit_code == 0
    assert (output / "mine.txt").read_text() == "mine"
    assert len(builder.read(output)) > len(builder.read(moe_folder))


def test_source_edited_between_runs(moe_folder, tmp_path):
    output = tmp_path / "out"
    assert run("convert", moe_folder, output, "-q").exit_code == 0
    path = moe_folder / SECOND
    path.write_bytes(path.read_bytes())
    result = run("convert", moe_folder, output)
    assert result.exit_code == 2
    assert "another plan: source.files[1].mtime_ns was" in result.output


def test_damaged_state(moe_folder, tmp_path):
    output = tmp_path / "out"
    assert run("convert", moe_folder, output, "-q").exit_code == 0
    (output / ".mxfp4" / "plan.json").write_text("{")
    result = run("convert", moe_folder, output)
    assert result.exit_code == 2
    assert "this state file is damaged" in result.output


def test_state_that_lists_files_outside_is_never_followed(moe_folder, tmp_path):
    output, victim = tmp_path / "out", tmp_path / "victim.txt"
    victim.write_text("mine")
    assert run("convert", moe_folder, output, "-q").exit_code == 0
    edit_json(output / ".mxfp4" / "plan.json", lambda v: v.update(owned=["../victim.txt"], id=""))
    result = run("convert", moe_folder, output, "--overwrite")
    assert result.exit_code == 2
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("output", ["file", "file/out"])
def test_a_file_where_the_output_should_be(output, moe_folder, tmp_path):
    (tmp_path / "file").write_text("x")
    result = run("convert", moe_folder, tmp_path / output)
    assert result.exit_code == 2
    assert "there is a file where the output folder should be" in result.output
    assert (tmp_path / "file").read_text() == "x"


def test_output_that_cannot_be_made(moe_folder, tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = run("convert", moe_folder, tmp_path / "out")
    assert result.exit_code == 1
    assert "the output folder cannot be written (Permission denied)" in result.output


WRONG_USE = {
    "pattern without a match": (["--keep", "*.mpl.*"], "keep: '*.mpl.*' matches 0 tensors"),
    "router by pattern": (["--quantize", "*.mlp.gate"], "would quantize a router"),
    "norm by pattern": (["--quantize", "*input_layernorm*"], "would quantize a norm"),
    "regular expression": (["--keep", "re:("], "re:("),
    "role": (["--force-role", "rooter=quantize"], "unknown role 'rooter'"),
    "forced action": (["--force-role", "router=keep"], "router=quantize"),
    "format": (["--format", "zip"], "unknown output format 'zip'"),
    "size": (["--max-shard-size", "5 parsecs"], "is not a size"),
    "level": (["--level", "everything"], "is not one of"),
    "workers": (["--workers", "0"], "0 is not in the range"),
}


@pytest.mark.parametrize("kind", WRONG_USE)
def test_wrong_use(kind, moe_folder, tmp_path):
    flags, message = WRONG_USE[kind]
    result = run("convert", moe_folder, tmp_path / "out", *flags)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("levle: moe", "did you mean 'level'?"),
        ("level: some", "unknown level 'some'"),
        ("- a", "a recipe is a mapping"),
        ("keep: {a: b}", "keep is a list of patterns"),
        ("a: [", "cannot read the recipe"),
    ],
)
def test_wrong_recipe(text, message, moe_folder, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    result = run("convert", moe_folder, tmp_path / "out", "--recipe", recipe)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "recipe.yaml" in result.output
    assert not Path(tmp_path / "out").exists()
