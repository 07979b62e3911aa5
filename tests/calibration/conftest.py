"""Small text files and a command runner for the calibration tests."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mxfp4.calibration.samples import Samples
from mxfp4.cli.main import main


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Two small files of ordinary text, each of several documents."""
    folder = tmp_path_factory.mktemp("texts")
    prose = "The {0} of a language is made of words, and every word number {1} has a history. "
    code = "def function_{1}(argument):\n    return argument + {1}  # {0}\n"
    files = []
    for name, line in (("prose", prose), ("code", code)):
        documents = [
            "".join(line.format(word, 7 * n + k) for k in range(12))
            for n, word in enumerate(("grammar", "meaning", "sound", "script") * 4)
        ]
        file = folder / f"{name}.txt"
        file.write_text("\n\f\n".join(documents))
        files.append(file)
    return files


@pytest.fixture(scope="session")
def few_samples():
    """Random tokens of the example's vocabulary: enough to run, too few to know anything."""
    tokens = torch.randint(0, 2048, (8, 64), generator=torch.Generator().manual_seed(0))
    return Samples(tokens, tuple(f"domain{i % 4}" for i in range(8)))


@pytest.fixture(scope="session")
def runnable(builder):
    """Makes tensors and config of a random mixture of experts that transformers can run."""

    def make(layers, head=32, **sizes):
        tensors = builder.moe(layers=layers, **sizes)
        for name in [n for n in tensors if n.endswith("q_proj.weight")]:
            for norm in ("q_norm", "k_norm"):
                tensors[name.replace("q_proj", norm)] = ("BF16", builder.bf16(np.ones(head)))
        config = builder.moe_config(
            num_hidden_layers=layers,
            num_experts=sizes.get("experts", 4),
            hidden_size=sizes.get("hidden", 64),
            moe_intermediate_size=sizes.get("inter", 32),
            head_dim=head,
            rms_norm_eps=1e-6,
        )
        return tensors, config

    return make


@pytest.fixture(scope="session")
def small_moe(tmp_path_factory, builder, runnable):
    """A random mixture of experts of three layers over two shards, which runs in no time."""
    tensors, config = runnable(3)
    folder = tmp_path_factory.mktemp("small") / "source"
    return builder.write(folder, builder.split(tensors, 2), config)


@pytest.fixture(scope="session")
def small_samples():
    """Tokens for `small_moe`."""
    tokens = torch.randint(0, 128, (6, 64), generator=torch.Generator().manual_seed(1))
    return Samples(tokens, tuple(f"domain{i % 3}" for i in range(6)))


@pytest.fixture
def invoke():
    """Runs a command line in this process; returns its result."""

    def run(*arguments, code=0):
        result = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    return run
