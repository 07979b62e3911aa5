"""Recipes: one object whether read from a file or built by hand, and no silent key."""

import json

import pytest

from mxfp4.converters.recipe import Level, Recipe, parse_forced
from mxfp4.converters.roles import Role
from mxfp4.errors import RecipeError
from mxfp4.spec import ScaleRule, TieRule


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_a_file_and_its_object_are_the_same(tmp_path):
    path = write(
        tmp_path,
        """
level: linear
keep:
  - "*.o_proj"
  - re:.*layers\\.0\\..*
quantize: lm_head
force_roles:
  lm_head: quantize
rule: rceil
ties: away
""",
    )
    recipe = Recipe(
        level=Level.LINEAR,
        keep=("*.o_proj", r"re:.*layers\.0\..*"),
        quantize=("lm_head",),
        force_roles=frozenset({Role.LM_HEAD}),
        rule=ScaleRule.RCEIL,
        ties=TieRule.AWAY,
    )
    assert Recipe.load(path) == recipe
    assert Recipe.from_mapping(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_an_empty_file_is_the_default_recipe(tmp_path):
    assert Recipe.load(write(tmp_path, "# nothing\n")) == Recipe()
    assert Recipe.from_mapping(Recipe().to_json()) == Recipe()
    assert hash(Recipe()) == hash(Recipe())


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("levle: linear", "unknown key 'levle'", "did you mean 'level'"),
        ("level: lineal", "unknown level 'lineal'", "did you mean 'linear'"),
        ("rule: even-ish", "unknown rule 'even-ish'", "did you mean 'even'"),
        ("force_roles: {roter: quantize}", "unknown role 'roter'", "did you mean 'router'"),
        ("force_roles: {router: keep}", "router is 'keep'", "router=quantize"),
        ("force_roles: 3", "maps a role", ""),
        ("keep: 3", "list of patterns", ""),
        ("keep: [3]", "list of patterns", ""),
        ("- level", "mapping", ""),
        ("level: [", "cannot read", ""),
    ],
)
def test_refusals_name_the_file_and_the_way_out(tmp_path, text, message, hint):
    with pytest.raises(RecipeError) as caught:
        Recipe.load(write(tmp_path, text))
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.file == "recipe.yaml"


def test_a_missing_file_is_a_recipe_error(tmp_path):
    with pytest.raises(RecipeError, match="cannot read"):
        Recipe.load(tmp_path / "none.yaml")


def test_roles_are_forced_in_two_spellings():
    wanted = frozenset({Role.ROUTER, Role.NORM})
    assert parse_forced(["router=quantize", "norm=quantize"]) == wanted
    assert parse_forced({"router": "quantize", "norm": "quantize"}) == wanted
    with pytest.raises(RecipeError):
        parse_forced(["router"])
