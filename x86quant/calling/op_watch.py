"""``OpWatch``: a mode that each op goes through while a model runs."""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each op by :meth:`op`, and lets be what a model compiles within itself.

    ``flex_attention`` and ``torch.cond`` do that even in eager mode. Where a mode refuses them, or
    keeps torch.compile from what it finds, they fail in all of the process from then on, in the
    user's own model, too. Ops within them are not seen.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """That torch.compile works as without the mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **given)
        return self.op(func, args, given)

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``."""
        raise NotImplementedError
