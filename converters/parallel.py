"""Advice before conversion: which tensor-parallel degrees each engine kernel can serve.

Splitting a weight over T ranks divides N (column-parallel: q, k, v, gate, up) or K (row-parallel:
o, down). A block of 32 must not be cut, so K/T has to be a multiple of 32; kernels want more and
pad what does not fit when they load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mxfp4.converters.decide import Action, Decision
from mxfp4.converters.header import TensorInfo
from mxfp4.converters.roles import Kind, words
from mxfp4.spec import BLOCK_SIZE

DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """Sizes per rank that a kernel takes without padding."""

    name: str
    n_multiple: int
    k_multiple: int


KERNEL_FAMILIES = (
    KernelFamily("file format", 1, BLOCK_SIZE),
    KernelFamily("triton", 1, 64),
    KernelFamily("marlin", 64, 128),
    KernelFamily("cutlass, deepgemm", 128, 128),
    KernelFamily("trtllm, rocm", 128, 256),
)
"""The alignment that loaders of vLLM, SGLang and TensorRT-LLM round up to, narrowest first."""


class Split(StrEnum):
    """Which side of a weight tensor parallelism divides."""

    COLUMNS = "N"
    ROWS = "K"
    NONE = "none"


class Fit(StrEnum):
    """What one kernel family does with one shard."""

    OK = "ok"
    PADS = "pads"
    NO = "no"


@dataclass(frozen=True, slots=True)
class ParallelRow:
    """One kind of weight at one degree. `n`, `k` are per rank; None if they do not divide."""

    module: str
    role: str
    count: int
    full_n: int
    full_k: int
    split: Split
    degree: int
    n: int | None
    k: int | None
    fits: Mapping[str, Fit]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "module": self.module,
            "role": self.role,
            "count": self.count,
            "n": self.full_n,
            "k": self.full_k,
            "split": str(self.split),
            "tp": self.degree,
            "n_per_rank": self.n,
            "k_per_rank": self.k,
            "fits": {name: str(fit) for name, fit in self.fits.items()},
        }


def parallel_advice(
    tensors: Sequence[TensorInfo],
    decisions: Mapping[str, Decision],
    degrees: Sequence[int] = DEGREES,
) -> list[ParallelRow]:
    """A row per kind of quantized weight and degree, in the order of the tensors."""
    counts: dict[tuple[str, str, int, int, Split], int] = {}
    for info in tensors:
        decision = decisions[info.name]
        if decision.action is not Action.QUANTIZE:
            continue
        role = decision.role
        n, k = role.output_length(info.shape), role.contraction_length(info.shape)
        if n is None or k is None:
            continue
        module = re.sub(r"\d+(?=\.|$)", "#", info.name).removesuffix(".weight")
        projections = len(role.bank.projections) if role.bank is not None else 1
        key = (module, str(role.role), n // projections, k, _split(module, role.kind))
        counts[key] = counts.get(key, 0) + 1
    return [
        _row(module, role, count, n, k, split, degree)
        for (module, role, n, k, split), count in counts.items()
        for degree in degrees
    ]


def _split(module: str, kind: Kind) -> Split:
    leaf = module.rpartition(".")[2].removesuffix("_weight")
    if kind is Kind.MLA_DOWN:
        return Split.NONE
    outward = words.FFN_OUT.fullmatch(leaf) or words.OUTPUT_LEAVES.fullmatch(leaf)
    return Split.ROWS if outward and not words.QKV_LEAVES.fullmatch(leaf) else Split.COLUMNS


def _row(
    module: str, role: str, count: int, n: int, k: int, split: Split, degree: int
) -> ParallelRow:
    rank_n = _divide(n, degree if split is Split.COLUMNS else 1)
    rank_k = _divide(k, degree if split is Split.ROWS else 1)
    fits = {family.name: _fit(family, rank_n, rank_k) for family in KERNEL_FAMILIES}
    return ParallelRow(module, role, count, n, k, split, degree, rank_n, rank_k, fits)


def _divide(length: int, degree: int) -> int | None:
    return length // degree if length % degree == 0 else None


def _fit(family: KernelFamily, n: int | None, k: int | None) -> Fit:
    if n is None or k is None or k % BLOCK_SIZE:
        return Fit.NO
    return Fit.OK if n % family.n_multiple == 0 and k % family.k_multiple == 0 else Fit.PADS


def highest_degree(rows: Sequence[ParallelRow]) -> int:
    """The largest degree at which every weight keeps whole blocks; 0 if there is none."""
    good = [
        degree
        for degree in {row.degree for row in rows}
        if all(row.fits["file format"] is Fit.OK for row in rows if row.degree == degree)
    ]
    return max(good, default=0)
