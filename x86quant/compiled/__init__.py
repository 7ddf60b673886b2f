"""Compiled models: the module, its guard, ``compile``, and the back end of torch.compile."""

from x86quant.compiled.compiler import compile
from x86quant.compiled.guarded import GuardedModule
from x86quant.compiled.module import CompiledModule

__all__ = ["CompiledModule", "GuardedModule", "compile"]
