"""Builds the extension; everything else is declared in pyproject.toml."""

import importlib.util
import os
import sys
from pathlib import Path

import setuptools

#: What the compiled part is written for; pyproject.toml says the same.
TORCH = "2.13"
#: The first version that reads pyproject.toml as it is.
SETUPTOOLS = 77
#: Installs without the compiled part where it is set.
WITHOUT = "X86QUANT_WITHOUT_EXTENSION"


def need_tools() -> None:
    """End with what to do where setuptools or pip are too old to install this."""
    if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
        raise SystemExit(
            f"x86quant: this build needs setuptools {SETUPTOOLS} or later, and finds "
            f'{setuptools.__version__}: pip install "setuptools>={SETUPTOOLS}"'
        )
    if "develop" in sys.argv:
        raise SystemExit(
            "x86quant: this pip installs editable packages in a way that is gone: "
            "pip install --upgrade pip (21.3 or later)"
        )


def need_torch() -> str:
    """The version of torch; an end, with what to do, where it is not what the build needs."""
    wanted = f'pip install torch=={TORCH}.0 "setuptools>=77" ninja'
    then = "then install x86quant with --no-build-isolation"
    try:
        from torch import __version__ as version
    except ImportError:
        raise SystemExit(f"x86quant: this build needs torch {TORCH}: {wanted}; {then}") from None
    if version.split(".")[:2] != TORCH.split("."):
        raise SystemExit(
            f"x86quant: this build needs torch {TORCH}, and finds {version}: {wanted}; {then}"
        )
    return str(version)


need_tools()
torch_version = need_torch()

from torch.utils.cpp_extension import (  # noqa: E402  once it is known to be there
    BuildExtension,
    CppExtension,
    include_paths,
)

#: Where compiled files stay: a wheel does not compile again what `pip install -e` has. They depend
#: on torch's headers, which no build looks at again.
OBJECTS = Path("build", f"objects-{sys.implementation.cache_tag}-torch-{torch_version}")

SOURCES = sorted(str(path) for path in Path("kernels").glob("*/*.cpp"))
TOOLCHAIN = Path("kernels", "native", "toolchain.py")


def extension() -> list[CppExtension]:
    """The compiled part, unless it is not wanted; an end where no compiler can make it."""
    if os.environ.get(WITHOUT):
        return []
    spec = importlib.util.spec_from_file_location("toolchain", TOOLCHAIN)
    toolchain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toolchain)
    reason = toolchain.why_not()
    if reason is not None:
        raise SystemExit(
            f"x86quant: {reason}. Install one (Debian, Ubuntu: apt-get install g++), name another "
            "by CXX, or install a wheel that was built elsewhere (python -m tools.wheel). With "
            f"{WITHOUT}=1 x86quant is installed without its compiled part: models then run in "
            "plain torch, slowly."
        )
    # The headers of torch are not ours to be warned of.
    system = [flag for path in include_paths() for flag in ("-isystem", path)]
    flags = [*toolchain.flags(), "-g0", *system]
    return [CppExtension("x86quant._C", SOURCES, extra_compile_args=flags)]


class BuildHere(BuildExtension.with_options(no_python_abi_suffix=True)):
    """Torch's build, whose files stay in ``OBJECTS``; an editable install would throw them away."""

    def build_extensions(self) -> None:
        """Compile what has changed, and link."""
        self.build_temp = str(OBJECTS)
        super().build_extensions()


setuptools.setup(
    ext_modules=extension(),
    # No ISA flags: kernels choose their instructions at run time. No OpenMP either: see
    # kernels/runtime/parallel.cpp.
    cmdclass={"build_ext": BuildHere},
)
