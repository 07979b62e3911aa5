"""Products through `tl.dot_scaled`, against float64 of the operands they really multiply."""

import pytest
import torch
import triton

from mxfp4 import codec
from mxfp4.errors import BackendUnavailableError, ShapeError
from mxfp4.kernels.triton import native
from mxfp4.kernels.triton.native import ActivationFormat, native_matmul
from mxfp4.scales import decode_scales

needs_dot_scaled = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="the interpreter of this Triton has no dot_scaled",
)


def operand(x, activations):
    if activations is ActivationFormat.SAME:
        return x
    if activations is ActivationFormat.MXFP4:
        return codec.dequantize(codec.quantize(x), dtype=torch.float32)
    values, scales = native.quantize_mxfp8(x)
    blocks = values.float().reshape(len(x), -1, 32) * decode_scales(scales)[..., None]
    return blocks.flatten(-2)


@needs_dot_scaled
@pytest.mark.parametrize("activations", list(ActivationFormat))
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(3, 33, 96), (17, 31, 160), (1, 1, 32)])
def test_native_products(tokens, rows, columns, activations, make_weight, exact, assert_at_floor):
    w, x = make_weight(rows, columns), torch.randn(tokens, columns).bfloat16()
    bias = torch.randn(rows).bfloat16()
    y = native_matmul(x, w, activations, bias=bias)
    # The interpreter truncates when it casts to bfloat16 inside dot_scaled.
    floors = 3.0 if activations is ActivationFormat.SAME else 1.0
    assert_at_floor(y, exact(operand(x, activations), w, bias), floors=floors)


def test_mxfp8_scales_and_saturates():
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 32] = 1.0, -500.0, 448.0 * 2.0**10
    values, scales = native.quantize_mxfp8(x)
    assert scales.tolist() == [[127, 137]]
    assert values[0, [0, 1, 32]].float().tolist() == [1.0, -448.0, 448.0]


def test_every_capability_has_a_known_architecture_and_nothing_else_is_tried(monkeypatch):
    from mxfp4.kernels.triton.configs import TABLES

    assert {architecture for architecture, _ in native.CAPABILITIES} <= set(TABLES)
    monkeypatch.setattr(native, "INTERPRET", False)
    with pytest.raises(BackendUnavailableError, match="sm_90 has no native product"):
        native.capability(torch.device("cpu"), ActivationFormat.MXFP8)


def test_wrong_shapes_are_refused(make_weight):
    with pytest.raises(ShapeError, match="seen"):
        native_matmul(torch.randn(3, 64).bfloat16(), make_weight(8, 96), ActivationFormat.SAME)
