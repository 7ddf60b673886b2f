"""What transformers calls while it loads a model: layers become int8 as their weights arrive."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantizer

from x86quant.dynamic import (
    HalfEmbedding,
    ReorderedLinear,
    WeightOnlyEmbedding,
    adapt_containers,
    is_linear,
    why_float,
)
from x86quant.dynamic.experts import LINEARS as LINEARS_OF_EXPERTS
from x86quant.dynamic.experts import (
    float_tensors,
    give_experts,
    is_expert_tensor,
    is_experts,
    open_experts,
    unloaded_experts,
)
from x86quant.dynamic.layers import Int8Linear, carry_attributes, is_conv1d
from x86quant.dynamic.shared_codes import OPERANDS, holders_of_others, share_codes
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantError
from x86quant.huggingface.checkpoint_formats import FLOAT_WEIGHT, FORMATS, CheckpointFormat
from x86quant.huggingface.expert_parts import (
    expert_parts,
    join_parts,
    merges_experts,
    open_parts,
)
from x86quant.huggingface.load_settings import METHOD, X86QuantConfig
from x86quant.huggingface.mapped_files import give_back
from x86quant.huggingface.native_graphs import give_graphs
from x86quant.huggingface.stored_layers import half_tables, marked_layers, stored_layers
from x86quant.huggingface.unloaded_layer import LINEARS, UnloadedLayer, loaded

_NAMED = 4
#: Scales of keys and values that other libraries chose beforehand, of which nothing is made.
_OF_CACHES = r"\.[qkv]_(scale|zero_point)$"


@register_quantizer(METHOD)
class X86HfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts int8 layers into a model whose weights are about to be loaded.

    A float checkpoint: each weight is quantized as it is read, and its layer replaced. An int8
    checkpoint: the layers whose codes the files hold are replaced before anything is read.
    """

    requires_calibration = False

    def __init__(self, quantization_config: X86QuantConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._float: dict[str, nn.Module] = {}  # still to be quantized, by path
        self._tied: dict[str, nn.Module] = {}  # those whose weights are known when all are read
        self._unloaded: dict[str, UnloadedLayer] = {}
        self._errors: list[X86QuantError] = []
        self._conversions: list[Any] = []
        self._groups: list[set[str]] = []  # as they are before layers are taken out of them
        self._experts_apart = False  # whether their codes are called as float weights are

    # --- asked by transformers ---

    @property
    def is_trainable(self) -> bool:
        """Whether gradients flow through the layers."""
        return False

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works."""
        return True

    def validate_environment(self, *, device_map: Any = None, **_: Any) -> None:
        """Raise if the options, or where the model is to be, are wrong."""
        self.quantization_config.check()
        devices = device_map.values() if isinstance(device_map, dict) else (device_map,)
        for device in devices:
            if str(device) not in ("None", "cpu", "auto"):
                raise InvalidInputError(
                    f"device_map asks for {device}, and int8 layers run on the CPU only: leave "
                    "device_map out"
                )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of what stays in float: int8 layers compute their scales in float32."""
        return torch.float32

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        """Whether ``param_name`` is the weight of a layer that is to become int8."""
        path, name = param_name.rpartition(".")[::2]
        return path in self._float and (
            name == "weight" or is_expert_tensor(self._float[path], name)
        )

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that replaces a layer when its float weight is there."""
        return _Quantize(self)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        config = self.quantization_config
        if not self.pre_quantized:
            tied = {path for group in _tied_groups(model) for path in group}
            for path, module in chosen_layers(model, config).items():
                (self._tied if path in tied else self._float)[path] = module
            return
        stored, foreign = FORMATS[config.checkpoint], config.checkpoint != METHOD
        layers = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
            or (not foreign and is_linear(module))
            or (stored.tables and type(module) is nn.Embedding)
        }
        self._groups = _tied_groups(model, FLOAT_WEIGHT)
        self._conversions = get_model_conversion_mapping(model)
        parts = expert_parts(model, self._conversions) if foreign else _expert_linears(model)
        layers.update(parts)
        found = stored_layers(model, layers, checkpoint_files, stored, self._conversions)
        if foreign:
            open_parts(model, found)
            self._check_experts(model, found.keys() & parts.keys(), stored)
        else:
            open_experts(model, found)
        places = _places(model)
        for path, tensors in found.items():
            layer = UnloadedLayer(layers[path], stored=tensors, of_files=stored)
            self._expect(model, path, layer, places)
        if not foreign:
            self._expect_tied(model, layers, checkpoint_files or (), places)
        self._keep_half_tables(model, checkpoint_files or (), places)
        ignored = [_OF_CACHES]
        if not foreign:
            names = {f"{path}.{FLOAT_WEIGHT}" for path in self._unloaded} | set(_marks(model))
            ignored = [rf"(^|\.){re.escape(name)}$" for name in names]
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*known, *ignored}

    def _keep_half_tables(self, model: Any, files: Sequence[str], places: _Places) -> None:
        """Let tables that files hold in 16 bits, and that nothing is tied to, stay so."""
        tied = {path for group in (*self._groups, *_tied_groups(model)) for path in group}
        tables = {
            path: module
            for path, module in model.named_modules()
            if type(module) is nn.Embedding and path not in tied and why_float(module) is None
        }
        for path, weight in half_tables(model, tables, files, self._conversions).items():
            table = tables[path]
            if weight.shape == table.weight.shape:  # else transformers reports it
                half = HalfEmbedding(weight)
                carry_attributes(table, half)
                for parent, name in places[table]:
                    parent._modules[name] = half

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """What transformers does to tensors of files, but for merging experts in codes."""
        found: list[Any] = super().update_weight_conversions(weight_conversions, model)
        return [x for x in found if not (self._experts_apart and merges_experts(x))]

    def _check_experts(self, model: Any, parts: set[str], stored: CheckpointFormat) -> None:
        """Tell codes of experts from float weights, which some files call by the same name."""
        self._experts_apart = bool(parts) and stored.codes == FLOAT_WEIGHT
        if not self._experts_apart:
            return
        for path, module in model.named_modules():
            if is_experts(module) and any(is_expert_tensor(module, x) for x in LINEARS_OF_EXPERTS):
                raise UnsupportedError(
                    f"{path} is in float, where other experts are in codes: load the float model "
                    "with X86QuantConfig"
                )

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._errors:
            raise self._errors[0]
        # What the checkpoint does not have, and what is tied by now.
        made: dict[tuple[int, bool], dict[str, torch.Tensor]] = {}
        for path, module in (*self._float.items(), *self._tied.items()):
            if is_experts(module):
                for name in list(module._parameters):
                    if is_expert_tensor(module, name):
                        self._give_experts(path, module, name, module.get_parameter(name).detach())
                continue
            weight: Any = module.weight
            layer = UnloadedLayer(module, self.quantization_config.bits)
            what = (id(weight), is_conv1d(module))
            if what not in made:
                made[what] = self._values(path, layer, weight.detach())
            values = made[what]
            self._expect(model, path, layer)
            for name, value in values.items():
                setattr(layer, name, loaded(value))
        missing = [f"{p}.{name}" for p, layer in self._unloaded.items() for name in layer.missing]
        if missing:
            raise InvalidInputError(
                f"the checkpoint lacks {len(missing)} tensors of int8 layers: "
                f"{', '.join(missing[:_NAMED])}; save the model again"
            )
        self._leave_files(model)
        places = _places(model)
        for path in list(self._unloaded):
            layer = self._unloaded.pop(path)
            form = layer.int8_form(path, self.quantization_config.scheme)
            for parent, name in places[layer]:
                parent._modules[name] = form
            give_back(layer.buffers())  # else memory holds all of the files, too
        join_parts(model, self._conversions)
        made.clear()
        share_codes(model)  # of files that have both
        self._tied.clear()
        self.quantization_config.checkpoint = METHOD  # what it would be saved as
        adapt_containers(model)
        model.requires_grad_(False).eval()  # as transformers did, before there were int8 layers
        give_graphs(model, self.quantization_config.fuse_blocks)
        return model

    def _leave_files(self, model: nn.Module) -> None:
        """Copy what stays float out of mapped files, of which codes alone are read from then on."""
        stored = {id(x) for layer in self._unloaded.values() for x in layer.buffers()}
        for x in (*model.parameters(), *model.buffers()):
            if id(x) not in stored:
                x.data = x.data.clone()
        give_back(x for layer in self._unloaded.values() for x in layer.buffers())

    def get_state_dict_and_metadata(
        self, model: nn.Module
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """What ``save_pretrained`` writes: the state, and a mark for every int8 layer.

        Raises:
            InvalidInputError: loading could not make its layers again.
        """
        told = getattr(model.config, "quantization_config", None)
        if isinstance(told, dict):  # by ``note_in_config``
            X86QuantConfig(**told)
        state = {**model.state_dict(), **_marks(model)}
        for path in holders_of_others(model):
            for name in OPERANDS:
                del state[f"{path}.{name}"]  # those of the table
        for path, module in model.named_modules():
            if isinstance(module, Int8Linear | WeightOnlyEmbedding):
                state[f"{path}.{FLOAT_WEIGHT}"] = torch.zeros(1, dtype=torch.int8)
        for path, module in model.named_modules():
            if isinstance(module, ReorderedLinear):  # one layer of the model, and so of files
                inside = f"{path}.linear."
                for key in [key for key in state if key.startswith(inside)]:
                    state[f"{path}.{key.removeprefix(inside)}"] = state.pop(key)
        return state, {}

    # --- the layers ---

    def _expect(
        self, model: nn.Module, path: str, layer: UnloadedLayer, places: _Places | None = None
    ) -> None:
        """Let transformers load the values of ``layer``, in place of those it is made for."""
        for parent, name in (places or _places(model))[model.get_submodule(path)]:
            parent._modules[name] = layer
        _untie(model, path)
        self._float.pop(path, None)
        self._unloaded[path] = layer

    def _expect_tied(
        self, model: Any, layers: Mapping[str, nn.Module], files: Sequence[str], places: _Places
    ) -> None:
        """Expect layers without codes of their own: files have those of the tables they hold."""
        for group in self._groups:
            there = [self._unloaded[path] for path in sorted(group) if path in self._unloaded]
            left = group & layers.keys() - self._unloaded.keys()
            for path in marked_layers(model, left, files, self._conversions) if there else ():
                self._expect(model, path, UnloadedLayer(layers[path], tied_to=there[0]), places)

    def _give_experts(self, path: str, module: nn.Module, name: str, weight: torch.Tensor) -> None:
        """Let the experts of ``module`` be linears of ours in place of the tensor ``name``."""
        config = self.quantization_config
        try:
            give_experts(module, name, weight.float(), LINEARS[config.scheme], config.bits)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}.{name}: {error}") from error

    @staticmethod
    def _values(path: str, layer: UnloadedLayer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        try:
            return layer.values_of(weight)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error

    def quantized(self, model: nn.Module, name: str, weight: torch.Tensor) -> dict[str, Any]:
        """The tensors that stand for the float ``weight`` called ``name``, of a layer replaced."""
        path, last = name.rpartition(".")[::2]
        module = self._float.get(path)
        if module is not None and is_expert_tensor(module, last):
            if weight.shape != module.get_parameter(last).shape:
                return {name: weight}  # transformers reports it
            try:
                self._give_experts(path, module, last, weight)
            except X86QuantError as error:
                self._errors.append(error)
            return {}
        if module is None or last != "weight":
            return {name: weight}
        if weight.shape != module.weight.shape:
            del self._float[path]  # transformers reports it, or makes a new weight
            return {name: weight}
        layer = UnloadedLayer(module, self.quantization_config.bits)
        try:
            values = self._values(path, layer, weight)
        except X86QuantError as error:  # transformers would turn it into a line of a table
            self._errors.append(error)
            return {}
        self._expect(model, path, layer)
        return {f"{path}.{key}": value for key, value in values.items()}


def let_save(model: Any) -> None:
    """Let ``save_pretrained`` of ``model``, whose layers became int8 after loading, mark them."""
    if getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = X86HfQuantizer(X86QuantConfig(), pre_quantized=True)


_Places = dict[nn.Module, list[tuple[nn.Module, str]]]


def _places(model: nn.Module) -> _Places:
    """Where in ``model`` each module stands: its parents, and its names in them."""
    found: _Places = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


class _Quantize(ConversionOps):  # type: ignore[misc]
    """Turns a float weight that was just read into codes and scales."""

    def __init__(self, quantizer: X86HfQuantizer) -> None:
        self._quantizer = quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        model: Any = None,
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """The tensors to be loaded in place of those in ``input_dict``, by name."""
        found: dict[str, Any] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            tensors = self._quantizer.quantized(model, name, weight)
            if name not in tensors and missing_keys is not None:
                missing_keys.discard(name)
            found.update(tensors)
        return found


# --- which layers ---


def chosen_layers(model: Any, config: X86QuantConfig) -> dict[str, nn.Module]:
    """The layers of ``model`` that ``config`` turns into int8, by path.

    Raises:
        InvalidInputError: a module that is to stay in float is not there.
        UnsupportedError: no layer is left.
    """
    wanted = config.modules_to_not_convert or ()
    used: set[str] = set()
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        kept = [entry for entry in wanted if _is_meant(entry, path, module)]
        used.update(kept)
        if kept or isinstance(module, nn.MultiheadAttention):  # reads the weights of its layers
            inside = (*inside, f"{path}.")
        if kept or path.startswith(inside or ("\0",)):
            continue
        table = type(module) is nn.Embedding and config.embeddings
        known = table or is_linear(module) or is_experts(module)
        if known and why_float(module) is None:
            found[path] = module
    names = [path for path, _ in model.named_modules()]
    for entry in wanted:
        if entry not in used:
            close = difflib.get_close_matches(entry, names, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise InvalidInputError(
                f"modules_to_not_convert: {type(model).__name__} has no module {entry!r}{hint}"
            )
    for group in _tied_groups(model):
        # A table that a layer in float needs anyway takes no memory.
        if not group <= found.keys():
            found = {p: m for p, m in found.items() if p not in group or is_linear(m)}
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no linear that could be int8 and is not to stay in float"
        )
    return found


def _expert_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Linears that would stand for experts of ``model``, by path."""
    return {
        f"{path}.{name}": linear
        for path, module in model.named_modules()
        if is_experts(module) and why_float(module) is None
        for name, linear in unloaded_experts(module).items()
    }


def _marks(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a file has by the names of the float tensors of experts that became int8.

    transformers takes three dimensions apart, and puts them together again, and finds the size of
    no experts.
    """
    return {
        f"{path}.{name}": torch.zeros(1, 2, 1, dtype=torch.int8)
        for path, module in model.named_modules()
        for name in float_tensors(module)
    }


def _is_meant(entry: str, path: str, module: nn.Module) -> bool:
    """Whether ``entry`` names ``module``: by path, by the last part of it, or by class."""
    return path == entry or path.endswith(f".{entry}") or type(module).__name__ == entry


def _tied_groups(model: Any, name: str = "") -> list[set[str]]:
    """The paths of layers that share a weight or a bias, for each that is shared.

    Or only a tensor called ``name``.
    """
    groups: dict[str, set[str]] = {}
    for target, source in _ties(model).items():
        if name and target.rpartition(".")[2] != name:
            continue
        groups.setdefault(source, {_layer_of(source)}).add(_layer_of(target))
    return list(groups.values())


def _untie(model: Any, path: str) -> None:
    """Take the layer at ``path`` out of what transformers ties; what is left of it stays tied."""
    ties = _ties(model)
    heirs: dict[str, str] = {}
    for target, source in list(ties.items()):
        if _layer_of(target) == path or (
            _layer_of(source) == path and heirs.setdefault(source, target) == target
        ):
            del ties[target]
        elif _layer_of(source) == path:
            ties[target] = heirs[source]


def _ties(model: Any) -> dict[str, str]:
    """Names of tensors, each with that of the one that it is."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]
