"""The static gate: every shipped launch is compiled for its device and its machine code checked.

A case fails when the body is (nearly) empty, when the matrix instruction is missing or of the wrong
kind, when registers spill, when shared memory does not fit, when the main loop issues more
instructions per weight than its limit, when subnormals would be flushed, or when a pointer is
computed from a 32-bit product of two variables. `python -m mxfp4.kernels.triton.gate` runs all
cases; with `--quick` those of the sample that CI runs.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import triton

from mxfp4.kernels.triton.bits import CHUNK
from mxfp4.kernels.triton.codec import DEQUANTIZE, QUANTIZE, TIES, ZERO_SIGNS
from mxfp4.kernels.triton.codec_kernel import dequantize_kernel, quantize_kernel
from mxfp4.kernels.triton.configs import TABLES, WIDE_REGIMES, Regime, TileConfig
from mxfp4.kernels.triton.expand_kernel import expand_kernel
from mxfp4.kernels.triton.grouped import ACTIVATIONS
from mxfp4.kernels.triton.grouped_kernel import grouped_kernel
from mxfp4.kernels.triton.native import CAPABILITIES, ActivationFormat
from mxfp4.kernels.triton.native_kernel import native_kernel
from mxfp4.kernels.triton.offline import MachineCode, compile_offline
from mxfp4.kernels.triton.product_kernel import dense_kernel
from mxfp4.kernels.triton.routing_kernel import combine_kernel, route_kernel, tile_kernel
from mxfp4.spec import BLOCK_SIZE, SCALE_BIAS, ScaleRule, TieRule, ZeroSign

SHARED_BYTES = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99, "gfx": 64, "gfx950": 160}
"""KiB of shared memory a program may have; 227 on other NVIDIA devices."""

MATRIX = {
    ("sm_90", Regime.DECODE): "HMMA",
    ("sm_90", ""): "HGMMA",
    ("sm_100", Regime.DECODE): "HMMA|UTCHMMA",
    ("sm_100", ""): "UTCHMMA",
    ("sm_103", ""): "HMMA|UTCHMMA",
    ("sm_", ""): "HMMA",
    ("gfx", ""): "v_mfma_f32_.*",
}
"""The matrix instruction by the longest matching start of the architecture, and regime."""

ISSUE_LIMITS = {
    "sm_80": (3.0, 3.4, 4.0, 5.4),
    "sm_86": (3.0, 3.5, 4.0, 6.1),
    "sm_89": (3.0, 3.5, 4.0, 6.1),
    "sm_90": (3.0, 3.5, 3.6, 3.7),
    "sm_100": (3.7, 3.7, 3.8, 5.4),
    "sm_103": (3.7, 3.7, 3.8, 5.4),
    "sm_120": (3.0, 3.3, 3.9, 6.0),
}
"""Most instructions per weight in the main loop with folded scales: decode, small, medium, large.

An H200 at 4.3 TB/s has 3.7 to 4.1 issue slots a weight; an A100 has 16 in the time its tensor cores
take for 128 tokens, so there the matrix products are the bound, then the reads of shared memory.

Before Hopper a tile of 128 tokens cannot reach 4.2. The sums of 32 rows x 128 tokens take half the
registers of a warp, those of 64 rows would take all. With 32 rows a weight costs at least 2.00
mma.m16n8k16 (128 products of the 2048 that 32 lanes issue at once), 0.50 ldmatrix for the tokens
(256 values for 32 rows), 1.63 to decode and scale (13 instructions for 8 codes), 0.03 ldmatrix for
the words, 0.16 for the scales and 0.16 cp.async: 4.48, and 4.73 for float16 (15 instructions),
before addresses, barriers and the loop itself. A decoder of 12 instructions (fewer are impossible:
no four translates of the bits 15, 8, 7, 6 tile 16 positions, so one plane needs more than a shift
and a mask) and tiles of 256 rows would leave 4.29. Tiles of 64 tokens would be counted with 3.7,
but decode every weight twice.
"""

NATIVE_ISSUE_LIMIT = 6.0
"""Emulations of scaled products issue 9 and more per weight."""

CODEC_LIMITS = {
    "dequantize/fp32": 12.0,
    "dequantize/*": 10.5,
    "quantize/fp32/search": 135.0,
    "quantize/*/search": 62.0,
    "quantize/fp32/*": 40.0,
    "quantize/*": 22.0,
}
"""Most instructions per element of the codec on NVIDIA devices, by the first matching name.

An H200 reading bfloat16 at 4.3 TB/s has some 19 for each. The search tries three scales in float64.
"""

LEAST_INSTRUCTIONS = 60
"""A kernel with fewer was compiled to nothing, as a compiler release once did."""

DTYPES = {"bf16": "*bf16!", "fp16": "*fp16!"}

SAMPLE = (
    "sm_80/dense/decode/bf16/*",
    "sm_80/dense/large/bf16/even/folded",
    "sm_90/dense/*/bf16/even/folded",
    "sm_90/dense/decode/fp16/odd/folded",
    "sm_90/dense/decode/bf16/odd/wide",
    "sm_90/experts/decode/bf16/odd/*",
    "sm_90/codec/quantize/*/even",
    "sm_90/codec/quantize/fp32/search",
    "sm_90/codec/dequantize/*",
    "sm_90/codec/expand/*",
    "sm_90/routing/*",
    "sm_100/dense/large/bf16/even/folded",
    "sm_120/dense/large/bf16/even/folded",
    "*/native/*",
    "gfx942/dense/decode/fp16/even/folded",
    "gfx950/dense/decode/bf16/even/folded",
)
"""Patterns of the cases of CI."""


@dataclass(frozen=True)
class Case:
    """One kernel for one device; `weights` is what one round of its main loop covers."""

    name: str
    architecture: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, object]
    warps: int
    stages: int
    weights: int = 0
    matrix: str = ""
    issue_limit: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What was found for one case; `failures` is empty when it passed."""

    name: str
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    instructions: int = 0
    matrix: tuple[str, ...] = ()
    issue_per_weight: float = 0.0
    alu_per_weight: float = 0.0
    seconds: float = 0.0
    failures: tuple[str, ...] = field(default=())


def cases(architectures: tuple[str, ...]) -> Iterator[Case]:
    """Every shipped launch of these architectures."""
    for architecture in architectures:
        tiles: dict[TileConfig, Regime] = {}
        for regime, config in TABLES[architecture].items():
            tiles.setdefault(config, regime)
        for config, regime in tiles.items():
            yield from _products(architecture, regime, config)
        yield from _native(architecture)
        yield from _codec(architecture)
        yield from _routing(architecture)


def tuning_case(architecture: str, regime: Regime, config: TileConfig) -> Case:
    """A dense product with any tile, without limits on instructions or their kind."""
    found = next(_products(architecture, regime, config))
    return replace(found, matrix="", issue_limit=0.0)


def check(case: Case) -> Verdict:
    """Compile one case and judge it."""
    start = time.perf_counter()
    try:
        code = compile_offline(
            case.kernel,
            case.architecture,
            case.arguments,
            case.constants,
            warps=case.warps,
            stages=case.stages,
        )
    except Exception as error:  # whatever the compiler throws is a verdict on the case
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
        return Verdict(case.name, failures=(text,))
    weights = case.weights or 1
    return Verdict(
        name=case.name,
        registers=code.registers,
        spills=code.spills,
        shared_bytes=code.shared_bytes,
        instructions=code.instructions,
        matrix=tuple(sorted(code.matrix)),
        issue_per_weight=round(code.per_weight(weights), 3) if case.weights else 0.0,
        alu_per_weight=round(code.alu_per_weight(weights), 3) if case.weights else 0.0,
        seconds=round(time.perf_counter() - start, 2),
        failures=tuple(_failures(case, code)),
    )


def _failures(case: Case, code: MachineCode) -> Iterator[str]:
    if code.instructions < LEAST_INSTRUCTIONS:
        yield f"only {code.instructions} instructions: compiled to nothing"
    if code.spills:
        yield f"{code.spills} spills"
    limit = _shared_limit(case.architecture)
    if code.shared_bytes > limit:
        yield f"{code.shared_bytes:,} bytes of shared memory, {limit:,} allowed"
    if case.matrix:
        wrong = [name for name in code.matrix if not re.fullmatch(case.matrix, name)]
        if not code.matrix or wrong:
            yield f"matrix instructions {sorted(code.matrix)}, wanted {case.matrix}"
    if case.issue_limit and code.per_weight(case.weights) > case.issue_limit:
        issued = code.per_weight(case.weights)
        yield f"{issued:.2f} instructions per weight, limit {case.issue_limit}"
    if code.flushes:
        yield f"flushes subnormals: {sorted(code.flushes)}"
    for line in narrow_products(code.ttir):
        yield f"32-bit pointer product: {line}"


def narrow_products(ttir: str) -> list[str]:
    """Multiplications of two 32-bit variables whose result is added to a pointer.

    Tile sizes are constants and indices stay below a dimension, so `index * constant` is safe;
    `index * stride` is the product that overflows on large tensors.
    """
    through = "arith.addi arith.subi arith.extsi arith.extui arith.muli tt.splat tt.broadcast"
    through += " tt.expand_dims"
    defined: dict[str, tuple[str, list[str], str]] = {}
    offsets = []
    for line in ttir.splitlines():
        found = re.match(r"\s*(%[\w#]+)(?::\d+)? = ([\w.]+)\b(.*)", line)
        if not found:
            continue
        operands = re.findall(r"%[\w#]+", found[3])
        defined[found[1]] = (found[2], operands, line.strip())
        if found[2] == "tt.addptr":
            offsets.append(operands[1])
    bad, seen = [], set()
    while offsets:
        name = offsets.pop()
        operation, operands, line = defined.get(name, ("argument", [], ""))
        if name in seen or operation not in through.split():
            continue
        seen.add(name)
        if operation == "arith.muli":
            if "i64" not in line.split(" loc(")[0] and not any(
                _is_constant(operand, defined) for operand in operands
            ):
                bad.append(line.split(" loc(")[0])
            continue
        offsets += operands
    return bad


def _is_constant(name: str, defined: dict[str, tuple[str, list[str], str]]) -> bool:
    operation, operands, _ = defined.get(name, ("argument", [], ""))
    if operation in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        return _is_constant(operands[0], defined)
    return operation == "arith.constant"


def _shared_limit(architecture: str) -> int:
    generic = "gfx" if architecture.startswith("gfx") else architecture
    return SHARED_BYTES.get(architecture, SHARED_BYTES.get(generic, 227)) << 10


def _matrix_of(architecture: str, regime: Regime) -> str:
    for start in (architecture, architecture[:3]):
        for key in ((start, regime), (start, "")):
            if key in MATRIX:
                return MATRIX[key]
    raise KeyError(architecture)


def _products(architecture: str, regime: Regime, config: TileConfig) -> Iterator[Case]:
    for dtype, pointer in DTYPES.items():
        for even in (True, False):
            for folded in (True, False):
                # Odd K has both forms of the loop body; once is enough for the rare wide scales.
                if not folded and (even or regime not in WIDE_REGIMES):
                    continue
                parts = (dtype, "even" if even else "odd", "folded" if folded else "wide")
                common: dict[str, object] = {
                    "TOKENS": config.tokens,
                    "ROWS": config.rows,
                    "DEPTH": config.depth,
                    "FOLDED": folded,
                    "SWAP": config.swap,
                    "EVEN_K": even,
                    "HAS_BIAS": True,
                    "DECODER": config.decoder,
                    "INTERP": False,
                }
                rest = {
                    "architecture": architecture,
                    "warps": config.warps,
                    "stages": config.stages,
                    "weights": config.rows * CHUNK,
                    "matrix": _matrix_of(architecture, regime),
                    "issue_limit": _issue_limit(architecture, regime) if folded else 0.0,
                }
                yield Case(
                    name="/".join((architecture, "dense", regime, *parts)),
                    kernel=dense_kernel,
                    arguments=_dense_arguments(pointer),
                    constants={
                        **common,
                        "GROUP": config.group,
                        "SPLIT": 4 if config.programs_per_core else 1,
                    },
                    **rest,  # type: ignore[arg-type]
                )
                for activation in range(len(ACTIVATIONS) if folded else 1):
                    yield Case(
                        name="/".join(
                            (architecture, "experts", regime, *parts, ACTIVATIONS[activation])
                        ),
                        kernel=grouped_kernel,
                        arguments=_grouped_arguments(pointer),
                        constants={
                            **common,
                            "GATHER": activation != 0,
                            "ACTIVATION": activation,
                        },
                        **rest,  # type: ignore[arg-type]
                    )


def _issue_limit(architecture: str, regime: Regime) -> float:
    """0 where there is no limit."""
    limits = ISSUE_LIMITS.get(architecture)
    return limits[min(list(Regime).index(regime), len(limits) - 1)] if limits else 0.0


def _dense_arguments(pointer: str) -> dict[str, str]:
    arguments = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), pointer)
    arguments |= {"w_ptr": "*i16!", "s_ptr": "*i32!", "factor_ptr": "*fp32!"}
    arguments |= {"partial_ptr": "*fp32!", "arrival_ptr": "*i32!", "M": "i32", "chunks": "i32"}
    return arguments | dict.fromkeys(
        ("N", "K", "x_stride", "w_stride", "s_stride", "out_stride"), "i32!"
    )


def _grouped_arguments(pointer: str) -> dict[str, str]:
    arguments = _dense_arguments(pointer) | {"order_ptr": "*i32!", "tiles_ptr": "*i32!"}
    arguments |= {"tiles": "i32", "choices": "i32", "limit": "fp32", "alpha": "fp32"}
    arguments |= {"w_expert_stride": "i32!", "s_expert_stride": "i32!"}
    unused = ("partial_ptr", "arrival_ptr", "M")
    return {name: kind for name, kind in arguments.items() if name not in unused}


def _native(architecture: str) -> Iterator[Case]:
    values = {
        ActivationFormat.SAME: ("*bf16!", "bf16"),
        ActivationFormat.MXFP8: ("*fp8e4nv!", "e4m3"),
        ActivationFormat.MXFP4: ("*u8!", "e2m1"),
    }
    for (able, activations), tile in CAPABILITIES.items():
        if able != architecture:
            continue
        pointer, form = values[activations]
        arguments = {"x_ptr": pointer, "out_ptr": "*bf16!", "bias_ptr": "*bf16!", "M": "i32"}
        arguments |= dict.fromkeys(("x_scale_ptr", "w_ptr", "w_scale_ptr"), "*u8!")
        arguments |= dict.fromkeys(("N", "K", "x_stride", "w_stride", "out_stride"), "i32!")
        arguments |= dict.fromkeys(("x_scale_stride", "w_scale_stride"), "i32")
        yield Case(
            f"{architecture}/native/{activations}",
            architecture,
            native_kernel,
            arguments,
            {
                "X_FORMAT": form,
                "TOKENS": tile.tokens,
                "ROWS": tile.rows,
                "DEPTH": tile.depth,
                "FAST": tile.fast,
                "EVEN_K": True,
                "HAS_BIAS": True,
                "INTERP": False,
            },
            tile.warps,
            tile.stages,
            tile.rows * tile.depth,
            tile.instruction,
            NATIVE_ISSUE_LIMIT,
        )


def _codec(architecture: str) -> Iterator[Case]:
    for dtype, pointer in {**DTYPES, "fp32": "*fp32!"}.items():
        arguments = {"codes_ptr": "*i32!", "scales_ptr": "*u8!", "blocks": "i32"}
        for rule, ties, sign in _codec_choices():
            choice = rule.value
            if (ties, sign) != (TIES[0], ZERO_SIGNS[0]):
                choice += f"-{ties.value}-{sign.value}"
            yield Case(
                f"{architecture}/codec/quantize/{dtype}/{choice}",
                architecture,
                quantize_kernel,
                {**arguments, "x_ptr": pointer},
                {
                    "BIAS": SCALE_BIAS[rule],
                    "SEARCH": rule is ScaleRule.SEARCH,
                    "TIES": TIES.index(ties),
                    "SIGN": ZERO_SIGNS.index(sign),
                    "BLOCKS": QUANTIZE.blocks,
                },
                QUANTIZE.warps,
                1,
                QUANTIZE.blocks * BLOCK_SIZE,
                issue_limit=_codec_limit(architecture, f"quantize/{dtype}/{choice}"),
            )
        yield Case(
            f"{architecture}/codec/dequantize/{dtype}",
            architecture,
            dequantize_kernel,
            {**arguments, "out_ptr": pointer},
            {"BLOCKS": DEQUANTIZE.blocks, "INTERP": False},
            DEQUANTIZE.warps,
            1,
            DEQUANTIZE.blocks * BLOCK_SIZE,
            issue_limit=_codec_limit(architecture, f"dequantize/{dtype}"),
        )
    for dtype, pointer in DTYPES.items():
        for folded in (True, False):
            yield Case(
                f"{architecture}/codec/expand/{dtype}/{'folded' if folded else 'wide'}",
                architecture,
                expand_kernel,
                {
                    "w_ptr": "*i16!",
                    "s_ptr": "*i32!",
                    "factor_ptr": "*fp32!",
                    "out_ptr": pointer,
                    "first_row": "i32!",
                    "last_row": "i32",
                    **dict.fromkeys(("K", "w_stride", "s_stride", "out_stride"), "i32!"),
                },
                {
                    "ROWS": 64,
                    "FOLDED": folded,
                    "DECODER": "ptx" if architecture.startswith("sm_") else "plain",
                    "INTERP": False,
                },
                4,
                1,
            )


def _codec_choices() -> Iterator[tuple[ScaleRule, TieRule, ZeroSign]]:
    """Every scale rule, and with the first of them every other tie rule and zero sign."""
    for rule in ScaleRule:
        yield rule, TIES[0], ZERO_SIGNS[0]
    for ties in TIES[1:]:
        yield ScaleRule.EVEN, ties, ZERO_SIGNS[0]
    for sign in ZERO_SIGNS[1:]:
        yield ScaleRule.EVEN, TIES[0], sign


def _codec_limit(architecture: str, name: str) -> float:
    """0 where there is no limit."""
    if not architecture.startswith("sm_"):
        return 0.0
    return next(limit for pattern, limit in CODEC_LIMITS.items() if fnmatch(name, pattern))


def _routing(architecture: str) -> Iterator[Case]:
    def case(name: str, kernel: Any, arguments: dict[str, str], **constants: object) -> Case:
        return Case(
            f"{architecture}/routing/{name}", architecture, kernel, arguments, constants, 4, 1
        )

    table = {"ends_ptr": "*i32!", "tiles_ptr": "*i32!", "tiles": "i32", "experts": "i32"}
    yield case(
        "route",
        route_kernel,
        {
            **dict.fromkeys(("ids_ptr", "order_ptr", "slot_ptr", "ends_ptr"), "*i32!"),
            "entries": "i32",
        },
        BLOCK=1024,
    )
    yield case("tiles", tile_kernel, table, TOKENS=16, EXPERTS=512, BLOCK=16)
    for dtype, pointer in DTYPES.items():
        arguments = {"y_ptr": pointer, "out_ptr": pointer, "weight_ptr": "*fp32!"}
        arguments |= dict.fromkeys(("ids_ptr", "slot_ptr"), "*i32!")
        arguments |= {"experts": "i32", "choices": "i32"}
        arguments |= dict.fromkeys(("N", "y_stride", "out_stride"), "i32!")
        yield case(f"combine/{dtype}", combine_kernel, arguments, COLUMNS=1024, INTERP=False)


def main() -> None:
    """Run the gate; exit status 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="cases to run, such as 'sm_90/dense/*'")
    parser.add_argument("--quick", action="store_true", help="only the sample of CI")
    parser.add_argument("--out", type=Path, help="write all verdicts to this JSON file")
    options = parser.parse_args()
    patterns = (*options.patterns, *(SAMPLE if options.quick else ())) or ("*",)
    verdicts = []
    for case in cases(tuple(TABLES)):
        if not any(fnmatch(case.name, pattern) for pattern in patterns):
            continue
        verdict = check(case)
        verdicts.append(verdict)
        print(
            f"{'FAIL' if verdict.failures else 'ok  '} {verdict.name}: {verdict.registers} "
            f"registers, {verdict.shared_bytes >> 10} KiB, {verdict.issue_per_weight:.2f} issued "
            f"per weight, {verdict.alu_per_weight:.2f} ALU {'; '.join(verdict.failures)}",
            flush=True,
        )
    if options.out:
        found = {"triton": triton.__version__, "cases": [asdict(v) for v in verdicts]}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    failed = sum(bool(verdict.failures) for verdict in verdicts)
    print(f"{len(verdicts) - failed} passed, {failed} failed")
    raise SystemExit(1 if failed or not verdicts else 0)


if __name__ == "__main__":
    main()
