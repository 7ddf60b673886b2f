"""Builds the extension; everything else is declared in pyproject.toml."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(str(path) for path in Path("kernels").glob("*/*.cpp"))
FLAGS = [
    "-O3",
    "-std=c++20",
    "-fvisibility=hidden",
    "-g0",
    "-ffp-contract=off",  # results must not depend on the instruction set
    "-fno-math-errno",
    # at::parallel_for is serial without it. The OpenMP runtime itself is not linked: it is
    # torch's own, found through libtorch_cpu, so that there is one pool of threads.
    "-fopenmp",
    "-Wno-psabi",
]


def extension() -> list[CppExtension]:
    """The compiled part; nothing where there is no compiler to make it."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        print(
            f"x86quant: no C++ compiler ({compiler}); installing without the compiled part, "
            "compiled models will run in plain torch, slowly",
            file=sys.stderr,
        )
        return []
    return [CppExtension("x86quant._C", SOURCES, extra_compile_args=FLAGS)]


setup(
    ext_modules=extension(),
    # No ISA flags: kernels choose their instructions at run time.
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
