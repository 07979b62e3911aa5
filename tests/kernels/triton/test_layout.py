"""Packing for the device loses nothing, and says when it cannot be done."""

import pytest
import torch

from mxfp4.codec import quantize
from mxfp4.errors import DtypeError, NonFiniteError, ShapeError
from mxfp4.kernels.triton.bits import BF16_WORD, FP16_WORD
from mxfp4.kernels.triton.layout import interleave, pack, unpack
from mxfp4.tensor import MXTensor

DTYPES = (torch.bfloat16, torch.float16)


def same(a, b):
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and a.shape == b.shape


@pytest.mark.parametrize("word", [BF16_WORD, FP16_WORD])
def test_every_bit_of_a_word_is_used_once(word):
    assert sorted(bit for places in word.places for bit in places) == list(range(16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 32), (31, 96), (33, 160), (258, 2880), (320, 128), (3, 5, 64)]
)
def test_round_trip_of_random_bytes(shape, dtype):
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    scales = torch.randint(0, 255, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8)
    w = MXTensor(codes, scales, shape)
    packed = pack(w, dtype=dtype)
    assert packed.shape == shape
    assert same(unpack(packed), w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_with_folded_scales_and_zero_blocks(make_weight, dtype):
    w = make_weight(2, 40, 160, octaves=4)
    packed = pack(w, dtype=dtype)
    assert packed.folded
    assert same(unpack(packed), w)
    assert same(unpack(packed.to("cpu")), w)


@pytest.mark.parametrize(("dtype", "widest"), [(torch.bfloat16, 133), (torch.float16, 24)])
def test_scales_are_folded_as_far_as_they_are_exact(dtype, widest):
    codes = torch.full((1, 32), 0x11, dtype=torch.uint8)
    for spread, folded in ((widest, True), (widest + 1, False)):
        scales = torch.tensor([[100, 100 + spread]], dtype=torch.uint8)
        assert pack(MXTensor(codes, scales, (1, 64)), dtype=dtype).folded is folded


def test_padding_is_zero_and_reaches_the_tile_sizes(make_weight):
    packed = pack(make_weight(33, 160))
    assert packed.words.shape == (1, 128, 64)
    assert packed.scales.shape == (1, 2, 128)
    assert not packed.words[:, 33:].any()
    # 160 columns end in plane 0 of the second chunk.
    assert not (packed.words[:, :, 32:] & 0x7E3F).any()
    assert not packed.scales[:, :, 33:].any()


def test_interleave_alternates_rows():
    gate, up = (quantize(torch.full((2, 32), value)) for value in (1.0, 2.0))
    both = interleave(gate, up)
    assert both.shape == (4, 32)
    assert torch.equal(both.codes[0::2], gate.codes)
    assert torch.equal(both.scales[1::2], up.scales)


def test_nan_scale_is_refused(make_weight):
    w = make_weight(8, 64)
    w.scales[3, 1] = 255
    with pytest.raises(NonFiniteError, match="row 3, block 1") as caught:
        pack(w)
    assert caught.value.index == (0, 3, 1)


def test_wrong_input_is_refused(make_weight):
    with pytest.raises(DtypeError, match="float32"):
        pack(make_weight(8, 64), dtype=torch.float32)
    with pytest.raises(ShapeError, match="axis 0"):
        pack(quantize(torch.randn(64, 8), axis=0))
    with pytest.raises(ShapeError, match="nothing to pack"):
        pack(quantize(torch.randn(0, 64)))
    with pytest.raises(ShapeError, match="alike"):
        interleave(make_weight(8, 64), make_weight(8, 96))
