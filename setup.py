"""Build the C codec with the package; everything else is declared in pyproject.toml.

The library is loaded with ctypes, so one wheel per platform serves every Python. Without a working
C compiler the package is built all the same, for every platform, and uses its numpy codec.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "cpu").glob("*.[ch]"))

NOTICE = """
------------------------------------------------------------------------------------------
The C codec of mxfp4 was not built; the slower numpy codec gives the same bytes. Reason:
{reason}
Install a C compiler and run `python -m mxfp4.kernels.build` to have it.
------------------------------------------------------------------------------------------
"""


def builder() -> ModuleType:
    """kernels/build.py, which cannot be imported as part of the package that is being built."""
    spec = importlib.util.spec_from_file_location("codec_build", ROOT / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildCodec(build_ext):
    """Compile with kernels/build.py instead of the rules for Python extensions."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's own name: it depends on the platform, not on the Python."""
        return str(Path(*fullname.split(".")[:-1], builder().LIBRARY_NAME))

    def build_extension(self, ext: Extension) -> None:
        """Build the library, or say once why there is none."""
        build, library = builder(), Path(self.get_ext_fullpath(ext.name))
        library.unlink(missing_ok=True)  # of an earlier build
        try:
            build.build(library, os.environ.get("MXFP4_MACHINE"))
        except build.BuildError as error:
            self.warn(NOTICE.format(reason=error))


class PlatformWheel(bdist_wheel):
    """Tag the wheel by what is inside: any Python, and any platform if there is no library."""

    def get_tag(self) -> tuple[str, str, str]:
        """`py3-none-<platform>`, or `py3-none-any` without the library."""
        platform = super().get_tag()[2]
        library = builder().LIBRARY_NAME
        built = any(Path(self.bdist_dir).rglob(library))
        return "py3", "none", platform if built else "any"


setup(
    ext_modules=[Extension("mxfp4.kernels._codec", sources=SOURCES, optional=True)],
    cmdclass={"build_ext": BuildCodec, "bdist_wheel": PlatformWheel},
)
