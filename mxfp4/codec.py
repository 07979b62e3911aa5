"""Quantize and dequantize blocks of 32 along one axis: the reference that defines every bit.

Written to be read. The implementations that are meant to be fast live in `mxfp4.kernels` and are
tested to give the same bytes.
"""

from __future__ import annotations

from typing import Literal

import torch

from mxfp4.elements import (
    decode_elements,
    encode_elements,
    nearest_magnitudes,
    pack_codes,
    unpack_codes,
)
from mxfp4.errors import DtypeError, NonFiniteError, RecipeError, ShapeError
from mxfp4.scales import decode_scales, inverse_scales, scale_bytes
from mxfp4.spec import (
    BLOCK_SIZE,
    E2M1_MAX,
    E8M0_BIAS,
    E8M0_NAN,
    MAX_SCALE_BYTE,
    CodecOptions,
    ScaleRule,
    TieRule,
    ZeroSign,
)
from mxfp4.statistics import SIGNAL_CUT, UNIT_BITS, TensorStatistics
from mxfp4.tensor import MXTensor, block_axis

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    rule: str = ScaleRule.EVEN,
    ties: str = TieRule.EVEN,
    zero_sign: str = ZeroSign.UNDERFLOW,
    importance: torch.Tensor | None = None,
) -> MXTensor:
    """Quantize `x` (bfloat16, float16 or float32, any shape) in blocks of 32 along `axis`.

    Computed in float32 whatever the source. `importance` (float, [K]) weighs the squared error of
    each position along `axis`; only the rule "search" takes it. Raises `ShapeError`, `DtypeError`,
    `RecipeError` for an unknown choice, and `NonFiniteError` with the first NaN or infinity.

    >>> t = quantize(torch.arange(32.0))
    >>> t.scales.tolist(), dequantize(t).tolist()[:7]
    ([130], [0.0, 0.0, 0.0, 4.0, 4.0, 4.0, 8.0])
    """
    options = CodecOptions.named(rule=rule, ties=ties, zero_sign=zero_sign)
    rows, weights = _blocks(x, axis, options, importance)
    return _tensor(*encode_blocks(rows, options, weights), x.shape, axis)


def quantize_with_statistics(
    x: torch.Tensor,
    *,
    axis: int = -1,
    rule: str = ScaleRule.EVEN,
    ties: str = TieRule.EVEN,
    zero_sign: str = ZeroSign.UNDERFLOW,
    importance: torch.Tensor | None = None,
) -> tuple[MXTensor, TensorStatistics]:
    """`quantize`, together with what it lost."""
    options = CodecOptions.named(rule=rule, ties=ties, zero_sign=zero_sign)
    rows, weights = _blocks(x, axis, options, importance)
    codes, byte = encode_blocks(rows, options, weights)
    return _tensor(codes, byte, x.shape, axis), measure(rows, codes, byte)


def dequantize(
    t: MXTensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    nan_scale: Literal["raise", "nan"] = "raise",
) -> torch.Tensor:
    """The values of `t` in its logical shape, as bfloat16, float16 or float32.

    bfloat16 and float32 hold every element exactly, except that codes 4 to 7 under scale bytes 253
    and 254 (which this library never writes) can be beyond their range and become infinite;
    float16 is rounded. Scale byte 255 raises `NonFiniteError` unless `nan_scale` is "nan", which
    makes all elements of its block NaN.
    """
    check_dtype(dtype)
    if nan_scale == "raise":
        check_scales(t.scales)
    element = _split(decode_elements(unpack_codes(t.codes)))
    value = (element * decode_scales(t.scales).unsqueeze(-1)).to(dtype)
    # Casting a NaN leaves its bits open, filling in NaN does not.
    value = value.masked_fill((t.scales == E8M0_NAN).unsqueeze(-1), torch.nan)
    return value.flatten(-2).movedim(-1, t.axis)


def encode_blocks(
    x: torch.Tensor, options: CodecOptions, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8 [..., 32], not packed) and scale bytes (int32 [...]) of float32 [..., 32]."""
    byte = scale_bytes(x.abs().amax(-1), options.rule)
    if options.rule is ScaleRule.SEARCH:
        byte = search_bytes(x, byte, weights)
    scaled = x * inverse_scales(byte).unsqueeze(-1)
    return encode_elements(scaled, ties=options.ties, zero_sign=options.zero_sign, source=x), byte


def search_bytes(
    x: torch.Tensor, middle: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """The byte of middle - 1, middle, middle + 1 with the least (weighted) squared error.

    `x` is float32 [..., 32], `middle` int32 [...]. Errors are compared in units of the middle scale
    as sums of differences; without weights all of them are exact in float64.
    """
    scaled = x.abs() * inverse_scales(middle).unsqueeze(-1)
    base = _squared_errors(scaled, 0)
    change = {step: _squared_errors(scaled, step) - base for step in (1, -1)}
    up, down = (_tree_sum(c if weights is None else c * weights) for c in change.values())
    up = up.masked_fill(middle == MAX_SCALE_BYTE, torch.inf)
    down = down.masked_fill(middle == 0, torch.inf)
    step = ((up < 0) & (up <= down)).int() - ((down < 0) & (down < up)).int()
    return middle + step


def _squared_errors(scaled: torch.Tensor, step: int) -> torch.Tensor:
    """Squared error (float64) of every element when the scale is multiplied by 2^step."""
    code = nearest_magnitudes(scaled * 2.0**-step, TieRule.EVEN)
    return (scaled.double() - decode_elements(code).double() * 2.0**step) ** 2


def _tree_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis in the order every backend keeps: neighbours first, then halves."""
    terms = terms[..., 0::2] + terms[..., 1::2]
    while terms.shape[-1] > 1:
        middle = terms.shape[-1] // 2
        terms = terms[..., :middle] + terms[..., middle:]
    return terms[..., 0]


def measure(x: torch.Tensor, codes: torch.Tensor, byte: torch.Tensor) -> TensorStatistics:
    """Statistics of float32 blocks [..., 32] and what `encode_blocks` made of them."""
    if not x.numel():
        return TensorStatistics()
    scaled = x.abs() * inverse_scales(byte).unsqueeze(-1)
    element = decode_elements(codes & 7)
    worst = (scaled - element).abs().amax(-1).double() * torch.exp2(byte.double() - E8M0_BIAS)
    # In the units of `mxfp4.statistics`: cut off, but to no less than 1 except for zeros.
    units = (scaled * (1 << UNIT_BITS)).long().maximum((x != 0).long())
    kept = (units >> SIGNAL_CUT << SIGNAL_CUT).where(byte.unsqueeze(-1) != 0, units)
    return TensorStatistics(
        elements=x.numel(),
        zero_blocks=int((x == 0).all(-1).sum()),
        clipped=int((scaled > E2M1_MAX).sum()),
        flushed=int(((codes & 7 == 0) & (x != 0)).sum()),
        max_abs=float(x.abs().max()),
        max_abs_error=float(worst.max()),
        scale_histogram=tuple(torch.bincount(byte.flatten(), minlength=256).tolist()),
        signal=_square_sums(kept, byte),
        error=_square_sums(units - (element * (1 << UNIT_BITS)).long(), byte),
    )


def _square_sums(values: torch.Tensor, byte: torch.Tensor) -> tuple[int, ...]:
    """Sums of the squares of integers, by scale byte."""
    sums = torch.zeros(256, dtype=torch.int64, device=values.device)
    sums.index_add_(0, byte.flatten().long(), (values * values).sum(-1).flatten())
    return tuple(sums.tolist())


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `DtypeError` for anything but bfloat16, float16 and float32."""
    if dtype not in FLOAT_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in FLOAT_DTYPES)
        raise DtypeError(f"{dtype} is not supported", hint=f"cast to one of {names}")


def check_scales(scales: torch.Tensor) -> None:
    """Raise `NonFiniteError` naming the first block whose scale byte is 255."""
    bad = scales == E8M0_NAN
    if bad.any():
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise NonFiniteError(
            f"scale byte {E8M0_NAN} (NaN) at block {list(index)}",
            index=index,
            hint="the data is damaged or was made from NaN; nan_scale='nan' decodes it to NaN",
        )


def check_importance(importance: torch.Tensor, length: int, options: CodecOptions) -> None:
    """Raise unless weights [length], finite and not negative, are given to the rule "search"."""
    if options.rule is not ScaleRule.SEARCH:
        raise RecipeError(
            f"importance weights do nothing under the rule {options.rule.value!r}",
            hint="use rule='search' or leave them out",
        )
    if tuple(importance.shape) != (length,):
        raise ShapeError(f"importance must be [{length}], seen {list(importance.shape)}")
    if not importance.isfinite().all() or (importance < 0).any():
        raise RecipeError("importance weights must be finite and not negative")


def check_finite(x: torch.Tensor) -> None:
    """Raise `NonFiniteError` with the first index (in order of memory) of a NaN or infinity."""
    bad = ~x.isfinite()
    count = int(bad.sum())
    if count:
        first = bad.flatten().to(torch.uint8).argmax()
        index = tuple(int(i) for i in torch.unravel_index(first, x.shape))
        raise NonFiniteError(index=index, count=count)


def _blocks(
    x: torch.Tensor, axis: int, options: CodecOptions, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Checked input as float32 [..., K/32, 32], and the weights as float32 [K/32, 32]."""
    axis = block_axis(tuple(x.shape), axis)
    check_dtype(x.dtype)
    weights = None
    if importance is not None:
        check_importance(importance, x.shape[axis], options)
        weights = importance.float().reshape(-1, BLOCK_SIZE)
    check_finite(x)
    rows = x.detach().movedim(axis, -1).float().contiguous()
    return _split(rows), weights


def _split(rows: torch.Tensor) -> torch.Tensor:
    """[..., K] as [..., K/32, 32]."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)


def _tensor(codes: torch.Tensor, byte: torch.Tensor, shape: torch.Size, axis: int) -> MXTensor:
    return MXTensor(pack_codes(codes.flatten(-2)), byte.to(torch.uint8), tuple(shape), axis)
