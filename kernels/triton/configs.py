"""Launch parameters of the products: one table for each kind of device, one rule to read it.

The choice depends on the device, on N and K, and on M only through the regime, so that the rows of
a batch are computed alike whatever else is in the batch of that regime. Every entry here is
compiled and checked by the gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mxfp4.errors import BackendUnavailableError


class Regime(StrEnum):
    """What limits a product, from the number of tokens that meet each weight."""

    DECODE = "decode"
    """Up to 16 tokens: reading the weight."""

    SMALL = "small"
    """17 to 32."""

    MEDIUM = "medium"
    """33 to 64."""

    LARGE = "large"
    """65 to 128: reading and computing cost about the same."""

    PREFILL = "prefill"
    """More: computing."""


REGIME_TOKENS = {
    Regime.DECODE: 16,
    Regime.SMALL: 32,
    Regime.MEDIUM: 64,
    Regime.LARGE: 128,
}
"""The most tokens of each regime; beyond is PREFILL."""


def regime_of(tokens: int) -> Regime:
    """The regime of a dense product with `tokens` rows, or of an expert that sees so many."""
    return next((name for name, most in REGIME_TOKENS.items() if tokens <= most), Regime.PREFILL)


@dataclass(frozen=True)
class TileConfig:
    """How a product is cut up and launched.

    A program computes `tokens` x `rows` of the result with `warps` warps and loads `stages` chunks
    ahead; `swap` puts the weight on the left; `group` tiles along M run next to each other;
    `programs_per_core` is how many programs per multiprocessor K is split to reach (0: never
    split); `decoder` is "ptx" or "plain"; `depth`, 16 or 32, is how many columns of a plane meet in
    one product (16 takes fewer registers).
    """

    tokens: int
    rows: int
    warps: int
    stages: int
    swap: bool = True
    group: int = 8
    programs_per_core: int = 0
    decoder: str = "ptx"
    depth: int = 32


MAX_SPLIT = 8
"""More partial sums than this cost more to add than the parallelism gains."""

MIN_CHUNKS_PER_SPLIT = 4
"""Fewer chunks do not fill the pipeline of loads."""


def split_of(config: TileConfig, rows: int, chunks: int, cores: int) -> int:
    """Parts of K: a power of two that depends on the weight and the device alone, never on M."""
    split = 1
    tiles = -(-rows // config.rows)
    while (
        tiles * split * 2 <= config.programs_per_core * cores
        and chunks >= MIN_CHUNKS_PER_SPLIT * split * 2
        and split < MAX_SPLIT
    ):
        split *= 2
    return split


Table = dict[Regime, TileConfig]

_HOPPER: Table = {
    Regime.DECODE: TileConfig(16, 128, 4, 4, swap=False, programs_per_core=4),
    Regime.SMALL: TileConfig(32, 128, 4, 4, programs_per_core=2),
    Regime.MEDIUM: TileConfig(64, 128, 4, 4, programs_per_core=2),
    # Two programs of four warps fit on a multiprocessor: one decodes while the other multiplies.
    Regime.LARGE: TileConfig(128, 128, 4, 3),
    Regime.PREFILL: TileConfig(128, 128, 4, 3),
}

_AMPERE: Table = {
    Regime.DECODE: TileConfig(16, 128, 4, 4, programs_per_core=4),
    Regime.SMALL: TileConfig(32, 128, 4, 4, programs_per_core=2),
    Regime.MEDIUM: TileConfig(64, 128, 4, 3, programs_per_core=2, depth=16),
    Regime.LARGE: TileConfig(128, 128, 4, 3, depth=16),
    Regime.PREFILL: TileConfig(128, 128, 4, 3, depth=16),
}

# 99 KiB of shared memory for a program.
_AMPERE_SMALL: Table = {
    Regime.DECODE: TileConfig(16, 128, 4, 4, programs_per_core=4),
    Regime.SMALL: TileConfig(32, 128, 4, 4, programs_per_core=2),
    Regime.MEDIUM: TileConfig(64, 128, 4, 3, programs_per_core=2, depth=16),
    Regime.LARGE: TileConfig(128, 128, 8, 2),
    Regime.PREFILL: TileConfig(128, 128, 8, 2),
}

_BLACKWELL: Table = {
    Regime.DECODE: TileConfig(16, 128, 4, 4, programs_per_core=4),
    Regime.SMALL: TileConfig(32, 128, 4, 4, programs_per_core=2),
    Regime.MEDIUM: TileConfig(64, 128, 4, 3, programs_per_core=2),
    Regime.LARGE: TileConfig(128, 128, 8, 3),
    Regime.PREFILL: TileConfig(128, 128, 8, 3),
}

_CDNA: Table = {
    Regime.DECODE: TileConfig(16, 64, 4, 2, programs_per_core=4, decoder="plain"),
    Regime.SMALL: TileConfig(32, 64, 4, 2, programs_per_core=2, decoder="plain"),
    Regime.MEDIUM: TileConfig(64, 64, 4, 2, programs_per_core=2, decoder="plain"),
    Regime.LARGE: TileConfig(128, 64, 8, 2, decoder="plain"),
    Regime.PREFILL: TileConfig(128, 64, 8, 2, decoder="plain"),
}

TABLES: dict[str, Table] = {
    "sm_80": _AMPERE,
    "sm_86": _AMPERE_SMALL,
    "sm_89": _AMPERE_SMALL,
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "sm_103": _BLACKWELL,
    "sm_120": _AMPERE_SMALL,
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
}
"""By architecture. None of it was tuned on hardware yet: chosen by instructions per weight,
registers and shared memory of the compiled code."""


WIDE_REGIMES = (Regime.DECODE, Regime.SMALL)
"""The tiles used for weights whose scales do not fold; larger ones would spill registers."""


def tile_of(table: Table, regime: Regime, *, folded: bool) -> TileConfig:
    """The tile of a table for a regime, limited to `WIDE_REGIMES` without folded scales."""
    return table[regime if folded or regime in WIDE_REGIMES else WIDE_REGIMES[-1]]


def table_of(architecture: str) -> Table:
    """The table of an architecture such as "sm_90"; `BackendUnavailableError` for unknown ones."""
    if architecture not in TABLES:
        raise BackendUnavailableError(
            f"there are no kernels for {architecture}",
            hint=f"known: {', '.join(TABLES)}; backend='reference' runs everywhere",
        )
    return TABLES[architecture]
