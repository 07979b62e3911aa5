"""vLLM's CPU engine reads our expert layouts and says what the decoded checkpoint says."""

import pytest

from mxfp4.converters.convert import convert
from mxfp4.converters.plan import OutputOptions

pytestmark = pytest.mark.consumer_vllm

LARGEST_DIFFERENCE = 0.02
"""Between log-probs of the packed and the decoded checkpoint on the same engine."""


@pytest.fixture(scope="module")
def folders(tiny_moe, tmp_path_factory):
    base = tmp_path_factory.mktemp("vllm")
    found = {
        name: convert(tiny_moe, base / name, options=OutputOptions(format=name)).output
        for name in ("mxfp4", "mimo")
    }
    plain = convert(found["mxfp4"], base / "plain", options=OutputOptions(format="bf16")).output
    return found | {"plain": plain}


@pytest.fixture(scope="module")
def expected(folders, consumer):
    return consumer("vllm", folders["plain"])


def assert_same(found, expected):
    assert len(expected["tokens"]) == 12
    assert found["tokens"] == expected["tokens"]
    pairs = zip(found["scores"], expected["scores"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < LARGEST_DIFFERENCE


def test_its_mxfp4_expert_kernel_serves_our_output(folders, expected, consumer):
    if not consumer("vllm", folders["mxfp4"], "amx")["amx"]:
        pytest.skip("vLLM's MXFP4 expert kernel for CPUs needs AMX, which this CPU lacks")
    assert_same(consumer("vllm", folders["mxfp4"]), expected)


@pytest.mark.parametrize("layout", ["mxfp4", "mimo"])
def test_its_loader_reads_our_output(layout, folders, expected, consumer):
    found = consumer("vllm", folders[layout], "decode")
    assert found["decoded"] == 4
    assert_same(found, expected)
