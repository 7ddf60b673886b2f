"""A plugin of vLLM that puts our int8 linears first among its kernels for CPUs.

vLLM finds ``register`` by the entry point "vllm.general_plugins" and calls it in every process.
"""

from __future__ import annotations

import logging

from x86quant.errors import first_line
from x86quant.tested_versions import check_tested

#: Releases whose base classes and lists of kernels the plugin was made for.
TESTED = ("0.33",)

_log = logging.getLogger("x86quant.vllm_plugin")


def register() -> None:
    """Put our kernels first on the CPU; where that cannot be, leave vLLM as it is and say why."""
    try:
        check_tested("vllm", TESTED, "x86quant's plugin for vLLM")
        from x86quant.vllm_plugin.kernels import put_first

        put_first()
    except Exception as error:  # whatever is wrong with a plugin, its host goes on
        _log.warning("vLLM's own kernels stay in place: %s", first_line(error))
