"""A plan's tables say the same as its tensors one by one."""

import collections
import dataclasses

import pytest

from mxfp4.converters.convert import plan_conversion
from mxfp4.converters.formats import FORMATS, Payload
from mxfp4.converters.ignore_check import NameSet
from mxfp4.converters.plan import OutputOptions, Treatment
from mxfp4.converters.recipe import Level, Recipe
from mxfp4.converters.report import kept_groups


@pytest.fixture(params=list(Level))
def plan(request, moe_folder):
    return plan_conversion(moe_folder, Recipe(level=request.param))


def test_every_tensor_is_of_the_kind_that_it_is_counted_in(plan):
    counts = collections.Counter()
    for tensor, number in zip(plan.tensors, plan.tensors.kind_numbers, strict=True):
        first, _ = plan.kinds[number]
        counts[number] += 1
        assert tensor.treatment is first.treatment
        assert tensor.decision._replace(role=first.decision.role) == first.decision
        assert tensor.decision.role.verdict == first.decision.role.verdict
        assert tensor.info[1:] == first.info[1:]
        assert tensor.byte_count == first.byte_count
    assert [count for _, count in plan.kinds] == [counts[n] for n in range(len(plan.kinds))]
    names = [tensor.info.name for tensor in plan.tensors]
    order = [names.index(first.info.name) for first, _ in plan.kinds]
    assert order == sorted(order)


def test_kinds_stay_with_the_tensors_of_a_changed_plan(plan):
    assert dataclasses.replace(plan, codes="others").kinds is plan.kinds


def test_kept_groups_count_what_is_not_quantized(plan):
    members = collections.defaultdict(list)
    for tensor in plan.tensors:
        if tensor.treatment is not Treatment.QUANTIZE:
            role = tensor.decision.role
            key = (role.recognised, str(role.role), tensor.decision.reason)
            members[key].append(tensor.info.name)
    found = {
        (row["recognised"], row["role"], row["reason"]): (row["first"], row["tensors"])
        for row in kept_groups(plan)
    }
    assert found == {key: (names[0], len(names)) for key, names in members.items()}
    assert list(found) == sorted(found)


def test_shards_count_the_bytes_of_their_tensors(moe_folder):
    for name, layout in FORMATS.items():
        if layout.model_types is None:
            plan = plan_conversion(moe_folder, options=OutputOptions(format=name))
            for shard in plan.shards:
                assert shard.byte_count == sum(task.byte_count(layout) for task in shard.tasks)


@pytest.mark.parametrize("name", FORMATS)
def test_layouts_name_tensors_by_module_and_leaf(name):
    """Planning builds the names of a module's tensors from the leaves of its shape."""
    layout = FORMATS[name]
    shapes = [(64, 128)] if layout.payload is not Payload.MXFP4 else [(64, 128), (4, 64, 128)]
    for shape in shapes:
        bare = layout.tensors("", shape)
        assert layout.tensors("a.b", shape) == tuple(
            info._replace(name="a.b" + info.name) for info in bare
        )


def test_names_can_be_added_parsed():
    names = ["model.layers.0.mlp.experts.3.up_proj", "model.layers.1.mlp.experts.12.up_proj"]
    parsed = NameSet(["lm_head"])
    parsed.add_members("model.layers.#.mlp.experts.#.up_proj", [("0", "3"), ("1", "12")])
    assert parsed.families == NameSet(["lm_head", *names]).families
    assert names[0] in parsed
    assert "lm_head" in parsed
    assert "model.layers.0.mlp.experts.12.up_proj" not in parsed
    assert "model.norm" not in parsed
    assert "model.norm" not in parsed.families
