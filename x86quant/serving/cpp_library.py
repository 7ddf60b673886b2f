"""Where the C++ library and its header lie."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import x86quant.kernels.serving
from x86quant.errors import ExtensionError

LIBRARY = "libx86quant_runtime.so"


@dataclasses.dataclass(frozen=True)
class CppPaths:
    """What a C++ program that runs program files is built with.

    Attributes:
        include: the folder to search for ``x86quant/runtime.h``.
        library: the shared library.
    """

    include: Path
    library: Path

    @property
    def cflags(self) -> str:
        """The flags of the compiler."""
        return shlex.join(["-std=c++17", f"-I{self.include}"])

    @property
    def libs(self) -> str:
        """The flags of the linker; the program finds the library where it lies now."""
        folder = self.library.parent
        return shlex.join([f"-L{folder}", "-lx86quant_runtime", f"-Wl,-rpath,{folder}"])


def cpp_paths() -> CppPaths:
    """The folder of the header and the library, which need neither Python nor torch.

    Raises:
        ExtensionError: x86quant was installed without its compiled part.
    """
    include = Path(x86quant.kernels.serving.__file__).with_name("include")
    library = Path(__file__).parents[1] / LIBRARY
    if not library.exists():
        raise ExtensionError(
            f"x86quant was installed without its compiled part ({library} is missing). Install a "
            "C++ compiler, then x86quant again with --no-build-isolation --force-reinstall"
        )
    return CppPaths(include, library)
