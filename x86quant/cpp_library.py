"""Where the C++ library and its header lie. To say so takes no torch, since builds ask."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from pathlib import Path

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
    kernels = importlib.util.find_spec("x86quant.kernels")  # found, not imported
    assert kernels is not None
    assert kernels.submodule_search_locations is not None
    include = Path(kernels.submodule_search_locations[0], "serving", "include")
    library = Path(__file__).with_name(LIBRARY)
    if not library.exists():
        raise ExtensionError(
            f"x86quant was installed without its compiled part ({library} is missing). Install a "
            "C++ compiler, then x86quant again with --no-build-isolation --force-reinstall"
        )
    return CppPaths(include, library)
