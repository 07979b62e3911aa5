"""The very PTX text of the decoders, evaluated in numpy over all 65,536 words."""

import re

import numpy as np
import pytest
import torch

from mxfp4.elements import decode_elements
from mxfp4.kernels.triton.bits import BF16_WORD, FP16_WORD, ptx_decoder

OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table)),
}


def lop3(a, b, c, table):
    out = np.zeros_like(a)
    for case in range(8):
        if table >> case & 1:
            out |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return out


def emulate(text, word):
    """Registers after running straight-line PTX with `$4` = word (uint32)."""
    registers = {"$4": word}
    for statement in re.sub(r"[{}]", "", text).split(";"):
        if not statement.strip() or ".reg" in statement:
            continue
        operation, operands = statement.split(None, 1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
        registers[target] = OPERATIONS[operation](*values)
    return [registers[f"${plane}"] for plane in range(4)]


@pytest.mark.parametrize(
    ("word", "dtype"), [(BF16_WORD, torch.bfloat16), (FP16_WORD, torch.float16)]
)
def test_decoder_over_all_words(word, dtype):
    low = np.arange(65536, dtype=np.uint32)
    high = np.random.default_rng(0).permutation(65536).astype(np.uint32)
    planes = emulate(ptx_decoder(word), low | (high << np.uint32(16)))
    for places, register in zip(word.places, planes, strict=True):
        for lane, source in ((register & 0xFFFF, low), (register >> 16, high)):
            bits = [(source >> place & 1) << (3 - i) for i, place in enumerate(places)]
            code = np.bitwise_or.reduce(bits)
            wanted = decode_elements(torch.from_numpy(code.astype(np.uint8)))
            got = torch.from_numpy(lane.astype(np.uint16)).view(dtype).double()
            assert torch.equal(got * 2.0**word.bias, wanted.double())
            assert torch.equal(got.signbit(), wanted.signbit())


def test_emulator_knows_the_operation_it_stands_for():
    a, b, c = (np.array([value], np.uint32) for value in (0b1100, 0b1010, 0b0001))
    assert lop3(a, b, c, 0xEA).item() == 0b1001
