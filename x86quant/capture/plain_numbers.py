"""Numbers of NumPy where Python's are meant: sizes that a model's code computed, say.

Torch takes either; files and native steps hold Python's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn


def plain_layers(model: nn.Module) -> None:
    """Let torch's own layers in ``model`` hold Python's numbers."""
    for module in model.modules():
        if type(module).__module__.startswith("torch.nn."):
            for name, value in vars(module).items():
                found = plain(value)
                if found is not value:
                    vars(module)[name] = found


def plain(value: Any) -> Any:
    """``value``, or what Python has for it: of a number, or of a sequence that holds one."""
    if isinstance(value, np.number | np.bool_):
        return value.item()
    if type(value) in (tuple, list) and any(isinstance(x, np.number) for x in value):
        return type(value)(map(plain, value))
    return value
