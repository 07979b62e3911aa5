"""The header parser accepts what the reference loader accepts, and refuses one thing more."""

import json
import struct

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from mxfp4.converters.header import (
    DATA_ALIGNMENT,
    DTYPE_BITS,
    TensorInfo,
    build_header,
    read_header,
)
from mxfp4.errors import CorruptCheckpointError


def raw_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_reference_library_writes(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.zeros((0, 5), np.float16),
        "c": np.array(7),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt"}
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert {t.info.name for t in header.tensors} == set(arrays)
    for tensor in header.tensors:
        array = arrays[tensor.info.name]
        assert tensor.info.shape == array.shape
        assert raw[tensor.offset : tensor.offset + tensor.info.byte_count] == array.tobytes()


def test_reference_library_reads_what_we_build(tmp_path):
    infos = [
        TensorInfo("z", "F32", (2, 2)),
        TensorInfo("ä", "U8", (3,)),
        TensorInfo("e", "U8", (0,)),
    ]
    head = build_header(infos, {"format": "pt"})
    assert len(head) % DATA_ALIGNMENT == 0
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + np.arange(4, dtype=np.float32).tobytes() + b"abc")
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("z").tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert bytes(file.get_tensor("ä")) == b"abc"
        assert file.get_tensor("e").shape == (0,)


def test_every_dtype_name_of_the_reference_is_known(tmp_path):
    for dtype, bits in DTYPE_BITS.items():
        count = 24
        path = raw_file(
            tmp_path / f"{dtype}.safetensors",
            {"t": entry(dtype, (count,), (0, count * bits // 8))},
            bytes(count * bits // 8),
        )
        (tensor,) = read_header(path).tensors
        assert tensor.info.dtype == dtype
        with safe_open(path, "np") as file:
            assert file.get_slice("t").get_dtype() == dtype


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        pytest.param({"t": entry()}, b"123", "truncated", id="short"),
        pytest.param({"t": entry()}, b"12345", "longer than its header", id="long"),
        pytest.param(
            {"t": entry(), "u": entry(offsets=(5, 9))}, bytes(9), "hole or an overlap", id="hole"
        ),
        pytest.param(
            {"t": entry(), "u": entry(offsets=(2, 6))}, bytes(6), "hole or an overlap", id="overlap"
        ),
        pytest.param({"t": entry(shape=(5,))}, bytes(4), "needs 5 bytes", id="wrong-size"),
        pytest.param({"t": entry(dtype="E8M0")}, bytes(4), "unknown dtype 'E8M0'", id="dtype"),
        pytest.param({"t": entry("F4", (3,), (0, 2))}, bytes(2), "whole bytes", id="half-byte"),
        pytest.param({"t": {"dtype": "U8"}}, b"", "lacks a dtype, a shape", id="incomplete"),
        pytest.param({"t": entry(shape=(-4,))}, bytes(4), "lacks a dtype, a shape", id="negative"),
        pytest.param({"t": entry(shape=(4.0,))}, bytes(4), "lacks a dtype, a shape", id="float"),
        pytest.param([1], b"", "not a JSON object", id="list"),
        pytest.param(b"{", b"", "not JSON", id="syntax"),
        pytest.param(b"\xff\xfe{}", b"", "not JSON", id="encoding"),
        pytest.param({"__metadata__": {"n": 1}}, b"", "strings to strings", id="metadata"),
        pytest.param(
            b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            bytes(2),
            "this name twice",
            id="duplicate",
        ),
    ],
)
def test_refuses(tmp_path, header, data, message):
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        read_header(path)
    assert caught.value.file == "bad.safetensors"
    assert caught.value.hint


@pytest.mark.parametrize("length", [1 << 40, 100_000_001, 1000])
def test_refuses_a_header_longer_than_the_file(tmp_path, length):
    path = raw_file(tmp_path / "bad.safetensors", {"t": entry()}, bytes(4), length=length)
    with pytest.raises(CorruptCheckpointError, match="the header claims"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 4, 7])
def test_refuses_a_stub_of_a_file(tmp_path, size):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CorruptCheckpointError, match=f"{size} bytes are too few"):
        read_header(path)
