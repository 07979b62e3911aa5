"""Slabs of any view, at any buffer size, are the matrix that numpy sees."""

import numpy as np
import pytest

from mxfp4.converters.checkpoint import open_checkpoint
from mxfp4.converters.reader import MatrixView, ShardReader, SlabBuffer
from mxfp4.errors import SourceChangedError

E, P, N, K = 3, 2, 5, 64
WIDE = E * P * N * K


@pytest.fixture(params=["BF16", "F32"])
def stored(request, tmp_path, builder):
    dtype = np.uint16 if request.param == "BF16" else np.uint32
    data = np.arange(WIDE).astype(dtype)
    shard = {
        "first": (request.param, np.zeros(7, dtype)),
        "t": (request.param, data),
        "last": (request.param, np.ones(3, dtype)),
    }
    folder = builder.write(tmp_path / "s", [shard], {"model_type": "x"}, index=False)
    checkpoint = open_checkpoint(folder)
    return checkpoint.shards[0], checkpoint.shards[0].header.tensors[1], data


VIEWS = {
    "plain": (lambda d: d.reshape(-1, K), MatrixView.plain(E * P * N, K)),
    "one expert": (lambda d: d.reshape(E, P * N, K)[1], MatrixView(P * N, K, P * N * K, K, 1)),
    "half": (
        lambda d: d.reshape(E, P, N, K)[2, 1],
        MatrixView(N, K, (2 * P + 1) * N * K, K, 1),
    ),
    "interleaved": (
        lambda d: d.reshape(E, N, P, K)[1, :, 1],
        MatrixView(N, K, P * N * K + K, P * K, 1),
    ),
    "transposed": (
        lambda d: d.reshape(E, K, P * N)[1].T,
        MatrixView(P * N, K, P * N * K, 1, P * N),
    ),
    "transposed half": (
        lambda d: d.reshape(E, K, P, N)[1, :, 1].T,
        MatrixView(N, K, P * N * K + N, 1, P * N),
    ),
    "transposed interleaved": (
        lambda d: d.reshape(E, K, N, P)[2, :, :, 1].T,
        MatrixView(N, K, 2 * P * N * K + 1, P, P * N),
    ),
    "empty": (lambda d: d[:0].reshape(0, K), MatrixView(0, K, 0, K, 1)),
}


@pytest.mark.parametrize("buffer_bytes", [64, 300, 1 << 20])
@pytest.mark.parametrize("name", VIEWS)
def test_slabs_make_up_the_matrix(stored, name, buffer_bytes):
    shard, tensor, data = stored
    pick, view = VIEWS[name]
    expected = pick(data)
    seen = []
    with ShardReader(shard, SlabBuffer(buffer_bytes)) as reader:
        for slab in reader.slabs(tensor, view):
            assert slab.first_element == sum(part.size for part in seen)
            assert slab.bits.size % 32 == 0
            seen.append(slab.bits.reshape(-1).copy())
    assert np.array_equal(np.concatenate([*seen, data[:0]]), expected.reshape(-1))


@pytest.mark.parametrize("buffer_bytes", [5, 4096, 1 << 20])
def test_pieces_are_the_raw_bytes(stored, buffer_bytes):
    shard, tensor, data = stored
    with ShardReader(shard, SlabBuffer(buffer_bytes), drop_cache=True) as reader:
        pieces = [bytes(piece) for piece in reader.pieces(tensor)]
    assert max(map(len, pieces)) <= buffer_bytes
    assert b"".join(pieces) == data.tobytes()


def test_contiguous_slabs_never_outgrow_the_buffer(stored):
    shard, tensor, _ = stored
    with ShardReader(shard, SlabBuffer(256)) as reader:
        slabs = [s.bits.nbytes for s in reader.slabs(tensor, MatrixView.plain(1, WIDE))]
    assert max(slabs) <= 256


def test_a_file_cut_while_it_is_read_is_an_error_not_a_crash(stored):
    shard, tensor, _ = stored
    with ShardReader(shard, SlabBuffer(1024)) as reader:
        pieces = reader.pieces(tensor)
        next(pieces)
        with open(shard.path, "r+b") as file:
            file.truncate(tensor.offset + 1100)
        with pytest.raises(SourceChangedError, match="ended in the middle") as caught:
            list(pieces)
        with pytest.raises(SourceChangedError, match="changed during the run"):
            reader.require_unchanged()
    assert (caught.value.file, caught.value.tensor) == (shard.name, "t")


def test_a_changed_file_is_refused_before_reading(stored):
    shard, _, _ = stored
    shard.path.write_bytes(shard.path.read_bytes() + b"x")
    with pytest.raises(SourceChangedError, match="changed during the run"):
        ShardReader(shard, SlabBuffer())
    shard.path.unlink()
    with pytest.raises(SourceChangedError, match="can no longer be read"):
        ShardReader(shard, SlabBuffer())
