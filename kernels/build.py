"""Compile the C codec: one object per instruction set, linked to one library without Python in it.

`python -m mxfp4.kernels.build` builds it in place, beside this file. The package's own build loads
this file by its path, so it imports the standard library only.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
LIBRARY_NAME = "_codec.dylib" if sys.platform == "darwin" else "_codec.so"

COMPILERS = ("cc", "gcc", "clang")

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    # Sums must round alike everywhere, so no fused multiply-add where the source has none.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)

_AVX2 = ("-mavx2", "-mbmi2", "-mfma", "-mf16c", "-mpopcnt")
_AVX512 = ("f", "bw", "dq", "vl", "vbmi", "vbmi2", "vnni")

OBJECTS = {
    "x86_64": {
        "baseline": (),
        "avx2": _AVX2,
        "avx512": (*_AVX2, *(f"-mavx512{part}" for part in _AVX512), "-mprefer-vector-width=512"),
    },
}
"""Extra flags of each object, by machine; a machine that is not listed has the baseline alone."""

MACHINE_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


class BuildError(Exception):
    """The library cannot be built; the message says why and how to go on."""


def compiler() -> list[str]:
    """The C compiler as a command: `$CC`, or the first of cc, gcc and clang."""
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError(
        f"no C compiler: none of {', '.join(COMPILERS)} is on the path and CC is unset"
    )


def build(output: Path, machine: str | None = None) -> Path:
    """Compile and link the library at `output`, replacing it in one step.

    `machine` is the target when `$CC` is a cross compiler. Raises `BuildError`.
    """
    machine = (machine or platform.machine()).lower()
    machine = MACHINE_NAMES.get(machine, machine)
    command = compiler()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        objects = []
        for name, extra in OBJECTS.get(machine, {"baseline": ()}).items():
            target = str(Path(folder, f"{name}.o"))
            source = str(SOURCES / "codec.c")
            _run([*command, *FLAGS, *extra, f"-DMX_SUFFIX={name}", "-c", source, "-o", target])
            objects.append(target)
        target = str(Path(folder, "dispatch.o"))
        _run([*command, *FLAGS, "-c", str(SOURCES / "dispatch.c"), "-o", target])
        library = Path(folder, LIBRARY_NAME)
        _run([*command, "-shared", "-o", str(library), *objects, target])
        os.replace(library, output)
    return output


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run the C compiler {command[0]!r}: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise BuildError(f"{shlex.join(command)} failed:\n" + "\n".join(lines[:20]))


def main() -> int:
    """Build in place and say where."""
    try:
        library = build(Path(__file__).with_name(LIBRARY_NAME))
    except BuildError as error:
        print(f"the C codec was not built: {error}", file=sys.stderr)
        return 1
    print(library)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
