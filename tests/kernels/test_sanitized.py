"""The C codec under sanitizers: instruction sets against the baseline, on random blocks."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

from mxfp4.kernels import build, native

MACHINE = platform.machine().lower()
SETS = build.OBJECTS.get(build.MACHINE_NAMES.get(MACHINE, MACHINE), {"baseline": ()})
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g"]
ROUNDS = 20_000


def compile_with(flags, *arguments):
    command = [*build.compiler(), *build.FLAGS, *SANITIZE, f"-I{build.SOURCES}", *flags]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Object files of the driver and of the baseline under the name `one`."""
    folder = tmp_path_factory.mktemp("sanitized")
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    try:
        linked = compile_with([], empty, "-o", folder / "empty")
    except build.BuildError as error:
        pytest.skip(str(error))
    if linked.returncode:
        pytest.skip(f"the compiler has no sanitizers: {linked.stderr.strip()[-200:]}")
    objects = [folder / "fuzz.o", folder / "one.o"]
    source = Path(__file__).with_name("fuzz_codec.c")
    for flags, path, target in (
        ([], source, objects[0]),
        (["-DMX_SUFFIX=one"], build.SOURCES / "codec.c", objects[1]),
    ):
        done = compile_with(flags, "-c", path, "-o", target)
        assert not done.returncode, done.stderr
    return objects


@pytest.mark.parametrize("name", [name for name in SETS if name != "baseline"] or ["baseline"])
def test_sets_agree_and_touch_nothing_else(name, driver, tmp_path):
    if name != "baseline" and name not in native.load().sets:
        pytest.skip(f"this machine has no {name}")
    other, program = tmp_path / "other.o", tmp_path / "fuzz"
    flags = [*SETS[name], "-DMX_SUFFIX=other"]
    done = compile_with(flags, "-c", build.SOURCES / "codec.c", "-o", other)
    assert not done.returncode, done.stderr
    done = compile_with([], *driver, other, "-lm", "-o", program)
    assert not done.returncode, done.stderr
    # Leaks are looked for by tracing the process, which not every machine allows.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run(
        [program, str(ROUNDS)], capture_output=True, text=True, env=environment, check=False
    )
    assert not run.returncode, run.stdout + run.stderr[-2000:]
