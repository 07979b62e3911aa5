"""gguf-py reads our blocks out of a GGUF file and decodes them to the values we decode them to.

Only the sign of a zero differs: its table of integers has one zero.
"""

import numpy as np
import pytest

from mxfp4.converters.convert import convert
from mxfp4.converters.plan import OutputOptions
from mxfp4.kernels.rows import decode_rows

pytestmark = pytest.mark.consumer_gguf


def test_every_module_decodes_to_the_same_bits(tiny_moe, tmp_path, consumer, builder):
    convert(tiny_moe, tmp_path / "blocks", options=OutputOptions(format="gguf-blocks"))
    convert(tiny_moe, tmp_path / "ct")
    result = consumer("gguf", tmp_path / "blocks", tmp_path / "values.npz")
    found, packed = np.load(tmp_path / "values.npz"), builder.read(tmp_path / "ct")
    modules = [name.removesuffix(".weight_packed") for name in packed if name.endswith("_packed")]
    assert result["modules"] == len(modules) > 300
    for module in modules:
        codes, scales = (
            np.frombuffer(packed[f"{module}.weight_{leaf}"][2], np.uint8).reshape(
                packed[f"{module}.weight_{leaf}"][1]
            )
            for leaf in ("packed", "scale")
        )
        ours = decode_rows(codes, scales, "F32").astype(np.float32) + np.float32(0)
        theirs = found[f"{module}.weight_gguf"] + np.float32(0)
        assert np.array_equal(theirs.view(np.uint32), ours.view(np.uint32)), module
