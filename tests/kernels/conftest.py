"""Implementations of the codec as test parameters: all that this machine can run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxfp4.kernels.backends import BlockCodec, backends, block_codec, use_backend

AVAILABLE = [b.name for b in backends() if b.available and b.name != "c"]


@pytest.fixture(params=AVAILABLE)
def implementation(request: pytest.FixtureRequest) -> BlockCodec:
    with use_backend(request.param):
        return block_codec()


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "data" / "golden_vectors.json"
    vectors: dict[str, Any] = json.loads(path.read_text())
    return vectors
