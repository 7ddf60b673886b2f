"""Everything that reads what others wrote, each with samples and ways to change them.

``benchmarks/fuzz_readers.py`` gives each reader many changed files.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from benchmarks.readers.reader import Reader
from x86quant.torchvision_import import import_torchvision

#: Where the function is that makes each: it is given an empty folder.
READERS = {
    "artifact": "artifacts:graph",
    "artifact-exported": "artifacts:exported",
    "artifact-class": "artifacts:of_class",
    "artifact-guarded": "artifacts:guarded",
    "packed-cache": "packed_caches:packed_cache",
    "rule-table": "rule_files:table",
    "measurements": "rule_files:measurements",
    "onnx": "onnx_models:onnx_file",
    "checkpoint": "checkpoints:checkpoint",
    "gguf": "gguf_files:types",
    "gguf-model": "gguf_files:models",
    "command-line": "command_lines:command_line",
    "http": "http_bodies:http",
}


def reader(name: str, folder: Path) -> Reader:
    """The reader of this ``name``, whose files are in ``folder``."""
    import_torchvision()  # before what imports transformers
    module, _, function = READERS[name].partition(":")
    made: Reader = getattr(importlib.import_module(f"benchmarks.readers.{module}"), function)(
        folder
    )
    return made
