"""Synthetic checkpoints, written byte by byte without the code under test."""

import hashlib
import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest

import mxfp4

# One thread each: where other work keeps a core busy, two threads wait for each other at every
# small operation and take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton reads this when it is first imported, by whichever test comes first; not by the above.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A run in the background of a shell ignores Ctrl-C and would hand that on to the commands it tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
# Where a run decides about a change, it must not depend on luck; elsewhere examples stay random.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

NUMPY_DTYPES = {"BF16": "u2", "F16": "u2", "F32": "f4", "U8": "u1", "I8": "i1", "I64": "i8"}


def bf16(values):
    """Float values cut to BF16 bits (uint16)."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def file_bytes(tensors, metadata=None):
    """A safetensors file from {name: (dtype, array)}."""
    header, offset, data = {}, 0, []
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data)


class Builder:
    """Writes checkpoint folders and reads folders back as plain arrays."""

    bf16 = staticmethod(bf16)
    file_bytes = staticmethod(file_bytes)

    def write(self, folder, shards, config=None, *, index=True, extra=None):
        """`shards` is a list of {name: (dtype, array)}; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        total = len(shards)
        weight_map = {}
        for number, tensors in enumerate(shards, 1):
            single = total == 1 and not index
            name = (
                "model.safetensors" if single else f"model-{number:05d}-of-{total:05d}.safetensors"
            )
            (folder / name).write_bytes(file_bytes(tensors, {"format": "pt"}))
            weight_map.update(dict.fromkeys(tensors, name))
        if index:
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
            )
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        for name, text in (extra or {}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    def moe_config(self, **changes):
        """A Qwen3-MoE config for `moe`."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "vocab_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "tie_word_embeddings": False,
            **changes,
        }

    def moe(self, seed=0, layers=2, experts=4, hidden=64, inter=32, vocab=128):
        """Tensors of a small Qwen3-MoE, as {name: ("BF16", bits)}."""
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return "BF16", bf16(rng.normal(0, 0.05, shape))

        tensors = {"model.embed_tokens.weight": normal(vocab, hidden)}
        for layer in range(layers):
            base = f"model.layers.{layer}."
            tensors[base + "input_layernorm.weight"] = normal(hidden)
            tensors[base + "post_attention_layernorm.weight"] = normal(hidden)
            for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
                tensors[f"{base}self_attn.{projection}.weight"] = normal(hidden, hidden)
            tensors[base + "mlp.gate.weight"] = normal(experts, hidden)
            for expert in range(experts):
                name = f"{base}mlp.experts.{expert}."
                tensors[name + "gate_proj.weight"] = normal(inter, hidden)
                tensors[name + "up_proj.weight"] = normal(inter, hidden)
                tensors[name + "down_proj.weight"] = normal(hidden, inter)
        tensors["model.norm.weight"] = normal(hidden)
        tensors["lm_head.weight"] = normal(vocab, hidden)
        return tensors

    def split(self, tensors, count):
        """Cut tensors into `count` shards of equal number, in order."""
        names = list(tensors)
        edges = [round(i * len(names) / count) for i in range(count + 1)]
        return [{name: tensors[name] for name in names[a:b]} for a, b in itertools.pairwise(edges)]

    def read(self, folder):
        """{name: (dtype, shape, raw bytes)} of all safetensors files in a folder."""
        found = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            raw = path.read_bytes()
            (length,) = struct.unpack_from("<Q", raw)
            header = json.loads(raw[8 : 8 + length])
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                assert name not in found
                found[name] = (entry["dtype"], tuple(entry["shape"]), raw[start:end])
        return found

    def hashes(self, folder):
        """SHA-256 of every file outside the state folder."""
        folder = Path(folder)
        return {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and ".mxfp4" not in path.parts
        }

    def sparse(self, path, tensors):
        """A shard with a true header whose data are a hole; `tensors` is {name: (dtype, shape)}."""
        size = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, shape) in tensors.items():
            end = offset + size[dtype] * int(np.prod(shape, dtype=object))
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)


@pytest.fixture(autouse=True)
def same_draws_every_time():
    """Seed what a test draws with torch without naming a generator."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def command():
    """Starts `mxfp4` in a process of its own; keyword arguments go to `Popen`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mxfp4.__file__).parent.parent)}

    def start(*arguments, **keywords):
        return subprocess.Popen(
            [sys.executable, "-m", "mxfp4", *map(str, arguments)],
            env=environment,
            cwd=tempfile.gettempdir(),
            stdout=keywords.pop("stdout", subprocess.PIPE),
            stderr=keywords.pop("stderr", subprocess.PIPE),
            text=True,
            **keywords,
        )

    return start


@pytest.fixture(scope="session")
def builder():
    return Builder()


@pytest.fixture
def moe_folder(tmp_path, builder):
    """A small MoE checkpoint over three shards with an index and companion files."""
    return builder.write(
        tmp_path / "source",
        builder.split(builder.moe(), 3),
        builder.moe_config(),
        extra={"tokenizer.json": "{}", "code/modeling.py": "x = 1\n", "README.md": "hello\n"},
    )


@pytest.fixture(scope="session")
def tiny_moe():
    """The example checkpoint of the repository."""
    return ROOT / "examples" / "tiny-moe"


@pytest.fixture
def tiny_copy(tmp_path, tiny_moe):
    """A private copy of the example checkpoint."""
    return Path(shutil.copytree(tiny_moe, tmp_path / "tiny-moe", copy_function=os.link))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)
