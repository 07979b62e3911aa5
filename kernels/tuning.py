"""Launch parameters measured on the user's own device, kept in a file; absent until asked for.

`mxfp4 tune` measures candidates and stores the best tile per (device, weight shape, regime). The
file is read once per process. Entries belong to one Triton version and one state of the kernels'
source; others are ignored, so an upgrade falls back to the built-in tables.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from mxfp4.errors import CorruptCheckpointError
from mxfp4.kernels.triton.configs import Regime, TileConfig

KERNEL_FILES = ("bits.py", "decode.py", "product_kernel.py", "grouped_kernel.py")


def cache_path() -> Path:
    """Where tuning results are kept: `$XDG_CACHE_HOME/mxfp4/tuning.json` or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mxfp4" / "tuning.json"


def tuned_config(device: torch.device, shape: Sequence[int], regime: Regime) -> TileConfig | None:
    """The user's own entry for this device, weight shape and regime, if there is a valid one."""
    if device.type != "cuda":
        return None
    return _entries().get(entry_key(torch.cuda.get_device_name(device), shape, regime))


def entry_key(device_name: str, shape: Sequence[int], regime: Regime) -> str:
    """The key of one entry: what the choice may depend on."""
    return f"{device_name}|{'x'.join(map(str, shape))}|{regime.value}|{fingerprint()}"


@cache
def fingerprint() -> str:
    """Triton's version and a hash of the kernels' source."""
    import triton

    folder = Path(__file__).parent / "triton"
    digest = hashlib.sha256()
    for name in KERNEL_FILES:
        digest.update((folder / name).read_bytes())
    return f"triton {triton.__version__}|{digest.hexdigest()[:16]}"


def store(entries: Mapping[str, TileConfig], path: Path) -> None:
    """Add entries to the file, which is replaced as a whole."""
    merged = {key: asdict(config) for key, config in {**load(path), **entries}.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
    _entries.cache_clear()


def load(path: Path) -> dict[str, TileConfig]:
    """All entries of a file; none if it does not exist. `CorruptCheckpointError` if unreadable."""
    try:
        found = json.loads(path.read_text())
        return {key: TileConfig(**value) for key, value in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"not a tuning file: {error}", file=str(path), hint="delete it and tune again"
        ) from error


@cache
def _entries() -> dict[str, TileConfig]:
    return load(cache_path())
