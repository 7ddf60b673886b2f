"""Builds the extension; everything else is declared in pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from setuptools import setup

#: What the compiled part is written for; pyproject.toml says the same.
TORCH = "2.13"


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


torch_version = need_torch()

from torch.utils.cpp_extension import (  # noqa: E402  once it is known to be there
    BuildExtension,
    CppExtension,
    include_paths,
)

#: Where compiled files stay: a wheel does not compile again what `pip install -e` has. They depend on
#: torch's headers, which no build looks at again.
OBJECTS = Path("build", f"objects-{sys.implementation.cache_tag}-torch-{torch_version}")

SOURCES = sorted(str(path) for path in Path("kernels").glob("*/*.cpp"))
TOOLCHAIN = Path("kernels", "native", "toolchain.py")


def extension() -> list[CppExtension]:
    """The compiled part; nothing where there is no compiler that can make it."""
    spec = importlib.util.spec_from_file_location("toolchain", TOOLCHAIN)
    toolchain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toolchain)
    reason = toolchain.why_not()
    if reason is not None:
        print(
            f"x86quant: {reason}. Installing without the compiled part: "
            "compiled models will run in plain torch, slowly.",
            file=sys.stderr,
        )
        return []
    # The headers of torch are not ours to be warned of.
    system = [flag for path in include_paths() for flag in ("-isystem", path)]
    flags = [*toolchain.flags(), "-g0", *system]
    return [CppExtension("x86quant._C", SOURCES, extra_compile_args=flags)]


setup(
    options={"build_ext": {"build_temp": str(OBJECTS)}},
    ext_modules=extension(),
    # No ISA flags: kernels choose their instructions at run time. No OpenMP either: see
    # kernels/runtime/parallel.cpp.
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
