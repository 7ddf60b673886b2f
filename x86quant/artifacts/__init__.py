"""Models as files: ``save``, ``load`` and ``describe``.

One file, in the safetensors format: tensors as they are, graphs and layers as JSON. No pickle; what
a graph may call comes from closed lists, so a file from a stranger cannot run anything.
``docs/artifacts.md`` describes the format.
"""

from x86quant.artifacts.reader import Description, Input, describe, load
from x86quant.artifacts.writer import save

__all__ = ["Description", "Input", "describe", "load", "save"]
