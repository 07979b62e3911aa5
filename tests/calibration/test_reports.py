"""Router check, comparison, sensitivity and the commands around them, on real checkpoints."""

import json
from xml.etree import ElementTree

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from mxfp4.calibration.compare import compare, interval
from mxfp4.calibration.report import heat_map, page
from mxfp4.calibration.routers import METRICS, Routing, check_routers, compare_routing
from mxfp4.calibration.sensitivity import Budget, sensitivity
from mxfp4.calibration.streaming.weights import Weights
from mxfp4.converters.checkpoint import open_checkpoint
from mxfp4.converters.convert import convert
from mxfp4.converters.planning import make_plan
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role
from mxfp4.errors import RecipeError

LINEAR = Recipe(level=Level.LINEAR)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, tiny_moe):
    folder = tmp_path_factory.mktemp("converted") / "out"
    convert(tiny_moe, folder, LINEAR)
    return folder


def dequantized(source, folder):
    """The source's model in transformers with the weights that a converted folder holds."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    if folder is not None:
        with Weights(open_checkpoint(folder)) as weights:
            for name, parameter in model.named_parameters():
                if name in ("lm_head.weight",):
                    continue
                parameter.data.copy_(weights.parameter(name, parameter.shape, torch.float32))
    return model


def test_compare_and_router_check_agree_with_transformers(tiny_moe, converted, few_samples):
    logits, routes = [], []
    for folder in (None, converted):
        model = dequantized(tiny_moe, folder)
        with torch.no_grad():
            found = model(input_ids=few_samples.tokens, output_router_logits=True)
        logits.append(found.logits[:, :-1].log_softmax(-1))
        routes.append([layer.float().topk(4).indices for layer in found.router_logits])
    comparison = compare(tiny_moe, converted, few_samples).to_json()["all"]
    wanted = (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean().item()
    assert comparison["kl"] == pytest.approx(wanted, rel=1e-3)
    same = (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean().item()
    assert comparison["top1"] == pytest.approx(same, abs=0.005)
    report = check_routers(tiny_moe, converted, few_samples)
    assert [row.layer for row in report.layers] == [0, 1, 2, 3]
    for row, one, two in zip(report.layers, *routes, strict=True):
        sets = (one.sort(-1).values == two.sort(-1).values).all(-1).float().mean().item()
        assert row.same_set == pytest.approx(sets, abs=0.005)
        assert sum(row.load_source) == few_samples.token_count * 4
    assert report.first_divergence == 0
    assert len(report.protected) == 22
    assert all(same for _, same in report.protected.values())


def test_a_model_equals_itself(tiny_moe, few_samples):
    found = compare(tiny_moe, tiny_moe, few_samples).to_json()["all"]
    assert (found["kl"], found["top1"], found["nats_more"]) == (0, 1, 0)
    report = check_routers(tiny_moe, tiny_moe, few_samples)
    assert report.first_divergence is None
    assert report.to_json()["summary"]["never_changed"] == 1
    assert all(row.router_kl == 0 and row.load_shift == 0 for row in report.layers)


def test_changed_routers_are_found_and_named(tmp_path, tiny_moe, few_samples):
    roles = frozenset({Role.ROUTER})
    forced = Recipe(level=Level.LINEAR, quantize=("*.mlp.gate",), force_roles=roles)
    convert(tiny_moe, tmp_path / "out", forced)
    report = check_routers(tiny_moe, tmp_path / "out", few_samples)
    changed = report.to_json()["summary"]["protected_changed"]
    assert changed == [f"model.layers.{n}.mlp.gate.weight" for n in range(4)]


def test_figures_of_a_routing_by_hand():
    source = Routing(
        torch.tensor([[3.0, 2, 0], [0, 3, 2], [2, 0, 3]]), torch.tensor([[0, 1], [1, 2], [2, 0]])
    )
    other = Routing(
        torch.tensor([[3.0, 0, 2], [0, 3, 2], [3, 0, 2]]), torch.tensor([[0, 2], [2, 1], [0, 2]])
    )
    row = compare_routing(5, source, other, torch.tensor([False, False, True]))
    assert row.same_set == pytest.approx(2 / 3)
    assert row.overlap == pytest.approx((0.5 + 1 + 1) / 3)
    assert row.same_first == pytest.approx(2 / 3)
    assert row.load_source == (2, 2, 2)
    assert row.load_converted == (2, 1, 3)
    assert row.load_shift == pytest.approx(1 / 6)
    assert row.first_changed == pytest.approx(1 / 3)
    assert row.changed_clear == 0  # all margins are the same, none is above the median


def test_dense_models_have_no_routers_to_check(tmp_path, builder, few_samples):
    tensors = {k: v for k, v in builder.moe(layers=1).items() if "experts" not in k}
    tensors = {k: v for k, v in tensors.items() if "mlp.gate" not in k}
    config = {**builder.moe_config(num_hidden_layers=1), "model_type": "qwen3"}
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        del config[key]
    folder = builder.write(tmp_path / "dense", [tensors], config)
    with pytest.raises(RecipeError, match="no routers"):
        check_routers(folder, folder, few_samples)


def test_interval_is_that_of_the_mean():
    assert interval([1.0, 2, 3, 4]) == pytest.approx(1.96 * (5 / 3) ** 0.5 / 2)
    assert interval([1.0]) == float("inf")


@pytest.mark.parametrize("bits", [4.25, 4.6, 8.0])
def test_sensitivity_meets_its_budget_and_its_recipe_gives_that_size(tmp_path, tiny_moe, bits):
    plan = make_plan(open_checkpoint(tiny_moe), LINEAR)
    report = sensitivity(plan, Budget(bits=bits))
    assert report.bits <= bits
    scores = [group.score for group in report.groups]
    assert scores == sorted(scores, reverse=True)
    assert bool(report.kept) == (bits > 4.25)
    made = make_plan(open_checkpoint(tiny_moe), report.recipe)
    assert made.totals["bytes_after"] == report.byte_count
    limit = Budget(max_bytes=report.byte_count)
    assert sensitivity(plan, limit).byte_count <= report.byte_count
    with pytest.raises(RecipeError, match="smallest"):
        sensitivity(plan, Budget(bits=4.0))
    with pytest.raises(RecipeError, match="one budget"):
        sensitivity(plan, Budget())


def test_heat_map_is_sound_svg_with_every_figure():
    layers = [dict.fromkeys(METRICS, 0.25) | {"layer": number} for number in range(3)]
    root = ElementTree.fromstring(heat_map(layers))
    names = {"svg": "http://www.w3.org/2000/svg"}
    assert len(root.findall("svg:rect", names)) == 3 * len(METRICS)
    texts = [text.text for text in root.findall("svg:text", names)]
    assert {"layer 0", "layer 1", "layer 2", "25.00%", "0.25000"} <= set(texts)
    same = [dict.fromkeys(METRICS, 1.0) | {"layer": 0}]
    assert "rgb(" in heat_map(same)
    assert "<h1>" in page(None, None)


def test_commands_from_text_to_report(tmp_path, tiny_moe, texts, invoke):
    files = [item for file in texts for item in ("--text", file)]
    common = (*files, "--tokens", 128, "--sequence-length", 64)
    out = tmp_path / "out"
    arguments = (*common, "--level", "experts", "--method", "search", "--check-routers", "--json")
    found = json.loads(invoke("calibrate", tiny_moe, out, *arguments).stdout)
    assert found["calibration"]["summary"]["modules"] == 384
    assert found["calibration"]["data"]["domains"] == ["code", "prose"]
    assert len(found["routers"]["layers"]) == 4
    html = (out / "mxfp4_calibration.html").read_text()
    assert "<svg" in html
    assert found["routers"]["protected"]["model.norm.weight"]["sha256"] in html
    assert json.loads((out / "mxfp4_routers.json").read_text()) == found["routers"]
    again = invoke("calibrate", tiny_moe, out, *common, "--check-routers").stdout
    assert "same experts" in again
    assert "codes " not in again
    figures = json.loads(invoke("compare", tiny_moe, out, *common, "--json").stdout)
    assert set(figures["domains"]) == {"code", "prose"}
    assert 0 < figures["all"]["kl"] < 1
    assert "perplexity" in invoke("compare", tiny_moe, out, *common).stdout


def test_commands_with_statistics(tmp_path, tiny_moe, texts, invoke):
    files = [item for file in texts for item in ("--text", file)]
    stats = tmp_path / "stats"
    common = (*files, "--tokens", 64, "--sequence-length", 32)
    collected = invoke("calibrate", tiny_moe, "--collect", stats, *common)
    assert "384 modules" in collected.stdout
    recipe = tmp_path / "recipe.yaml"
    chosen = invoke("sensitivity", tiny_moe, "--bits", 8, "--stats", stats, "--write", recipe)
    assert "groups kept" in chosen.stdout
    assert yaml.safe_load(recipe.read_text())["keep"]
    arguments = ("--stats", stats, "--recipe", recipe, "--method", "search")
    assert invoke("calibrate", tiny_moe, tmp_path / "out", *arguments, "-q").stdout == ""


def test_wrong_use_ends_with_a_hint(tmp_path, tiny_moe, invoke):
    assert "hint" in invoke("calibrate", tiny_moe, code=2).output
    assert "--text" in invoke("calibrate", tiny_moe, tmp_path / "out", code=2).output
    invoke("sensitivity", tiny_moe, code=2)
