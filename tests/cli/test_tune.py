"""`mxfp4 tune` says what is missing."""

import importlib.util

import pytest
import torch
from click.testing import CliRunner

from mxfp4.cli.main import main

TRITON = importlib.util.find_spec("triton") is not None


def run(*arguments):
    return CliRunner().invoke(main, ["tune", *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune for")
def test_without_a_gpu_it_says_so():
    result = run("1024x1024")
    assert result.exit_code == 1
    assert ("torch sees none here" if TRITON else "needs Triton") in result.output


def test_shapes_are_checked():
    assert "is not NxK" in run("1024x1023").output
