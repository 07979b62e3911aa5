"""Elements: every code, every tie with its reason, and the nibble order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from mxfp4.elements import decode_elements, encode_elements, pack_codes, unpack_codes
from mxfp4.errors import ShapeError
from mxfp4.spec import E2M1_MIDPOINTS, E2M1_VALUES, TieRule, ZeroSign
from mxfp4.testing import assert_same_bits

# Codes of the midpoints 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.
TIES = {
    TieRule.EVEN: [0, 2, 2, 4, 4, 6, 6],
    TieRule.ZERO: [0, 1, 2, 3, 4, 5, 6],
    TieRule.AWAY: [1, 2, 3, 4, 5, 6, 7],
}


def test_codes_are_the_elements_of_the_standard(golden: dict[str, list[dict[str, float]]]) -> None:
    values = decode_elements(torch.arange(16, dtype=torch.uint8))
    assert values.tolist() == [float(entry["value"]) for entry in golden["codes"]]
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_same_bits(values.numpy(), theirs)


def test_every_code_encodes_to_itself() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert encode_elements(decode_elements(codes), zero_sign=ZeroSign.SOURCE).equal(codes)


@pytest.mark.parametrize("ties", TieRule)
def test_ties_and_their_neighbours(ties: TieRule) -> None:
    midpoints = torch.tensor(E2M1_MIDPOINTS)
    assert encode_elements(midpoints, ties=ties).tolist() == TIES[ties]
    assert encode_elements(-midpoints, ties=ties).tolist() == [code | 8 for code in TIES[ties]]
    for towards, codes in ((0.0, range(7)), (torch.inf, range(1, 8))):
        near = torch.nextafter(midpoints, torch.tensor(towards))
        assert encode_elements(near, ties=ties).tolist() == list(codes)


@pytest.mark.parametrize(
    ("zero_sign", "wanted"),
    [
        (ZeroSign.UNDERFLOW, [0, 0, 0, 8]),
        (ZeroSign.SOURCE, [0, 8, 0, 8]),
        (ZeroSign.DROP, [0, 0, 0, 0]),
        (ZeroSign.SET, [8, 8, 0, 8]),
    ],
)
def test_sign_of_zero(zero_sign: ZeroSign, wanted: list[int]) -> None:
    x = torch.tensor([0.0, -0.0, 0.1, -0.1])
    assert encode_elements(x, zero_sign=zero_sign).tolist() == wanted


def test_a_value_that_scaling_turned_into_zero_keeps_its_sign() -> None:
    source = torch.tensor([-1e-45])
    assert encode_elements(source * 0.0, source=source).tolist() == [8]


def test_saturation() -> None:
    x = torch.tensor([6.0, 7.0, 1e38, -6.5])
    assert decode_elements(encode_elements(x)).tolist() == [6.0, 6.0, 6.0, -6.0]
    assert max(E2M1_VALUES) == 6.0


def test_packing_puts_the_even_element_low() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 2)
    packed = pack_codes(codes)
    assert packed[0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert unpack_codes(packed).equal(codes)
    every = torch.arange(256, dtype=torch.uint8)
    assert pack_codes(unpack_codes(every)).equal(every)
    with pytest.raises(ShapeError, match="even"):
        pack_codes(codes[:, :3])
    with pytest.raises(ShapeError, match="uint8"):
        unpack_codes(torch.zeros(4))
