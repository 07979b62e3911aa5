"""Packed weights: checkpoint codes and scales rearranged for the device, and back, bit for bit.

With [N, K] the logical shape, N and K padded to 128 and C = K_padded / 128:

    words   int16 [E, N_padded, C * 32]   four codes each, see `bits`
    scales  int32 [E, C, N_padded]        four bytes of a chunk, the first block lowest
    shifts  int32 [E]                     a stored byte is (scale byte - shift) mod 256
    factors float32 [E]                   what the kernels' sums are multiplied by in the end

`E` is 1 for a dense weight. The shift makes the low bits of a stored byte the exponent of a float
that undoes the decoder's bias and applies the scale in one exact multiplication. Padding is zero
and frees the kernels from masks along N and K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from mxfp4.errors import DtypeError, NonFiniteError, ShapeError
from mxfp4.kernels.triton.bits import BF16_WORD, CHUNK, FP16_WORD, PLANES, WordFormat
from mxfp4.spec import BLOCK_SIZE, E2M1_MAX, E2M1_VALUES, E8M0_BIAS, E8M0_NAN
from mxfp4.tensor import MXTensor

_UNSET = 1 << 16
"""No shift."""

ROW_MULTIPLE = 128
"""Rows are padded to this, the tallest tile along N."""


class Layout(StrEnum):
    """How a packed weight is arranged; chosen when packing, never changed on the way."""

    PLANES_BF16 = "planes-bf16"
    """Words that decode to bfloat16; for bfloat16 activations."""

    PLANES_FP16 = "planes-fp16"
    """Words that decode to float16; for float16 activations."""


WORDS: dict[Layout, WordFormat] = {
    Layout.PLANES_BF16: BF16_WORD,
    Layout.PLANES_FP16: FP16_WORD,
}

LAYOUT_OF_DTYPE = {torch.bfloat16: Layout.PLANES_BF16, torch.float16: Layout.PLANES_FP16}

DTYPE_OF_LAYOUT = {layout: dtype for dtype, layout in LAYOUT_OF_DTYPE.items()}


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """An MXFP4 weight [N, K], or E of them, in a device layout; made by `pack`.

    `folded` says that elements times scales are exact in the activation dtype, up to a common
    factor, so that kernels apply scales to elements; otherwise they apply them to float32 sums of
    one block, which is slower. `expandable` says that they are exact without that factor.
    """

    words: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor
    factors: torch.Tensor
    rows: int
    columns: int
    experts: int | None
    layout: Layout
    folded: bool
    expandable: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: (N, K), or (E, N, K) for a bank of experts."""
        matrix = (self.rows, self.columns)
        return matrix if self.experts is None else (self.experts, *matrix)

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype this weight was packed for."""
        return DTYPE_OF_LAYOUT[self.layout]

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        parts = (self.words, self.scales, self.shifts, self.factors)
        return sum(part.nbytes for part in parts)

    def check_activations(self, x: torch.Tensor) -> None:
        """Raise `DtypeError` or `ShapeError` unless x is [..., K] of the dtype packed for."""
        if x.dtype != self.dtype:
            raise DtypeError(
                f"x is {x.dtype}, but the weight was packed for {self.dtype}",
                hint="cast x, or pack the weight with dtype=x.dtype",
            )
        if not x.ndim or x.shape[-1] != self.columns:
            raise ShapeError(f"x must be [..., {self.columns}], seen {list(x.shape)}")

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device."""
        return replace(
            self,
            words=self.words.to(device),
            scales=self.scales.to(device),
            shifts=self.shifts.to(device),
            factors=self.factors.to(device),
        )


def pack(w: MXTensor, *, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """Rearrange `w`, logical [N, K] or [E, N, K] with blocks along K, for activations of `dtype`.

    Works on the device of `w`. Reads back a few numbers, so do it outside of graphs. Raises
    `DtypeError` for other activations than bfloat16 and float16, `ShapeError` for other shapes, and
    `NonFiniteError` with the first scale byte that is 255.
    """
    if dtype not in LAYOUT_OF_DTYPE:
        raise DtypeError(f"{dtype} activations have no layout", hint="use bfloat16 or float16")
    if len(w.shape) not in (2, 3) or w.axis != len(w.shape) - 1:
        raise ShapeError(
            f"a weight is [N, K] or [E, N, K] with blocks along K, seen {list(w.shape)} "
            f"with blocks along axis {w.axis}",
            hint="quantize the transposed weight along its last axis",
        )
    if not w.numel():
        raise ShapeError(f"there is nothing to pack in a weight of shape {list(w.shape)}")
    layout = LAYOUT_OF_DTYPE[dtype]
    rows, columns = w.shape[-2:]
    codes, scales = (
        w.codes.view(-1, rows, columns // 2),
        w.scales.view(-1, rows, w.scales.shape[-1]),
    )
    _check_scales(scales)
    word = WORDS[layout]
    shifts, folded = _choose_shifts(codes, scales, word)
    return PackedWeight(
        _pack_words(codes, word),
        _pack_scales(scales, shifts),
        shifts,
        _factors(shifts, word, folded),
        rows,
        columns,
        w.shape[0] if len(w.shape) == 3 else None,
        layout,
        folded,
        _fits_dtype(codes, scales, dtype),
    )


def unpack(w: PackedWeight) -> MXTensor:
    """The tensor `w` was packed from, bit for bit."""
    codes = _unpack_words(w.words, WORDS[w.layout])[:, : w.rows, : w.columns // 2]
    byte = _unpack_scales(w.scales, w.shifts)[:, : w.rows, : w.columns // BLOCK_SIZE]
    lead = (w.rows,) if w.experts is None else (w.experts, w.rows)
    return MXTensor(
        codes.reshape(*lead, codes.shape[-1]), byte.reshape(*lead, byte.shape[-1]), w.shape
    )


def interleave(gate: MXTensor, up: MXTensor) -> MXTensor:
    """Rows gate 0, up 0, gate 1, ... of two weights [.., I, K]: the order fused SwiGLU reads."""
    if gate.shape != up.shape or gate.axis != len(gate.shape) - 1 or up.axis != gate.axis:
        raise ShapeError(
            f"gate {list(gate.shape)} and up {list(up.shape)} must be alike, blocks along the last "
            "axis"
        )
    *lead, rows, columns = gate.shape
    codes = torch.stack([gate.codes, up.codes], dim=-2).flatten(-3, -2)
    scales = torch.stack([gate.scales, up.scales], dim=-2).flatten(-3, -2)
    return MXTensor(codes, scales, (*lead, 2 * rows, columns))


def _check_scales(scales: torch.Tensor) -> None:
    bad = scales == E8M0_NAN
    if bad.any():
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise NonFiniteError(
            f"scale byte {E8M0_NAN} (NaN) in expert {index[0]}, row {index[1]}, block {index[2]}",
            index=index,
            hint="the checkpoint is damaged or was made from NaN; quantize the weight again",
        )


def _choose_shifts(
    codes: torch.Tensor, scales: torch.Tensor, word: WordFormat
) -> tuple[torch.Tensor, bool]:
    """Per expert a shift that makes every stored byte a usable exponent, if there is one.

    With f = byte - shift: blocks with elements need f between the least exponent that leaves half
    the scale exact in the float and the largest finite one. Blocks of zeros may have any exponent
    but that of infinity, since 0 * inf is NaN. Without such shifts: zeros, and False.
    """
    infinite = 2**word.exponent_bits - 1
    least = 2 + word.bias - word.mantissa_bits
    zero = _zero_blocks(codes).flatten(1)
    byte = scales.int().flatten(1)
    highest = byte.masked_fill(zero, 0).amax(1)
    lowest = byte.masked_fill(zero, E8M0_NAN).amin(1)
    counts = torch.zeros(len(byte), E8M0_NAN + 1, dtype=torch.int32, device=byte.device)
    of_zeros = counts.scatter_add_(1, byte.long(), zero.int()) > 0
    every_byte = torch.arange(E8M0_NAN + 1, device=byte.device)
    # A result factor of 1 where possible; larger shifts only as far as needed.
    first = torch.maximum(highest - (infinite - 1), torch.full_like(highest, -word.bias))
    shifts = torch.full_like(first, _UNSET)
    for step in range(infinite - least):
        shift = first + step
        meets_infinity = ((every_byte - shift[:, None]) & infinite) == infinite
        fits = (lowest - shift >= least) & ~(of_zeros & meets_infinity).any(1)
        shifts = torch.where((shifts == _UNSET) & fits, shift, shifts)
        if bool((shifts != _UNSET).all()):
            return shifts, True
    return torch.zeros_like(shifts), False


def _fits_dtype(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the smallest and the largest element times scale are exact in `dtype`."""
    byte = scales.int().masked_fill(_zero_blocks(codes), E8M0_BIAS)
    limits = torch.finfo(dtype)
    least, most = (2.0 ** (int(b) - E8M0_BIAS) for b in (byte.amin(), byte.amax()))
    tiny = limits.smallest_normal * limits.eps
    return E2M1_VALUES[1] * least >= tiny and E2M1_MAX * most <= limits.max


def _zero_blocks(codes: torch.Tensor) -> torch.Tensor:
    """Which blocks of uint8 [.., K/2] hold nothing but zeros of either sign."""
    magnitude = codes.view(*codes.shape[:-1], -1, BLOCK_SIZE // 2) & 0x77
    return (magnitude == 0).all(-1)


def _factors(shifts: torch.Tensor, word: WordFormat, folded: bool) -> torch.Tensor:
    """The part of the scales that kernels leave out of their sums, float32 [E].

    A decoded plane is element * 2^-bias and is multiplied by 2^(byte - shift - float_bias); the
    scale is 2^(byte - 127).
    """
    if not folded:
        return torch.ones_like(shifts, dtype=torch.float32)
    return torch.exp2((shifts + word.bias + word.float_bias - E8M0_BIAS).double()).float()


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pack_words(codes: torch.Tensor, word: WordFormat) -> torch.Tensor:
    """uint8 [E, N, K/2] to int16 [E, N_padded, K_padded/4]; one expert at a time bounds memory."""
    experts, rows, half = codes.shape
    shape = _padded(rows, ROW_MULTIPLE), _padded(half, CHUNK // 2)
    words = codes.new_empty(experts, shape[0], shape[1] // 2, dtype=torch.int16)
    for expert in range(experts):
        padded = codes.new_zeros(shape)
        padded[:rows, :half] = codes[expert]
        nibbles = torch.stack([padded & 15, padded >> 4], dim=-1).flatten(-2)
        planes = nibbles.view(shape[0], -1, PLANES, BLOCK_SIZE)
        out = torch.zeros_like(planes[..., 0, :], dtype=torch.int32)
        for plane, places in enumerate(word.places):
            code = planes[..., plane, :].to(torch.int32)
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                out |= ((code >> bit) & 1) << place
        words[expert] = out.flatten(-2).to(torch.int16)
    return words


def _unpack_words(words: torch.Tensor, word: WordFormat) -> torch.Tensor:
    """int16 [E, N_padded, K_padded/4] to uint8 [E, N_padded, K_padded/2]."""
    lanes = words.view(*words.shape[:2], -1, 1, BLOCK_SIZE).to(torch.int32)
    planes = []
    for places in word.places:
        code = torch.zeros_like(lanes)
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            code |= ((lanes >> place) & 1) << bit
        planes.append(code)
    nibbles = torch.cat(planes, dim=-2).flatten(-3).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _pack_scales(scales: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """uint8 [E, N, K/32] to int32 [E, K_padded/128, N_padded]."""
    experts, rows, blocks = scales.shape
    padded = scales.new_zeros(experts, _padded(rows, ROW_MULTIPLE), _padded(blocks, PLANES))
    padded[:, :rows, :blocks] = scales - shifts.to(torch.uint8).view(-1, 1, 1)
    return padded.view(torch.int32).transpose(1, 2).contiguous()


def _unpack_scales(scales: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """int32 [E, K_padded/128, N_padded] to uint8 [E, N_padded, K_padded/32]."""
    stored = scales.transpose(1, 2).contiguous().view(torch.uint8)
    return stored + shifts.to(torch.uint8).view(-1, 1, 1)
