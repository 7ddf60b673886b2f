"""Importing torchvision, also where its C++ part cannot be loaded."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType | None:
    """torchvision; None where it is not installed.

    A torchvision that was built for CUDA does not load its C++ part beside a torch built for the
    CPU, and its import then fails on two operators of detection models. Only once that was seen are
    they declared, without a kernel: a C++ part that does load must find them undeclared.

    Raises:
        ImportError, RuntimeError: torchvision is installed and cannot be imported.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    import torch

    for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
        del sys.modules[module]
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", _SCHEMA)
    return importlib.import_module("torchvision")
