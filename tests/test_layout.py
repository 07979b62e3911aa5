"""The folders at the root are the packages, and everything in them is shipped."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("converters", "calibration", "kernels", "cli")


@pytest.fixture(scope="module")
def setuptools_table():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.mark.parametrize("part", PARTS)
def test_no_top_level_package_can_shadow_an_installed_one(part):
    # The registry has a package called `kernels`; a plain folder lets it win, a package would not.
    assert not (ROOT / part / "__init__.py").exists()


@pytest.mark.parametrize("part", PARTS)
def test_link_inside_the_package_leads_to_the_folder(part):
    link = ROOT / "mxfp4" / part
    if not (ROOT / ".git").exists():
        pytest.skip("links exist in a checkout only")
    assert link.is_symlink()
    assert link.resolve() == (ROOT / part).resolve()


@pytest.mark.parametrize("part", PARTS)
def test_every_folder_with_code_is_listed_and_mapped(part, setuptools_table):
    for folder in [ROOT / part, *(ROOT / part).rglob("*")]:
        if folder.is_dir() and folder.name != "__pycache__" and any(folder.glob("*.py")):
            name = "mxfp4." + ".".join(folder.relative_to(ROOT).parts)
            assert name in setuptools_table["packages"], f"{name} would not be shipped"
            mapped = setuptools_table["package-dir"][name]
            assert mapped == folder.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("part", PARTS)
def test_part_is_importable_under_the_one_root(part):
    assert importlib.util.find_spec(f"mxfp4.{part}") is not None
