"""Encoder options that reproduce the bytes of other MXFP4 writers, by name.

Each entry holds for all finite blocks whose largest magnitude lies between 2^-124 and 2^127. Beyond
that the producers lose data where this library does not, and in blocks of zeros some write another
scale byte (Quark 1 or 104, MLX 127), which decodes to the same zeros. NaN and infinity are refused
here and silently encoded by all of them.

gguf stores the same codes in another order: 17 bytes a block, the scale byte first, then element j
in the low and element j + 16 in the high nibble of byte j.
"""

from __future__ import annotations

from mxfp4.spec import CodecOptions, ScaleRule, TieRule, ZeroSign

COMPRESSED_TENSORS = CodecOptions(ScaleRule.EVEN, TieRule.EVEN, ZeroSign.UNDERFLOW)

PRODUCERS: dict[str, CodecOptions] = {
    "compressed-tensors": COMPRESSED_TENSORS,
    "llm-compressor": COMPRESSED_TENSORS,
    "quark-even": CodecOptions(ScaleRule.EVEN, TieRule.EVEN, ZeroSign.DROP),
    "quark-floor": CodecOptions(ScaleRule.FLOOR, TieRule.EVEN, ZeroSign.DROP),
    "quark-ceil": CodecOptions(ScaleRule.CEIL, TieRule.EVEN, ZeroSign.DROP),
    "gguf": CodecOptions(ScaleRule.FLOOR, TieRule.ZERO, ZeroSign.DROP),
    "llama.cpp": CodecOptions(ScaleRule.FLOOR, TieRule.ZERO, ZeroSign.DROP),
    "modelopt": CodecOptions(ScaleRule.RCEIL, TieRule.ZERO, ZeroSign.SET),
    "mlx": CodecOptions(ScaleRule.RCEIL, TieRule.ZERO, ZeroSign.DROP),
    "triton-kernels-up": CodecOptions(ScaleRule.RCEIL, TieRule.AWAY, ZeroSign.SOURCE),
    "triton-kernels-down": CodecOptions(ScaleRule.RFLOOR, TieRule.AWAY, ZeroSign.SOURCE),
    "torchao-even": CodecOptions(ScaleRule.EVEN, TieRule.EVEN, ZeroSign.SOURCE),
    "torchao-floor": CodecOptions(ScaleRule.FLOOR, TieRule.EVEN, ZeroSign.SOURCE),
    "torchao-rceil": CodecOptions(ScaleRule.RCEIL, TieRule.EVEN, ZeroSign.SOURCE),
    "torchao-ceil": CodecOptions(ScaleRule.CEIL, TieRule.EVEN, ZeroSign.SOURCE),
}
"""Producer name to options; transformers and vLLM quantize on the fly as triton-kernels-up."""
