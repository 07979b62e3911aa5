"""`verify` against the source accepts calibrated outputs and finds deliberate damage to them."""

import json
import shutil
import struct

import numpy as np
import pytest

from mxfp4.calibration.calibrate import CalibrationOptions, calibrate
from mxfp4.calibration.methods import MethodOptions
from mxfp4.converters.nearness import Nearness, far_blocks, unscaled
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.verify import verify
from mxfp4.kernels.rows import encode_rows

EXPERTS = "model.layers.1.mlp.experts"
MANIFEST = "mxfp4_manifest.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory, small_moe, small_samples):
    folder = tmp_path_factory.mktemp("made") / "out"
    options = CalibrationOptions(MethodOptions("gptq+"))
    calibrate(small_moe, folder, small_samples, Recipe(level=Level.LINEAR), options)
    return folder


@pytest.fixture
def output(made, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(made, tmp_path / "out")


def edit(folder, change):
    """Apply `change` to {name: bytearray} of every shard, in place."""
    for path in sorted(folder.glob("*.safetensors")):
        raw = bytearray(path.read_bytes())
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        spans = {n: (8 + length + f["data_offsets"][0], 8 + length + f["data_offsets"][1])
                 for n, f in header.items()}  # fmt: skip
        found = {name: bytearray(raw[a:b]) for name, (a, b) in spans.items()}
        change(found)
        for name, (a, b) in spans.items():
            raw[a:b] = found[name]
        path.write_bytes(raw)


def forget_hashes(folder):
    """As if the damage had been done before the hashes were made."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"] = {}
    path.write_text(json.dumps(manifest))


def swap_experts(found):
    for leaf in ("weight_packed", "weight_scale"):
        names = [f"{EXPERTS}.{n}.up_proj.{leaf}" for n in (0, 1)]
        if names[0] in found:
            found[names[0]], found[names[1]] = found[names[1]], found[names[0]]


def test_an_undamaged_output_has_no_differences(small_moe, made, invoke):
    result = verify(made, small_moe)
    assert result.ok, result.to_json()
    assert result.checked["modules near their source"] == result.checked["quantized modules"]
    assert 0.05 < result.worst()[0][1] < 0.5
    assert "worst first" in invoke("verify", made, "--source", small_moe).output


@pytest.mark.parametrize("leaf", ["weight_packed", "weight_scale"])
def test_a_single_wrong_byte_is_found(leaf, small_moe, output, invoke):
    def flip(found):
        for name in found:
            if name == f"{EXPERTS}.1.down_proj.{leaf}":
                found[name][5] ^= 1

    edit(output, flip)
    assert "SHA-256" in invoke("verify", output, "--source", small_moe, code=5).output


def test_swapped_experts_are_found_without_hashes(small_moe, output, invoke):
    edit(output, swap_experts)
    forget_hashes(output)
    text = invoke("verify", output, "--source", small_moe, code=5).output
    assert f"{EXPERTS}.0.up_proj: relative error" in text
    assert f"{EXPERTS}.1.up_proj: relative error" in text


def test_a_block_far_from_its_source_is_found_without_hashes(small_moe, output):
    def scale(found):
        for name in found:
            if name == f"{EXPERTS}.2.up_proj.weight_scale":
                found[name][3] += 3

    edit(output, scale)
    forget_hashes(output)
    (finding,) = verify(output, small_moe).findings
    assert finding.place == f"{EXPERTS}.2.up_proj"


def test_a_scale_byte_of_nan_is_found(small_moe, output):
    def spoil(found):
        for name in found:
            if name == f"{EXPERTS}.2.up_proj.weight_scale":
                found[name][0] = 255

    edit(output, spoil)
    forget_hashes(output)
    assert any("NaN" in f.problem for f in verify(output, small_moe).findings)


def test_a_changed_router_is_found_without_hashes(small_moe, output):
    def change(found):
        for name in found:
            if name == "model.layers.0.mlp.gate.weight":
                found[name][0] ^= 1

    edit(output, change)
    forget_hashes(output)
    (finding,) = verify(output, small_moe).findings
    assert finding.place == "model.layers.0.mlp.gate.weight"


def test_moved_scales_are_no_error_but_other_values_are():
    rng = np.random.default_rng(0)
    source = rng.normal(size=(48, 128)).astype(np.float32)
    rows, columns = (np.exp(rng.normal(0, 0.4, n)).astype(np.float32) for n in (48, 128))
    moved = source * rows[:, None] * columns
    assert np.abs(unscaled(source, moved) - source).max() < 1e-3
    plain = encode_rows(source.view(np.uint32), "F32")
    other = encode_rows(moved.view(np.uint32), "F32")
    near = Nearness()
    near.add(source, (plain.codes, plain.scales), (other.codes, other.scales))
    assert near.rescaled
    assert near.relative < 1.6 * near.relative_even
    assert not near.far
    assert far_blocks(source, np.where(np.arange(128) < 32, -5 * source, source))
