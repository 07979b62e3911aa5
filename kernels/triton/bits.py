"""Where the four codes of a device word keep their bits, and what is derived from that table.

A device word has 16 bits and holds one code of each of four *planes*; plane p of word j of a
128-element chunk is element 32 p + j, so that a plane is one block of the format and has one scale.
A decoder puts the sign and the three magnitude bits of a plane at the sign bit, the two lowest
exponent bits and the highest mantissa bit of a 16-bit float. That float is the element times a
fixed power of two (`bias`): E2M1's subnormal lands on a subnormal of the float.

The placements were found by search so that a 32-bit register with two words is decoded by few
instructions: planes lie under their final position, shifted right; what does not fit is moved by
one multiplication (bfloat16) or in two parts (float16). Packer, both decoders, dequantizer and the
PTX emulator in the tests all read this table.
"""

from __future__ import annotations

from dataclasses import dataclass

PLANES = 4
"""Codes in one device word."""

CHUNK = 128
"""Elements along K that one row of a tile covers: four planes of one block each."""


@dataclass(frozen=True)
class Step:
    """One term of a plane: `((word >> right) & select) * factor & keep` on every 16-bit lane."""

    keep: int
    factor: int = 1
    right: int = 0
    select: int = 0xFFFF


@dataclass(frozen=True)
class WordFormat:
    """The bits of one device word for one activation dtype.

    `places[p]` are the bit positions of (sign, e1, e0, m) of plane p; `steps[p]` the terms whose
    union is the decoded plane; `bias` the b for which a decoded plane is element * 2^-b. The float
    has `exponent_bits` bits of exponent above `mantissa_bits` of mantissa, biased by `float_bias`.
    """

    places: tuple[tuple[int, int, int, int], ...]
    steps: tuple[tuple[Step, ...], ...]
    bias: int
    exponent_bits: int
    mantissa_bits: int
    float_bias: int


BF16_WORD = WordFormat(
    places=((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14)),
    steps=(
        (Step(0x81C0),),
        (Step(0x81C0, factor=8),),
        (Step(0x81C0, factor=64),),
        (Step(0x81C0, factor=1057, right=8, select=0x006C),),
    ),
    bias=126,
    exponent_bits=8,
    mantissa_bits=7,
    float_bias=127,
)
"""bfloat16: sign at 15, magnitude at 8, 7, 6. Plane 3 sits in the gaps of the others."""

FP16_WORD = WordFormat(
    places=((15, 11, 10, 9), (12, 8, 7, 6), (14, 5, 4, 3), (13, 2, 1, 0)),
    steps=(
        (Step(0x8E00),),
        (Step(0x8E00, factor=8),),
        (Step(0x0E00, factor=64), Step(0x8000, factor=2)),
        (Step(0x0E00, factor=512), Step(0x8000, factor=4)),
    ),
    bias=14,
    exponent_bits=5,
    mantissa_bits=10,
    float_bias=15,
)
"""float16: sign at 15, magnitude at 11, 10, 9. No four planes fit under each other here."""


def ptx_decoder(word: WordFormat) -> str:
    """PTX that decodes `$4`, two words, into `$0` to `$3`, two floats of each plane.

    Multiplications by powers of two are written as such: they leave the integer pipe, which is the
    one that limits these kernels.
    """
    lines = [".reg .b32 a, b;"]
    for plane, steps in enumerate(word.steps):
        for number, step in enumerate(steps):
            register, source = "ab"[number], "$4"
            if step.right:
                lines += [
                    f"shr.u32 {register}, {source}, {step.right};",
                    f"and.b32 {register}, {register}, {_both(step.select)};",
                ]
                source = register
            if step.factor != 1:
                lines.append(f"mul.lo.u32 {register}, {source}, {step.factor};")
                source = register
            if number == 0:
                target = f"${plane}" if len(steps) == 1 else register
                lines.append(f"and.b32 {target}, {source}, {_both(step.keep)};")
            else:
                # lop3 0xEA is (x & y) | z.
                lines.append(f"lop3.b32 ${plane}, {source}, {_both(step.keep)}, a, 0xEA;")
    return "{\n" + "\n".join(lines) + "\n}"


def _both(mask: int) -> str:
    """A 16-bit mask in both halves of a 32-bit register."""
    return f"0x{mask:04X}{mask:04X}"
