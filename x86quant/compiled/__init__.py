"""Compiled models: the module, ``compile`` that makes it, and the back end of torch.compile."""

from x86quant.compiled.compiler import compile
from x86quant.compiled.module import CompiledModule

__all__ = ["CompiledModule", "compile"]
