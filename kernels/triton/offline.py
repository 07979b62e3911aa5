"""Compile kernels for devices that are not here, and read what the compiler made of them.

The Triton wheel carries assemblers and disassemblers, so registers, spills, shared memory, kinds of
matrix instruction and instructions per weight of the main loop are facts that any machine can
establish.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ALIGNED = "!"
"""Ends the type of an argument that is divisible by 16, as in "*bf16!"."""

_MATRIX = re.compile(
    r"^(HGMMA|QGMMA|HMMA|QMMA|OMMA|UTC[A-Z]*MMA|v_mfma_[a-z0-9_]+|v_wmma_[a-z0-9_]+)"
)
_ALU = re.compile(
    r"^(LOP3|SHF|PRMT|IADD3?|SEL|ISETP|LEA|VIADD|IMNMX|FMNMX|F2FP|FSETP|FSEL|PLOP3|SGXT|BMSK|ISCADD"
    r"|VIMNMX|VIADDMNMX|POPC|FLO|LOP)\b"
)
_SASS_LABEL = re.compile(r"^(\.L_[\w.]+):")
_SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
_GCN_LABEL = re.compile(r"^(\.L\w+):")
_GCN_LINE = re.compile(r"^\s+([sv]_\w+|ds_\w+|buffer_\w+|global_\w+|scratch_\w+)\s*(.*)$")


@dataclass(frozen=True)
class MachineCode:
    """Facts about one compiled kernel.

    `matrix` are the matrix instructions of the whole kernel; `loop` counts the instructions of the
    main loop, the innermost one with matrix instructions (without any: the longest, or the whole
    body), `flushes` are instructions that make zeros of float32 subnormals, and `ttir` is Triton's
    own form of the kernel.
    """

    registers: int
    spills: int
    shared_bytes: int
    instructions: int
    matrix: frozenset[str]
    loop: Counter[str]
    warps: int
    warp_size: int
    flushes: frozenset[str]
    ttir: str

    def per_weight(self, weights: int) -> float:
        """Instructions issued in the loop for each of the `weights` one round of it covers."""
        return self.loop.total() * self.warps * self.warp_size / weights

    def alu_per_weight(self, weights: int) -> float:
        """Those of them that go to the integer pipe (NVIDIA) or the vector unit (AMD)."""
        count = sum(n for name, n in self.loop.items() if _ALU.match(name) or _is_vector(name))
        return count * self.warps * self.warp_size / weights


def _is_vector(name: str) -> bool:
    return name.startswith("v_") and not _MATRIX.match(name)


def target_of(architecture: str) -> GPUTarget:
    """Triton's target for "sm_90" or "gfx942"."""
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)


def compile_offline(
    kernel: Any,
    architecture: str,
    arguments: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    warps: int,
    stages: int,
) -> MachineCode:
    """Compile a Triton kernel; `arguments` are types such as "*bf16!" or "i32" by name."""
    names: list[str] = kernel.arg_names
    missing = set(names) - set(arguments) - set(constants)
    assert not missing, f"{kernel} needs {missing}"
    signature, attributes = {}, {}
    for position, name in enumerate(names):
        kind = "constexpr" if name in constants else arguments[name]
        if kind.endswith(ALIGNED):
            attributes[(position,)] = [["tt.divisibility", 16]]
        signature[name] = kind.removesuffix(ALIGNED)
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=target_of(architecture), options=options)
    read = _read_nvidia if architecture.startswith("sm_") else _read_amd
    return read(compiled)


def _read_nvidia(compiled: Any) -> MachineCode:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        listing = _tool("nvdisasm", "-c", path)
        usage = _tool("cuobjdump", "-res-usage", path)
    found = re.search(r"REG:(\d+)", usage)
    assert found, f"no register count in {usage!r}"
    code, labels = _parse(listing, _SASS_LABEL, _SASS_LINE)
    return MachineCode(
        registers=int(found[1]),
        spills=sum(name.startswith(("LDL", "STL")) for name, _ in code),
        shared_bytes=compiled.metadata.shared,
        instructions=len(code),
        matrix=_matrix(code),
        loop=_main_loop(code, labels, "BRA"),
        warps=compiled.metadata.num_warps,
        warp_size=32,
        flushes=frozenset(n for n, _ in code if re.match(r"F(MUL|ADD|FMA)\b.*\.FTZ", n)),
        ttir=str(compiled.asm["ttir"]),
    )


def _read_amd(compiled: Any) -> MachineCode:
    listing = str(compiled.asm["amdgcn"])
    numbers = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", listing))
    code, labels = _parse(listing, _GCN_LABEL, _GCN_LINE)
    return MachineCode(
        registers=int(numbers["vgpr_count"]),
        spills=int(numbers["vgpr_spill_count"]),
        shared_bytes=compiled.metadata.shared,
        instructions=len(code),
        matrix=_matrix(code),
        loop=_main_loop(code, labels, "s_cbranch"),
        warps=compiled.metadata.num_warps,
        warp_size=compiled.metadata.warp_size,
        flushes=frozenset(re.findall(r"amdhsa_float_denorm_mode_32 [012]\b", listing)),
        ttir=str(compiled.asm["ttir"]),
    )


def _tool(name: str, *arguments: object) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    command = [str(folder / name), *map(str, arguments)]
    environment = {"PATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


def _parse(
    listing: str, label: re.Pattern[str], line: re.Pattern[str]
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Instructions as (name, operands), and where each label stands among them."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for text in listing.splitlines():
        if found := label.match(text):
            labels[found[1]] = len(code)
        elif found := line.search(text):
            code.append((found[1], found[2]))
    return code, labels


def _matrix(code: list[tuple[str, str]]) -> frozenset[str]:
    return frozenset(found[1] for name, _ in code if (found := _MATRIX.match(name)))


def _main_loop(code: list[tuple[str, str]], labels: dict[str, int], branch: str) -> Counter[str]:
    """Instruction names of the main loop, see `MachineCode`."""
    loops = []
    for position, (name, operands) in enumerate(code):
        found = re.search(r"(\.L[\w.]+)", operands) if name.startswith(branch) else None
        # Code ends with a branch to itself, which is no loop.
        if found and labels.get(found[1], position) < position:
            loops.append(code[labels[found[1]] : position + 1])
    matrix = [loop for loop in loops if _matrix(loop)]
    exits = [position for position, (name, _) in enumerate(code) if name == "EXIT"]
    whole = code[: exits[-1] + 1] if exits else code
    body = min(matrix, key=len) if matrix else max(loops, key=len, default=whole)
    return Counter(name for name, _ in body)
