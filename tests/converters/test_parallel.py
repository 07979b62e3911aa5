"""Tensor-parallel advice against hand-computed shards of real widths."""

import json

import pytest

from mxfp4.converters.decide import decide
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.parallel import (
    DEGREES,
    KERNEL_FAMILIES,
    Fit,
    Split,
    highest_degree,
    parallel_advice,
)
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import classify


def advice(shapes, config, level=Level.LINEAR, degrees=DEGREES):
    tensors = [TensorInfo(name, "BF16", shape) for name, shape in shapes.items()]
    decisions = decide(tensors, classify(tensors, config), Recipe(level=level))
    return parallel_advice(tensors, decisions, degrees)


def experts(hidden, inner):
    base = "model.layers.0.mlp.experts.0"
    return {
        f"{base}.gate_proj.weight": (inner, hidden),
        f"{base}.up_proj.weight": (inner, hidden),
        f"{base}.down_proj.weight": (hidden, inner),
    }


def config(hidden):
    return {"hidden_size": hidden, "num_experts": 2, "num_hidden_layers": 1, "vocab_size": 512}


@pytest.mark.parametrize(
    ("inner", "best"),
    [
        (1408, 4),
        (896, 4),
        (1152, 4),
        (640, 4),
        (2880, 2),
        (768, 8),
        (1280, 8),
        (2304, 8),
        (6400, 8),
        (11008, 8),
        (3072, 16),
        (2048, 16),
        (48, 0),
    ],
)
def test_highest_degree_of_widths_in_use(inner, best):
    rows = advice(experts(2048, inner), config(2048))
    if inner % 32:
        rows = [row for row in rows if not row.module.endswith("down_proj")]
        assert rows == []  # the whole expert stays as it is
        return
    assert highest_degree(rows) == best


def test_rows_split_k_and_columns_split_n():
    rows = advice(experts(4096, 3072), config(4096), degrees=(16,))
    by_leaf = {row.module.rpartition(".")[2]: row for row in rows}
    down, up = by_leaf["down_proj"], by_leaf["up_proj"]
    assert (down.split, down.n, down.k) == (Split.ROWS, 4096, 192)
    assert (up.split, up.n, up.k) == (Split.COLUMNS, 192, 4096)
    assert down.fits["file format"] is Fit.OK
    assert down.fits["triton"] is Fit.OK
    assert down.fits["marlin"] is Fit.PADS
    assert down.module == "model.layers.#.mlp.experts.#.down_proj"


def test_a_block_that_would_be_cut_is_refused_by_every_kernel():
    rows = advice(experts(2048, 1408), config(2048), degrees=(8,))
    down = next(row for row in rows if row.module.endswith("down_proj"))
    assert down.k == 176
    assert set(down.fits.values()) == {Fit.NO}
    rows = advice(experts(2048, 96), config(2048), degrees=(16,))
    up = next(row for row in rows if row.module.endswith("up_proj"))
    assert up.n == 6
    odd = next(row for row in advice(experts(2048, 96), config(2048), degrees=(64,)))
    assert odd.n is None
    assert odd.fits["triton"] is Fit.NO


def test_stacked_experts_count_one_projection():
    shapes = {
        "model.layers.0.mlp.experts.gate_up_proj": (4, 2880, 5760),
        "model.layers.0.mlp.experts.down_proj": (4, 2880, 2880),
        "model.layers.0.mlp.router.weight": (4, 2880),
    }
    gpt_oss = {**config(2880), "model_type": "gpt_oss", "num_experts": 4}
    rows = advice(shapes, gpt_oss, degrees=(1, 2, 4))
    assert {(row.module.rpartition(".")[2], row.full_n, row.full_k) for row in rows} == {
        ("gate_up_proj", 2880, 2880),
        ("down_proj", 2880, 2880),
    }
    assert highest_degree(rows) == 2


def test_shared_inputs_of_latent_attention_are_not_split():
    base = "model.layers.0.self_attn"
    shapes = {
        f"{base}.q_a_proj.weight": (1536, 7168),
        f"{base}.kv_a_proj_with_mqa.weight": (576, 7168),
        f"{base}.q_b_proj.weight": (18432, 1536),
        f"{base}.o_proj.weight": (7168, 12288),
    }
    rows = advice(shapes, config(7168), degrees=(8,))
    splits = {row.module.rpartition(".")[2]: row.split for row in rows}
    assert splits["q_a_proj"] is splits["kv_a_proj_with_mqa"] is Split.NONE
    assert splits["q_b_proj"] is Split.COLUMNS
    assert splits["o_proj"] is Split.ROWS


def test_equal_weights_are_one_row_per_degree_and_kept_ones_are_none():
    shapes = {}
    for layer in range(3):
        for name, shape in experts(2048, 1024).items():
            shapes[name.replace("layers.0", f"layers.{layer}")] = shape
    shapes["model.layers.0.mlp.gate.weight"] = (2, 2048)
    rows = advice(shapes, {**config(2048), "num_hidden_layers": 3})
    assert len(rows) == 3 * len(DEGREES)
    assert {row.count for row in rows} == {3}


def test_rows_are_plain_json():
    row = advice(experts(2048, 1024), config(2048), degrees=(4,))[0]
    data = json.loads(json.dumps(row.to_json()))
    assert data["tp"] == 4
    assert set(data["fits"]) == {family.name for family in KERNEL_FAMILIES}
    assert data["n_per_rank"] == 256
