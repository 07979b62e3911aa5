"""Shared scales: every rule over every exponent, the golden table, and all 256 bytes back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from mxfp4.scales import decode_scales, inverse_scales, scale_bytes
from mxfp4.spec import MAX_SCALE_BYTE, ScaleRule
from mxfp4.testing import assert_same_bits, slow_scale_bytes

RULE_ROWS = {
    "even": "even",
    "floor:": "floor",
    "rceil": "rceil",
    "floor(": "rfloor",
    "ceil": "ceil",
}
PLAIN_RULES = [rule for rule in ScaleRule if rule is not ScaleRule.SEARCH]


def test_table_of_rules(golden: dict[str, Any]) -> None:
    table = golden["scale_rule_table"]
    amax = torch.tensor(table["amax"], dtype=torch.float32)
    assert len(table["rows"]) == len(RULE_ROWS)
    for title, wanted in table["rows"].items():
        rule = next(rule for start, rule in RULE_ROWS.items() if title.startswith(start))
        assert scale_bytes(amax, ScaleRule(rule)).tolist() == wanted, title


@pytest.mark.parametrize("rule", PLAIN_RULES)
def test_every_16_bit_maximum_and_its_neighbours(rule: ScaleRule) -> None:
    word = np.arange(0x7F80, dtype=np.uint32)[:, None] << np.uint32(16)
    bits = (word | np.array([0, 1, 0x8000, 0xFFFF], np.uint32)).reshape(-1)
    amax = bits.view(np.float32)
    seen = scale_bytes(torch.from_numpy(amax), rule).numpy()
    wanted = slow_scale_bytes(amax.astype(np.float64)[:, None], rule)
    assert_same_bits(seen.astype(np.int64), wanted)
    assert seen.max() == MAX_SCALE_BYTE


def test_decode_is_that_of_torch_and_ml_dtypes() -> None:
    byte = torch.arange(256).to(torch.uint8)
    seen = decode_scales(byte)
    for theirs in (
        byte.view(torch.float8_e8m0fnu).float().numpy(),
        byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32),
    ):
        assert_same_bits(seen.numpy()[:255], theirs[:255])
        assert np.isnan(theirs[255])
    assert seen[255].isnan()
    product = seen[: MAX_SCALE_BYTE + 1] * inverse_scales(byte[: MAX_SCALE_BYTE + 1].int())
    assert (product == 1).all()
