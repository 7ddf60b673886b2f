"""Serving compiled models from C++: program files."""

from __future__ import annotations

from x86quant.serving.exporting import export_program

__all__ = ["export_program"]
