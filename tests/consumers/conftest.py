"""Consumers with environments of their own: where they are, and how to run something in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# pyright: reportCallIssue=false, reportArgumentType=false

HOME = Path(os.environ.get("MXFP4_CONSUMERS", Path.home() / ".cache" / "mxfp4-consumers"))
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def llama_converter():
    """The folder with llama.cpp's converter."""
    folder = HOME / "llama" / "source" / "vendor" / "llama.cpp"
    if not (folder / "convert_hf_to_gguf.py").exists():
        pytest.skip("no converter: tests/consumers/environments/make.sh llama fetches it")
    return folder


@pytest.fixture(scope="session")
def consumer():
    """Runs `run_NAME.py ARGUMENTS...` in the environment NAME; returns what it prints as JSON.

    With `here`, it runs in the environment of the tests.
    """

    def run(name, *arguments, here=False, **environment):
        python = Path(sys.executable) if here else HOME / name / "bin" / "python"
        if not python.exists():
            pytest.skip(f"no environment: tests/consumers/environments/make.sh {name} makes it")
        done = subprocess.run(
            [str(python), str(HERE / f"run_{name}.py"), *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory):
    """A random gpt-oss in BF16, saved by transformers; width and depth differ on purpose."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("gpt-oss") / "source"
    model = GptOssForCausalLM(config).to(dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder
