"""The `mxfp4` command: a group whose commands import what they need when they run."""

from __future__ import annotations

import click

from mxfp4.cli.bench import bench
from mxfp4.cli.calibrate import calibrate
from mxfp4.cli.compare import compare
from mxfp4.cli.completion import completion
from mxfp4.cli.convert import convert
from mxfp4.cli.inspect import inspect
from mxfp4.cli.plan import plan
from mxfp4.cli.sensitivity import sensitivity
from mxfp4.cli.status import status
from mxfp4.cli.tune import tune
from mxfp4.cli.verify import verify
from mxfp4.version import __version__

_EPILOG = """\b
exit codes
  0 done, equal or valid      5 verify found differences
  1 unexpected failure        6 another process works in the folder
  2 wrong use                 7 no space on the disk
  3 the source is not valid   130, 143 stopped; the same command continues
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.version_option(__version__, prog_name="mxfp4")
def main() -> None:
    """Convert checkpoints to MXFP4 and check them.

    Start with `mxfp4 convert CKPT OUT`; `mxfp4 plan CKPT` shows first what it would do.
    """


for _command in (
    plan,
    convert,
    verify,
    inspect,
    status,
    calibrate,
    compare,
    sensitivity,
    tune,
    bench,
    completion,
):
    main.add_command(_command)
