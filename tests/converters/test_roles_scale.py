"""The largest public list of tensors, 93 layers of 896 experts, rebuilt from its shapes."""

import collections
import functools
import json
import re
from pathlib import Path

import pytest

from mxfp4.converters.decide import Action, decide
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.ignore import ignore_patterns, modules_by_action
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role, classify

CORPUS_FILE = Path(__file__).parents[1] / "data" / "architectures.json"
LAYERS, EXPERTS, TOWER_BLOCKS = 93, 896, 27
FULL_ATTENTION = {*range(4, 93, 4), 93}
STACK = "language_model.model.layers."
EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(\w+)\.weight")


@functools.cache
def entry():
    return json.loads(CORPUS_FILE.read_text())["kimi_k3"]


def kimi_k3(packed):
    """All tensors: dense layer 0, then latent mixtures with linear or latent attention."""
    layers = collections.defaultdict(dict)
    for truth in entry()["tensors"]:
        name, shape = truth["name"], tuple(truth["shape"])
        if name.startswith(STACK):
            number, _, leaf = name.removeprefix(STACK).partition(".")
            layers[number][leaf] = (truth["dtype"], shape)
        elif ".blocks." in name:
            for block in range(TOWER_BLOCKS):
                yield TensorInfo(
                    re.sub(r"blocks\.\d+", f"blocks.{block}", name), truth["dtype"], shape
                )
        else:
            yield TensorInfo(name, truth["dtype"], shape)
    dense = next(leaves for leaves in layers.values() if "mlp.gate_proj.weight" in leaves)
    latent = next(leaves for leaves in layers.values() if "self_attn.q_a_proj.weight" in leaves)
    linear = next(
        leaves for leaves in layers.values() if leaves is not dense and "self_attn.A_log" in leaves
    )
    for layer in range(LAYERS):
        leaves = dense if layer == 0 else latent if layer + 1 in FULL_ATTENTION else linear
        yield from _layer(f"{STACK}{layer}", leaves, packed)


def _layer(base, leaves, packed):
    for leaf, (dtype, shape) in leaves.items():
        found = EXPERT.fullmatch(leaf)
        if found is None:
            yield TensorInfo(f"{base}.{leaf}", dtype, shape)
        elif found[1] == "0":
            rows, columns = shape
            for expert in range(EXPERTS):
                module = f"{base}.block_sparse_moe.experts.{expert}.{found[2]}"
                if packed:
                    yield TensorInfo(f"{module}.weight_packed", "U8", (rows, columns // 2))
                    yield TensorInfo(f"{module}.weight_scale", "U8", (rows, columns // 32))
                else:
                    yield TensorInfo(f"{module}.weight", "BF16", shape)


@pytest.mark.parametrize(("packed", "count"), [(True, 497_220), (False, 249_924)])
def test_roles_of_the_whole_list(packed, count):
    tensors = list(kimi_k3(packed))
    assert len(tensors) == count
    roles = classify(tensors, entry()["config"])
    assert all(role.recognised for role in roles.values())
    counts = collections.Counter(role.role for role in roles.values())
    assert counts[Role.EXPERT] == 92 * EXPERTS * 3
    assert counts[Role.ROUTER] == counts[Role.ROUTER_BIAS] == 92
    decisions = decide(tensors, roles, Recipe(level=Level.LINEAR))
    actions = collections.Counter(
        (decision.role.role, decision.action) for decision in decisions.values()
    )
    wanted = Action.KEEP if packed else Action.QUANTIZE
    assert actions[Role.EXPERT, wanted] == 92 * EXPERTS * 3
    assert actions[Role.ROUTER, Action.KEEP] == 92
    assert actions[Role.ATTENTION, Action.QUANTIZE] == 69 * 4 + 24 * 5


def test_a_few_dozen_patterns_cover_the_whole_list():
    tensors = list(kimi_k3(packed=False))
    roles = classify(tensors, entry()["config"])
    quantized, kept = modules_by_action(decide(tensors, roles, Recipe()))
    assert len(quantized) == 92 * EXPERTS * 3
    patterns = ignore_patterns(quantized, kept)
    assert len(patterns) < 50
    assert r"re:.*\bblock_sparse_moe\.gate$" in patterns
    assert r"re:.*\bblock_sparse_moe\.routed_expert_down_proj$" in patterns
    assert r"re:.*\bembed_tokens$" in patterns
