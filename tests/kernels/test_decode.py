"""Decoding every code under every scale byte, to the last bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mxfp4.errors import DtypeError, NonFiniteError, ShapeError
from mxfp4.kernels.backends import BlockCodec, use_backend
from mxfp4.kernels.rows import decode_rows
from mxfp4.spec import E8M0_NAN
from mxfp4.testing import all_codes, assert_same_bits, slow_decode


def wanted_bits(kind: type) -> NDArray[Any]:
    codes, scales = all_codes()
    with np.errstate(over="ignore"):
        values = slow_decode(codes, scales).astype(kind)
    return values.view(f"u{values.dtype.itemsize}")


@pytest.mark.parametrize(("dtype", "kind"), [("BF16", ml_dtypes.bfloat16), ("F32", np.float32)])
def test_all_scales_and_codes(implementation: BlockCodec, dtype: str, kind: type) -> None:
    codes, scales = all_codes()
    wanted = wanted_bits(kind).reshape(-1, 32)
    out = np.zeros(wanted.shape, wanted.dtype)
    implementation.decode_blocks(codes.reshape(-1, 16), scales.reshape(-1), out, dtype)
    assert_same_bits(out, wanted)


def test_rows_in_all_dtypes(implementation: BlockCodec) -> None:
    codes, scales = all_codes()
    with use_backend(implementation.name):
        for dtype, kind in (("BF16", ml_dtypes.bfloat16), ("F32", np.float32), ("F16", np.float16)):
            decoded = decode_rows(codes, scales, dtype, nan_scale="nan")
            assert_same_bits(decoded.view(f"u{decoded.itemsize}"), wanted_bits(kind), dtype)


def test_golden_values(golden: dict[str, list[dict[str, object]]]) -> None:
    for case in golden["decode"]:
        codes = np.frombuffer(bytes.fromhex(str(case["packed_hex"])), np.uint8)[None]
        scales = np.array([[case["scale"]]], np.uint8)
        values = case["values_of_code_0_to_15_float32"]
        assert isinstance(values, list)
        wanted = np.array([float(v) for v in values] * 2, np.float32)[None]
        assert_same_bits(
            decode_rows(codes, scales, "F32", nan_scale="nan"), wanted, str(case["scale"])
        )


def test_nan_scale_is_refused_by_name_of_the_block() -> None:
    codes, scales = np.zeros((3, 64), np.uint8), np.zeros((3, 4), np.uint8)
    scales[1, 2] = scales[2, 0] = E8M0_NAN
    with pytest.raises(NonFiniteError, match=r"block \[1, 2\]") as caught:
        decode_rows(codes, scales)
    assert caught.value.index == (1, 2)


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ShapeError, match="do not match"):
        decode_rows(np.zeros((3, 64), np.uint8), np.zeros((3, 3), np.uint8))
    with pytest.raises(DtypeError, match="F64"):
        decode_rows(np.zeros((3, 64), np.uint8), np.zeros((3, 4), np.uint8), "F64")
    with pytest.raises(ShapeError, match="out must be"):
        decode_rows(
            np.zeros((3, 64), np.uint8), np.zeros((3, 4), np.uint8), out=np.empty((3, 1), "u2")
        )
