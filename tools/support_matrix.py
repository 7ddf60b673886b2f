"""Writes docs/support.md: which layers become int8, in which mode, and what can be done with them.

    python -m tools.support_matrix           # writes the page
    python -m tools.support_matrix --check   # says whether it would change

Nothing is taken from tables: a small network is made around each layer, quantized, saved, loaded
and exported, and looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.compiled.compiled_parts import whole_graph
from x86quant.dynamic import INT8_LAYERS
from x86quant.errors import X86QuantError

PAGE = Path(__file__).parents[1] / "docs" / "support.md"

Make = Callable[[], nn.Module]


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer or function, and what stands around it.

    Attributes:
        name: as the page calls it.
        make: the layer.
        around: the layers before and behind it.
        shape: of the network's input.
        ids: whether that is indices.
    """

    name: str
    make: Make
    around: tuple[Make, Make]
    shape: tuple[int, ...]
    ids: bool = False


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        """What the function returns."""
        return self.function(x)


class Around(nn.Module):
    """A layer between two others."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.before, self.behind = case.around[0](), case.around[1]()
        self.layer = case.make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All three layers, one after another."""
        return self.behind(self.layer(self.before(x)))  # type: ignore[no-any-return]


class States(nn.Module):
    """A recurrent layer without its last states."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The states at every step."""
        return self.inner(x)[0]  # type: ignore[no-any-return]


class Attends(nn.Module):
    """Self attention by torch's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention of ``x`` to itself."""
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def _images(name: str, make: Make, dims: int = 2) -> Case:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    around = (lambda: conv(3, 8, 3, padding=1), lambda: conv(8, 4, 1))
    return Case(name, make, around, (2, 3, *[12] * dims))


def _rows(name: str, make: Make, width: int = 16) -> Case:
    around = (lambda: nn.Linear(width, width), lambda: nn.Linear(width, 4))
    return Case(name, make, around, (4, 6, width))


def _recurrent(name: str, kind: Any, **options: Any) -> Case:
    units = 512 // (2 if options else 1)
    return _rows(name, lambda: States(kind(512, units, batch_first=True, **options)), 512)


def _applied(function: Callable[..., Any]) -> Make:
    return lambda: Applied(function)


CASES: tuple[Case, ...] = (
    _rows("Linear", lambda: nn.Linear(16, 16)),
    _images("Conv1d", lambda: nn.Conv1d(8, 8, 3, padding=1), 1),
    _images("Conv2d", lambda: nn.Conv2d(8, 8, 3, padding=1)),
    _images("Conv2d, depthwise", lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8)),
    _images("Conv2d, dilated", lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2)),
    _images("Conv3d", lambda: nn.Conv3d(8, 8, 3, padding=1), 3),
    _images("ConvTranspose1d", lambda: nn.ConvTranspose1d(8, 8, 2, 2), 1),
    _images("ConvTranspose2d", lambda: nn.ConvTranspose2d(8, 8, 2, 2)),
    _images("ConvTranspose3d", lambda: nn.ConvTranspose3d(8, 8, 2, 2), 3),
    _recurrent("LSTM", nn.LSTM),
    _recurrent("LSTM, both directions", nn.LSTM, bidirectional=True),
    _recurrent("GRU", nn.GRU),
    _recurrent("RNN", nn.RNN),
    _rows("MultiheadAttention", Attends),
    _rows(
        "TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    ),
    Case(
        "Embedding",
        nn.Identity,
        (lambda: nn.Embedding(20, 16), lambda: nn.Linear(16, 4)),
        (4, 6),
        ids=True,
    ),
    Case(
        "EmbeddingBag",
        nn.Identity,
        (lambda: nn.EmbeddingBag(20, 16, mode="sum"), lambda: nn.Linear(16, 4)),
        (4, 6),
        ids=True,
    ),
    _images("BatchNorm2d behind a convolution", lambda: nn.BatchNorm2d(8)),
    _rows("LayerNorm", lambda: nn.LayerNorm(16)),
    _images("GroupNorm", lambda: nn.GroupNorm(2, 8)),
    _images("InstanceNorm2d", lambda: nn.InstanceNorm2d(8)),
    _images("MaxPool2d", lambda: nn.MaxPool2d(2)),
    _images("AvgPool2d", lambda: nn.AvgPool2d(2)),
    _images("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(2)),
    _images("AdaptiveMaxPool2d(1)", lambda: nn.AdaptiveMaxPool2d(1)),
    _images("Upsample, nearest", lambda: nn.Upsample(scale_factor=2)),
    _images("Upsample, bilinear", lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    _images("PixelShuffle", _applied(lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2))),
    _images("ReLU", nn.ReLU),
    _images("ReLU6", nn.ReLU6),
    _images("LeakyReLU", nn.LeakyReLU),
    _images("PReLU", lambda: nn.PReLU(8)),
    _images("ELU", nn.ELU),
    _images("SiLU", nn.SiLU),
    _images("GELU", nn.GELU),
    _images("Mish", nn.Mish),
    _images("Hardswish", nn.Hardswish),
    _images("a hard swish spelled out", _applied(lambda x: x * F.relu6(x + 3) / 6)),
    _images("Sigmoid", nn.Sigmoid),
    _images("Tanh", nn.Tanh),
    _images("Softmax", lambda: nn.Softmax(1)),
    _images("a sum of two tensors", _applied(lambda x: x + x.flip(-1))),
    _images("a product of two tensors", _applied(lambda x: x * x.flip(-1))),
    _images("cat", _applied(lambda x: torch.cat([x[:, :4], x[:, 4:]], 1))),
    _rows(
        "matmul of two tensors",
        _applied(lambda x: torch.matmul(torch.matmul(x, x.transpose(1, 2)), x)),
    ),
    _images("mean over places", _applied(lambda x: x.mean((2, 3), keepdim=True))),
)

COLUMNS = ("static", "dynamic", "weight only", "file", "C++")
_YES, _NO = "yes", "–"


def row(case: Case) -> tuple[str, ...]:
    """What becomes of the layer: an entry for each of ``COLUMNS``."""
    torch.manual_seed(0)
    model = Around(case).eval()
    batches = [
        torch.randint(0, 20, case.shape) if case.ids else torch.randn(case.shape) for _ in range(3)
    ]
    options: dict[str, Any] = {"progress": False, "speed_check": False}
    static = _quantized(model, batches, mode="static", **options)
    done = static is not None and not _float_nodes(static)
    dynamic = _quantized(model, batches, mode="dynamic", **options)
    light = _quantized(model, None, mode="weight_only", **options)
    place = "before" if case.ids else "layer"
    best = dynamic if static is None else static
    return (
        "int8" if done else "float",
        *("int8" if _is_int8(found, place) else "float" for found in (dynamic, light)),
        _YES if best is not None and _is_saved(best, batches[0]) else _NO,
        _YES if done and _is_exported(static, batches[0]) else _NO,
    )


def _quantized(model: nn.Module, batches: Any, **options: Any) -> Any:
    try:
        return x86quant.quantize(model, batches, **options)
    except X86QuantError:
        return None


def _float_nodes(model: Any) -> bool:
    """Whether anything between input and result runs in float."""
    graph = whole_graph(model)
    return graph is None or bool(graph.float_nodes)


def _is_int8(model: Any, place: str) -> bool:
    if model is None:
        return False
    inner = model.get_submodule(place) if hasattr(model, "get_submodule") else None
    return inner is not None and any(isinstance(m, INT8_LAYERS) for m in inner.modules())


def _is_saved(model: Any, x: torch.Tensor) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.x86q"
        try:
            x86quant.save(model, path, example_inputs=(x,))
            return torch.allclose(x86quant.load(path)(x), model(x), atol=1e-5)
        except X86QuantError:
            return False


def _is_exported(model: Any, x: torch.Tensor) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            x86quant.export_program(model, Path(folder) / "model.xq", [x])
        except X86QuantError:
            return False
    return True


_HEAD = """# What is supported

What becomes of a layer that stands between two others. `python -m tools.support_matrix` makes this
page: it quantizes, saves and exports a network around each layer. Rows hold at every level of CPU;
below AVX2 models run in plain torch.

- **static**, **dynamic**, **weight only**: the mode of `quantize`
  ([Quantize in one call](quantize.md)). What is float there stays as it was, and the rest of the
  model is int8.
- **file**: the model is saved, and loaded without its class ([Save and load](artifacts.md)).
- **C++**: a static model with it runs from a program file, without Python
  ([Serving from C++](serving-cpp.md)).

Training for int8 (`prepare_qat`) knows the layers of the column "static" that PyTorch's own
workflow knows. Tables of embeddings become int8 where `embedding_bits` is given
([Embeddings](embeddings.md)), and with weight only. Small recurrent layers stay in float where int8
would be no quicker.

"""


def line(case: Case) -> str:
    """The line of the page about ``case``."""
    return f"| {case.name} | {' | '.join(row(case))} |"


def page() -> str:
    """The text of the page."""
    lines = [
        f"| layer | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *map(line, CASES),
    ]
    return _HEAD + "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = page()
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    same = PAGE.read_text(encoding="utf-8") == text
    print("docs/support.md is as it should be" if same else "docs/support.md is out of date")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
