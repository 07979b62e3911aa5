"""The static gate passes for a sample of every kind of launch, and catches what it is there for.

It runs in a process of its own, because kernels are either interpreted or compiled.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mxfp4.kernels.triton import gate

ROOT = Path(__file__).parents[3]


def compiled(*arguments):
    """Run Python without the interpreter of Triton."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_sample_of_the_shipped_launches(tmp_path):
    out = tmp_path / "verdicts.json"
    done = compiled("-m", "mxfp4.kernels.triton.gate", "--quick", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {v["name"]: v for v in json.loads(out.read_text())["cases"]}
    assert len(verdicts) >= 25
    decode = [v for name, v in verdicts.items() if "/decode/" in name and "/folded" in name]
    assert all(v["issue_per_weight"] <= 3.0 for v in decode if v["name"].startswith("sm_90"))
    assert any("HGMMA" in v["matrix"] for v in verdicts.values())


def test_every_pattern_of_the_sample_names_a_case():
    from fnmatch import filter as matching

    names = [case.name for case in gate.cases(tuple(gate.TABLES))]
    assert len(set(names)) == len(names)
    for pattern in gate.SAMPLE:
        assert matching(names, pattern), pattern


BAD_KERNELS = """
    import triton, triton.language as tl
    from mxfp4.kernels.triton.gate import Case, check

    @triton.jit
    def narrow(x_ptr, stride, n, out_ptr):
        i = tl.program_id(0)
        row = i + tl.arange(0, 128)
        value = tl.load(x_ptr + row * stride, mask=row < n)
        tl.store(out_ptr + row.to(tl.int64) * stride, tl.exp(value) + tl.sin(value), mask=row < n)

    @triton.jit
    def empty(x_ptr, stride, n, out_ptr):
        pass

    @triton.jit
    def spilling(x_ptr, stride, n, out_ptr):
        i = tl.arange(0, 64)
        a = tl.load(x_ptr + i[:, None] * 64 + i[None, :])
        b = tl.trans(a)
        for _ in range(n):
            a, b = tl.exp(b) + a, tl.sin(a) * b
            tl.debug_barrier()
        tl.store(out_ptr + i[:, None] * 64 + i[None, :], a + b)

    arguments = {"x_ptr": "*fp32!", "stride": "i32", "n": "i32", "out_ptr": "*fp32!"}
    for kernel in (narrow, empty, spilling):
        case = Case("bad", "sm_90", kernel, arguments, {}, 1, 1, 4096, "HMMA", 0.01)
        print("|".join(check(case).failures))
"""


def test_gate_catches_bad_kernels(tmp_path):
    script = tmp_path / "bad.py"
    script.write_text(textwrap.dedent(BAD_KERNELS))
    done = compiled(script)
    assert done.returncode == 0, done.stderr
    narrow, empty, spilling = done.stdout.strip().splitlines()
    assert "32-bit pointer product" in narrow
    assert "wanted HMMA" in narrow
    assert "compiled to nothing" in empty
    assert "spills" in spilling
    assert "instructions per weight" in spilling


@pytest.mark.parametrize("name", ["dense_kernel", "grouped_kernel"])
def test_gate_covers_every_architecture_that_has_a_table(name):
    found = {
        case.architecture for case in gate.cases(tuple(gate.TABLES)) if case.kernel.__name__ == name
    }
    assert found == set(gate.TABLES)
