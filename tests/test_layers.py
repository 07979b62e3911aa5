"""Dependencies point one way: cli, calibration, converters, kernels, core."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "mxfp4": {"mxfp4"},
    "kernels": {"mxfp4", "kernels"},
    "converters": {"mxfp4", "kernels", "converters"},
    "calibration": {"mxfp4", "kernels", "converters", "calibration"},
    "cli": {"mxfp4", "kernels", "converters", "calibration", "cli"},
}
FRONT_DOORS = {ROOT / "mxfp4" / "__init__.py", ROOT / "mxfp4" / "__main__.py"}
HOMES = {"click": {"cli"}, "tqdm": {"cli"}, "triton": {"kernels"}, "xxhash": {"converters"}}


def python_files() -> Iterator[tuple[str, Path]]:
    for part in MAY_IMPORT:
        for path in sorted((ROOT / part).rglob("*.py")):
            inside_link = part == "mxfp4" and path.relative_to(ROOT / part).parts[0] in MAY_IMPORT
            if path not in FRONT_DOORS and not inside_link:
                yield part, path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize(
    ("part", "path"), [pytest.param(p, f, id=str(f.relative_to(ROOT))) for p, f in python_files()]
)
def test_imports_point_down(part, path):
    for line, name in imports(path):
        root, *rest = name.split(".")
        if root == "mxfp4":
            imported = rest[0] if rest and rest[0] in MAY_IMPORT else "mxfp4"
            assert imported in MAY_IMPORT[part], f"{path}:{line}: {part} may not import {imported}"
        elif root in HOMES:
            assert part in HOMES[root], f"{path}:{line}: only {HOMES[root]} may import {root}"


HEAVY = ("torch", "triton", "transformers", "ray", "numba", "huggingface_hub", "safetensors")


@pytest.mark.parametrize("module", ["mxfp4", "mxfp4.cli.main", "mxfp4.converters.convert"])
def test_import_is_light(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
