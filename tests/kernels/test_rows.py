"""The row interface: outputs in place, checks, threads, and tensors beyond 2^31 elements."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from mxfp4.errors import (
    BackendUnavailableError,
    DtypeError,
    NonFiniteError,
    RecipeError,
    ShapeError,
)
from mxfp4.kernels import native
from mxfp4.kernels.backends import BlockCodec, backends, block_codec, use_backend
from mxfp4.kernels.rows import CodecOptions, TensorStatistics, decode_rows, encode_rows
from mxfp4.testing import assert_same_bits, block_zoo, slow_encode

ROWS = np.ascontiguousarray(block_zoo("BF16")[::401]).reshape(-1)[: 32 * 560].reshape(56, 320)
NON_FINITE = {
    "BF16": (0x7F80, 0xFF80, 0x7F81, 0xFFFF),
    "F16": (0x7C00, 0xFC00, 0x7C01, 0xFFFF),
    "F32": (0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF),
}


def test_outputs_may_be_parts_of_a_larger_buffer(implementation: BlockCodec) -> None:
    with use_backend(implementation.name):
        alone = encode_rows(ROWS, "BF16")
        buffer = np.full(ROWS.size // 2 + ROWS.size // 32 + 7, 0xEE, np.uint8)
        codes_end = 3 + ROWS.size // 2
        scales_end = codes_end + 1 + ROWS.size // 32
        codes = buffer[3:codes_end].reshape(56, 160)
        scales = buffer[codes_end + 1 : scales_end].reshape(56, 10)
        given = encode_rows(ROWS, "BF16", codes=codes, scales=scales)
    assert given.codes is codes
    assert given.scales is scales
    assert_same_bits(codes, alone.codes)
    assert_same_bits(scales, alone.scales)
    rest = [*buffer[:3], buffer[codes_end], *buffer[scales_end:]]
    assert rest == [0xEE] * 7


def test_every_remainder_of_a_batch(implementation: BlockCodec) -> None:
    wanted_codes, wanted_scales = slow_encode(ROWS.reshape(-1, 32), "BF16", CodecOptions())
    with use_backend(implementation.name):
        for blocks in [*range(20), 63, 64, 65, 127, 129]:
            done = encode_rows(ROWS.reshape(-1, 32)[:blocks], "BF16", statistics=True)
            assert_same_bits(done.codes, wanted_codes[:blocks])
            assert_same_bits(done.scales.reshape(-1), wanted_scales[:blocks])
            back = decode_rows(done.codes, done.scales)
            assert_same_bits(back, decode_rows(wanted_codes, wanted_scales[:, None])[:blocks])


def test_source_is_left_alone_and_may_be_read_only_or_unaligned(implementation: BlockCodec) -> None:
    raw = bytes(1) + ROWS.tobytes()
    unaligned = np.frombuffer(raw, np.uint16, offset=1).reshape(ROWS.shape)
    assert not unaligned.flags.aligned
    with use_backend(implementation.name):
        assert_same_bits(encode_rows(unaligned, "BF16").codes, encode_rows(ROWS, "BF16").codes)
    assert raw == bytes(1) + ROWS.tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("rule", ["even", "search"])
def test_first_non_finite_value_is_named(implementation: BlockCodec, dtype: str, rule: str) -> None:
    width = np.uint32 if dtype == "F32" else np.uint16
    with use_backend(implementation.name):
        for pattern in NON_FINITE[dtype]:
            for row, column in ((0, 0), (2, 31), (3, 97), (36, 319)):
                source = np.zeros((37, 320), width)
                source[row, column] = pattern
                source[row, min(column + 5, 319)] = pattern
                source[36, 319] = pattern
                with pytest.raises(NonFiniteError) as caught:
                    encode_rows(source, dtype, CodecOptions(rule=rule))  # type: ignore[arg-type]
                assert caught.value.index == (row, column)
                assert f"[{row}, {column}]" in str(caught.value)


def test_empty_rows(implementation: BlockCodec) -> None:
    with use_backend(implementation.name):
        for shape in ((0, 64), (4, 0), (0, 0)):
            done = encode_rows(np.zeros(shape, np.uint16), "BF16", statistics=True)
            assert done.codes.shape == (shape[0], shape[1] // 2)
            assert done.statistics == TensorStatistics()
            assert decode_rows(done.codes, done.scales).shape == shape


def test_wrong_input_is_refused() -> None:
    good = np.zeros((2, 64), np.uint16)
    with pytest.raises(ShapeError, match="33 elements, not a multiple of 32"):
        encode_rows(np.zeros((2, 33), np.uint16), "BF16")
    with pytest.raises(ShapeError, match="contiguous"):
        encode_rows(np.zeros((2, 128), np.uint16)[:, ::2], "BF16")
    with pytest.raises(DtypeError, match="F64"):
        encode_rows(good, "F64")
    with pytest.raises(DtypeError, match="4 bytes"):
        encode_rows(good, "F32")
    with pytest.raises(ShapeError, match="codes must be"):
        encode_rows(good, "BF16", codes=np.zeros((2, 31), np.uint8))
    with pytest.raises(RecipeError, match="importance"):
        encode_rows(good, "BF16", importance=np.ones(64))
    search = CodecOptions.named(rule="search", ties="even", zero_sign="underflow")
    with pytest.raises(ShapeError, match=r"\[64\]"):
        encode_rows(good, "BF16", search, importance=np.ones(32))
    with pytest.raises(RecipeError, match="not negative"):
        encode_rows(good, "BF16", search, importance=-np.ones(64))
    with pytest.raises(RecipeError, match="choose one of even, floor"):
        CodecOptions.named(rule="evne", ties="even", zero_sign="underflow")


def test_fortieth_slab_equals_the_whole(implementation: BlockCodec) -> None:
    """Statistics do not depend on how a tensor is cut, not even in the last bit."""
    with use_backend(implementation.name):
        for options in (
            CodecOptions(),
            CodecOptions.named(rule="search", ties="even", zero_sign="drop"),
        ):
            whole = encode_rows(ROWS, "BF16", options, statistics=True).statistics
            total = TensorStatistics()
            for row in reversed(range(len(ROWS))):
                part = encode_rows(ROWS[row : row + 1], "BF16", options, statistics=True).statistics
                assert part is not None
                total += part
            assert total == whole


def test_backend_names() -> None:
    with pytest.raises(BackendUnavailableError, match="did you mean 'numpy'"), use_backend("nunpy"):
        pass
    before = block_codec().name
    with use_backend("numpy"):
        assert block_codec().name == "numpy"
        assert [b.name for b in backends() if b.chosen] == ["numpy"]
        with use_backend("auto"):
            assert block_codec().name == before
    assert block_codec().name == before
    assert {b.name for b in backends()} >= {"c", "numpy", "reference"}


def test_no_torch_is_imported() -> None:
    script = (
        "import sys, numpy; from mxfp4.kernels.rows import encode_rows, decode_rows;"
        "done = encode_rows(numpy.zeros((1, 32), 'u2'), 'BF16', statistics=True);"
        "decode_rows(done.codes, done.scales); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_missing_library_is_noticed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    from mxfp4.kernels import backends as module

    native.load.cache_clear()
    module._automatic.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", f"{tmp_path}/missing.so")
    try:
        done = [encode_rows(ROWS, "BF16") for _ in range(3)]
        assert block_codec().name == "numpy"
        notices = [r for r in caplog.records if "python -m mxfp4.kernels.build" in r.getMessage()]
        assert len(notices) == 1
        with pytest.raises(BackendUnavailableError, match="not built"), use_backend("c"):
            pass
    finally:
        monkeypatch.undo()
        native.load.cache_clear()
        module._automatic.cache_clear()
    assert_same_bits(done[0].codes, encode_rows(ROWS, "BF16").codes)


@pytest.mark.skipif(
    not any(b.name == "c" and b.available for b in backends()), reason="the C codec is not built"
)
def test_two_threads_encode_without_the_interpreter_lock() -> None:
    """While both are inside the library, this thread goes on running Python."""
    slowest = next(reversed(native.load().sets))
    source = np.tile(ROWS, (400, 1))
    options = CodecOptions.named(rule="search", ties="even", zero_sign="underflow")
    weights = np.linspace(0, 1, 320, dtype=np.float32)
    spans: list[tuple[float, float]] = []
    barrier = threading.Barrier(3)

    def work() -> None:
        codes = np.empty((len(source), 160), np.uint8)
        scales = np.empty((len(source), 10), np.uint8)
        barrier.wait()
        start = time.perf_counter()
        native.encode_blocks(
            source.reshape(-1, 32),
            "BF16",
            options,
            codes.reshape(-1, 16),
            scales.reshape(-1),
            importance=weights.reshape(-1, 32),
            instruction_set=slowest,
        )
        spans.append((start, time.perf_counter()))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    barrier.wait()
    ticks = []
    while any(thread.is_alive() for thread in threads):
        ticks.append(time.perf_counter())
        time.sleep(0.0002)
    both = max(start for start, _ in spans), min(end for _, end in spans)
    assert both[1] - both[0] > 0.02, "the calls did not overlap"
    middle = both[0] + (both[1] - both[0]) / 4, both[1] - (both[1] - both[0]) / 4
    assert sum(middle[0] < tick < middle[1] for tick in ticks) >= 5


@pytest.mark.skipif(
    psutil.virtual_memory().available < 6 << 30, reason="needs 6 GiB of free memory"
)
def test_more_than_two_to_the_31_elements() -> None:
    """Zeros cost no memory to read; the last row tells whether 32-bit indices wrapped."""
    if block_codec().name in ("numpy", "c-sse2"):
        pytest.skip("takes minutes without AVX2")
    rows, columns = (1 << 16) + 1, 1 << 15
    source = np.zeros((rows, columns), np.uint16)
    source[-1] = 0x3F80
    assert source.size > 1 << 31
    done = encode_rows(source, "BF16")
    assert (done.codes[-1] == 0x66).all()
    assert (done.scales[-1] == 125).all()
    assert not done.codes[-2].any()
