"""Rearrangements that are spelled with einops are traced as the reshapes that they are."""

from __future__ import annotations

import sys
from typing import Any

from torch.fx import Proxy

#: Its own name for them; each kind of tensors has one.
_NAME = "x86quant"


def let_einops_see_proxies() -> None:
    """Tell einops, if it is in use, that what torch.fx traces with is a tensor of torch."""
    backends: Any = sys.modules.get("einops._backends")
    if backends is None or _NAME in backends._loaded_backends:
        return

    class ProxyBackend(backends.TorchBackend):  # type: ignore[misc]
        """Einops finds it among the subclasses of its own."""

        framework_name = _NAME

        def is_appropriate_type(self, tensor: Any) -> bool:
            """Whether it is for ``tensor``."""
            return isinstance(tensor, Proxy)

        def shape(self, x: Any) -> Any:
            """The sizes of ``x``, not to be kept for the next tensor of such sizes."""
            return list(x.shape)

    backends._loaded_backends[_NAME] = ProxyBackend()
