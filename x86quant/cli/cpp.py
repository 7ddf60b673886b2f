"""Print the flags that a C++ program is built with to run program files.

c++ main.cpp $(x86quant cpp --cflags --libs) -o main
"""

from __future__ import annotations

import argparse

HELP = "print the compiler's and the linker's flags for C++"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--cflags", action="store_true", help="flags of the compiler")
    parser.add_argument("--libs", action="store_true", help="flags of the linker")
    parser.add_argument("--include-dir", action="store_true", help="the folder of the header")
    parser.add_argument("--library", action="store_true", help="the shared library")


def run(options: argparse.Namespace) -> int:
    """Print what was asked for, in one line; all flags if nothing was."""
    from x86quant.cpp_library import cpp_paths

    paths = cpp_paths()
    wanted = {
        paths.cflags: options.cflags,
        paths.libs: options.libs,
        str(paths.include): options.include_dir,
        str(paths.library): options.library,
    }
    print(*([text for text, asked in wanted.items() if asked] or [paths.cflags, paths.libs]))
    return 0
