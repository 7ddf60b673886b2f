"""Builds the extension; everything else is declared in pyproject.toml."""

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

setup(
    ext_modules=[
        CppExtension(
            "x86quant._C",
            SOURCES,
            extra_compile_args=FLAGS,
        )
    ],
    # No ISA flags: kernels choose their instructions at run time.
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
