"""Our ops in plain torch, by name, for what cannot import ``ops``, which fills this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: The definition of each op, behind its checks.
PLAIN: dict[str, Callable[..., Any]] = {}
