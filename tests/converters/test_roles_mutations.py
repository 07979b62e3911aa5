"""Known architectures under other names: what must stay stays, experts are found or reported."""

import functools
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from mxfp4.converters.decide import Action, decide
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.roles import Role, classify

CORPUS_FILE = Path(__file__).parents[1] / "data" / "architectures.json"
NEVER = {
    "router",
    "router_bias",
    "shared_expert_gate",
    "embedding",
    "lm_head",
    "norm",
    "conv",
    "ssm_small",
    "indexer",
}
PREFIXES = ("model.", "", "language_model.model.", "thinker.model.")
KNOWN_PREFIXES = (
    "language_model.model.",
    "model.language_model.",
    "backbone.",
    "transformer.",
    "model.",
)
CONTAINERS = {
    "moe": "moe",
    "mlp.experts": "mlp",
    "block_sparse_moe.experts": "block_sparse_moe",
    "feed_forward.experts": "feed_forward",
}
ROUTERS = ("gate", "router", "wg", "gate.wg", "router.layer", "router.classifier", "primary_router")
SHARED = ("shared_expert", "shared_experts", "share_expert", "shared_mlp", "extra_mlp")
BLOCK = re.compile(r"(?P<head>.*layers\.\d+\.)(?P<block>(?:[a-z_]+\.)*?)experts\.")
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@functools.cache
def corpus():
    return json.loads(CORPUS_FILE.read_text())


@functools.cache
def mixtures():
    """Architectures with routed experts in bfloat16, as (config, rows of (name, dtype, shape,
    class, axis))."""
    found = {}
    for name, entry in corpus().items():
        rows = tuple(
            (t["name"], t["dtype"], tuple(t["shape"]), t["class"], t["contract_axis"])
            for t in entry["tensors"]
        )
        if any(row[3] == "expert" and row[1] == "BF16" for row in rows):
            found[name] = (entry["config"], rows)
    return found


def reprefix(rows, prefix):
    old = next(
        (
            p
            for p in KNOWN_PREFIXES
            if any(row[0].startswith((p + "layers.", p + "h.")) for row in rows)
        ),
        "",
    )
    for name, *rest in rows:
        if old and not name.startswith(old):
            yield (name, *rest)
        else:
            yield (prefix + name[len(old) :], *rest)


def rename(rows, pattern, replacement, classes=None):
    """Rename where the class fits (None: anywhere)."""
    for name, dtype, shape, role, axis in rows:
        if classes is None or role in classes:
            name = re.sub(pattern, replacement, name)
        yield name, dtype, shape, role, axis


def recontain(rows, container):
    """Move the experts of each layer, and what stands beside them, to another container."""
    rows = list(rows)
    blocks = {m["head"]: m["block"] for row in rows if (m := BLOCK.match(row[0]))}
    parent = CONTAINERS[container] + "."
    for name, *rest in rows:
        head = next((h for h in blocks if name.startswith(h)), None)
        if head is None or not name.startswith(head + blocks[head]):
            yield (name, *rest)
            continue
        tail = name[len(head + blocks[head]) :]
        if tail.startswith("experts."):
            yield (head + container + tail[len("experts") :], *rest)
        elif blocks[head]:
            yield (head + parent + tail, *rest)
        else:
            yield (name, *rest)


def respell_router(rows, spelling):
    rows = list(rows)
    weights = [row[0].removesuffix(".weight") for row in rows if row[3] == "router"]
    weights = [w for w in weights if re.search(r"layers\.\d+\.", w)]
    for name, *rest in rows:
        module = next((w for w in weights if name == w or name.startswith(w + ".")), None)
        if module is None:
            yield (name, *rest)
        else:
            known = r"(router\.classifier|router\.layer|gate\.wg|gate|router)$"
            yield (re.sub(known, spelling, module) + name[len(module) :], *rest)


def fuse(rows, style):
    """Stack per-expert matrices: "out first" `[E, N, K]` or "in first" `[E, K, N]`."""
    rows = list(rows)
    experts = {}
    for row in rows:
        m = re.match(r"(.*experts)\.(\d+)\.(\w+)\.weight$", row[0])
        if m and row[3] == "expert":
            experts.setdefault(m[1], {}).setdefault(m[3], []).append(row)
    done = set()
    for row in rows:
        m = re.match(r"(.*experts)\.(\d+)\.(\w+)\.weight$", row[0])
        if not (m and row[3] == "expert"):
            yield row
        elif m[1] not in done:
            done.add(m[1])
            yield from _stack(m[1], experts[m[1]], style)


def _stack(parent, projections, style):
    gated = next((g for g in GATED if g[0] in projections), None)
    leaves = dict.fromkeys(projections)
    for leaf in leaves:
        first = projections[leaf][0]
        count = len(projections[leaf])
        n, k = first[2]
        label, n_all = leaf, n
        if gated and leaf == gated[0]:
            label, n_all = ("gate_up_proj" if leaf == "gate_proj" else "w13_weight"), 2 * n
        elif gated and leaf == gated[1]:
            continue
        elif leaf == "w2":
            label = "w2_weight"
        shape = (count, n_all, k) if style == "out first" else (count, k, n_all)
        yield f"{parent}.{label}", "BF16", shape, "expert", 2 if style == "out first" else 1


def split(rows):
    """Cut stacked experts into single matrices."""
    for row in rows:
        name, dtype, shape, role, axis = row
        if role != "expert" or len(shape) != 3:
            yield row
            continue
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        n, k = (shape[1], shape[2]) if axis == 2 else (shape[2], shape[1])
        single = "down_proj" if leaf in ("down_proj", "output_linear") else None
        names = [single] if single else ["gate_proj", "up_proj"]
        for expert, projection in itertools.product(range(shape[0]), names):
            base = parent if parent.endswith("experts") else parent + ".experts"
            full = f"{base}.{expert}.{projection}.weight"
            yield full, dtype, (n // len(names), k), role, 1


def judge(config, rows):
    """Broken rules and unfound experts of one mutated model."""
    rows = list(rows)
    tensors = [TensorInfo(name, dtype, shape) for name, dtype, shape, _, _ in rows]
    assert len({info.name for info in tensors}) == len(tensors)
    roles = classify(tensors, config)
    decisions = decide(tensors, roles, Recipe(level=Level.LINEAR))
    broken, missed, experts = [], [], 0
    for name, _, shape, role, axis in rows:
        decision = decisions[name]
        if role in NEVER and decision.action is Action.QUANTIZE:
            broken.append((name, role, decision.reason))
        if role == "expert":
            experts += 1
            if decision.role.role is not Role.EXPERT or decision.role.axis != axis:
                missed.append((name, shape, axis, decision.role))
    silent = [row for row in missed if row[3].recognised]
    return broken, missed, silent, experts


def check(cases, at_least=500):
    found = missing = 0
    for label, config, rows in cases:
        broken, missed, silent, experts = judge(config, rows)
        assert not broken, label
        assert not silent, label
        found, missing = found + experts, missing + len(missed)
    assert found >= at_least
    assert missing <= found // 100


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda p: p or "none")
def test_prefixes(prefix):
    check((n, c, reprefix(rows, prefix)) for n, (c, rows) in mixtures().items())


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers(container):
    check((n, c, recontain(rows, container)) for n, (c, rows) in mixtures().items())


def test_a_container_nobody_has_heard_of_is_found_by_its_count():
    cases = [
        (n, c, rename(rows, r"\.experts\.(\d+)\.", r".workers.\1.", {"expert"}))
        for n, (c, rows) in mixtures().items()
        if n not in ("gpt_oss", "gemma4", "llama4", "granitemoe", "longcat_flash", "kimi_k3")
    ]
    check(cases)


def test_experts_that_cannot_be_counted_are_reported():
    config, rows = mixtures()["kimi_k3"]  # the corpus lists eight of its 896 experts
    rows = list(rename(rows, r"\.experts\.(\d+)\.", r".workers.\1.", {"expert"}))
    broken, missed, silent, experts = judge(config, rows)
    assert (broken, silent) == ([], [])
    assert len(missed) == experts


@pytest.mark.parametrize("spelling", ROUTERS)
def test_routers(spelling):
    check((n, c, respell_router(rows, spelling)) for n, (c, rows) in mixtures().items())


@pytest.mark.parametrize("spelling", SHARED)
def test_shared_experts(spelling):
    for name, (config, rows) in mixtures().items():
        mutated = list(rename(rows, r"shared_(experts?|mlp)\.", spelling + ".", {"shared_expert"}))
        broken, missed, _, _ = judge(config, mutated)
        assert not broken
        assert not missed
        roles = classify([TensorInfo(*row[:3]) for row in mutated], config)
        for row in mutated:
            if row[3] == "shared_expert":
                assert roles[row[0]].role is Role.SHARED_EXPERT, (name, row)


@pytest.mark.parametrize("style", ["out first", "in first"])
def test_stacked_experts(style):
    cases = [
        (n, c, fuse(rows, style))
        for n, (c, rows) in mixtures().items()
        if n not in ("longcat_flash",)  # its copy experts have no down projection
    ]
    stacked = 0
    for label, config, rows in cases:
        broken, missed, _, experts = judge(config, rows)
        assert not broken, label
        assert not missed, label
        stacked += experts
    assert stacked >= 60


def test_split_experts():
    names = ("gpt_oss", "gemma4", "llama4", "granitemoe")
    check(((n, mixtures()[n][0], split(mixtures()[n][1])) for n in names), at_least=192)


def test_many_changes_at_once():
    chance = random.Random(20)
    cases = []
    for name, (config, rows) in mixtures().items():
        for _ in range(6):
            changed = respell_router(rows, chance.choice(ROUTERS))
            changed = rename(
                changed, r"shared_(experts?|mlp)\.", chance.choice(SHARED) + ".", {"shared_expert"}
            )
            if name != "longcat_flash" and chance.random() < 0.5:
                changed = fuse(changed, chance.choice(["out first", "in first"]))
            changed = recontain(changed, chance.choice(list(CONTAINERS)))
            changed = reprefix(list(changed), chance.choice(PREFIXES))
            cases.append((name, config, list(changed)))
    check(cases)


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda p: p or "none")
def test_prefixes_of_all_models(prefix):
    for name, entry in corpus().items():
        rows = [
            (t["name"], t["dtype"], tuple(t["shape"]), t["class"], t["contract_axis"])
            for t in entry["tensors"]
        ]
        broken, missed, _, _ = judge(entry["config"], reprefix(rows, prefix))
        assert not broken, name
        assert not [m for m in missed if not m[0].startswith("mtp")], name
