"""Serving compiled models from C++: program files, and where the library that runs them lies."""

from __future__ import annotations

from x86quant.serving.cpp_library import CppPaths, cpp_paths
from x86quant.serving.exporting import export_program

__all__ = ["CppPaths", "cpp_paths", "export_program"]
