"""The golden vectors: bytes that other libraries wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "data" / "golden_vectors.json"
    vectors: dict[str, Any] = json.loads(path.read_text())
    return vectors
