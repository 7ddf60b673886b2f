"""SmoothQuant: outlier channels behind a layer norm move into the weights of the linears after it.

Channel ``c`` of the norm's result is divided by ``s[c]``, in its weight and bias, and the linears'
columns are multiplied by it: the function stays the same. Tokens then have no channel that sets
the scale for all others. ``s = a^alpha / w^(1 - alpha)``, with the ``alpha`` for which the linears,
rounded, come closest to the float ones on sample rows; or nothing, if none comes closer.

Whether linears alone read a norm's result is seen by watching one run of the model, so this works
for models that no tracer can read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from x86quant.calling.call import Call
from x86quant.calling.running import no_fast_path, tensors_in

_ALPHAS = (0.25, 0.4, 0.5, 0.6, 0.75)
_ROWS = 512
#: Below this share of the error it is worth the change.
_WORTH = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class Smoothed:
    """One layer norm, the linears after it, and what each channel was divided by."""

    norm: str
    linears: tuple[str, ...]
    scales: torch.Tensor
    alpha: float
    error: float

    def __str__(self) -> str:
        return (
            f"{self.norm} -> {', '.join(self.linears)}: alpha {self.alpha}, "
            f"squared error × {self.error:.3g}"
        )


def smooth(
    model: nn.Module, sample: Sequence[Call], *, per_token: bool = True, always: bool = False
) -> tuple[Smoothed, ...]:
    """Smooth the layer norms of ``model`` where that lowers the error on ``sample``, in place.

    Args:
        model: a float model in evaluation mode.
        sample: calls to measure on; only the first tells what reads the norms' results.
        per_token: linears quantize each token with a scale of its own, as dynamic ones do.
        always: do so however little is gained.
    """
    consumers = find_consumers(model, sample[0])
    rows = _sample_rows(model, list(consumers), sample)
    done = []
    for norm, linears in consumers.items():
        weights = [_weight_of(model.get_submodule(name)) for name in linears]
        found = _best_scales(rows[norm], torch.cat(weights), per_token, 1.0 if always else _WORTH)
        if found is not None:
            done.append(Smoothed(norm, linears, *found))
            apply(model, done[-1])
    return tuple(done)


def apply(model: nn.Module, smoothed: Smoothed) -> None:
    """Move the scales of one layer norm of ``model`` into its linears, in place."""
    norm: Any = model.get_submodule(smoothed.norm)
    with torch.no_grad():
        norm.weight /= smoothed.scales
        if norm.bias is not None:
            norm.bias /= smoothed.scales
        for name in smoothed.linears:
            _weight_of(model.get_submodule(name)).mul_(smoothed.scales)


def is_layer_norm(module: nn.Module) -> bool:
    """Whether ``module`` is torch's layer norm."""
    return isinstance(module, nn.LayerNorm)


def find_consumers(
    model: nn.Module, call: Call, is_norm: Callable[[nn.Module], bool] = is_layer_norm
) -> dict[str, tuple[str, ...]]:
    """For each norm that only linears (and attentions) read, their names."""
    watch = _NormWatch(model, is_norm)
    with watch, torch.no_grad(), no_fast_path():
        watch.returned(call(model))
    return watch.consumers()


class _NormWatch(TorchFunctionMode):
    """Sees every function called on a layer norm's result, and which layer calls it."""

    def __init__(self, model: nn.Module, is_norm: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_norm = is_norm
        self._names = {module: name for name, module in model.named_modules()}
        self._model = model
        self._results: dict[int, tuple[nn.Module, torch.Tensor]] = {}
        self._readers: dict[nn.Module, set[nn.Module]] = {}
        self._refused: set[nn.Module] = set()
        self._inside: list[nn.Module] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _NormWatch:
        for module in self._model.modules():
            if self._is_norm(module):
                self._handles.append(module.register_forward_hook(self._norm_done))
            elif isinstance(module, nn.Linear | nn.MultiheadAttention):
                self._handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave),
                ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def consumers(self) -> dict[str, tuple[str, ...]]:
        """Layer norms that can be smoothed, and what reads them."""
        owned = self._model.named_parameters(remove_duplicate=False)
        parameters = [id(x) for _, x in owned]  # of tables, too, to which heads are tied
        found = {}
        for norm, readers in self._readers.items():
            shared = any(parameters.count(id(m.weight)) > 1 for m in readers if _plain(m))
            if norm not in self._refused and norm.weight is not None and not shared:
                names = tuple(name for module, name in self._names.items() if module in readers)
                found[self._names[norm]] = names
        return found

    def _norm_done(self, module: nn.Module, _: Any, result: torch.Tensor) -> None:
        if any(norm is module for norm, _ in self._results.values()):
            self._refused.add(module)  # called twice: in another place it may have other readers
        self._results[id(result)] = (module, result)

    def returned(self, result: Any) -> None:
        """The model's own result, and what it keeps: their readers must not see another scale."""
        kept = pytree.tree_leaves([list(vars(module).values()) for module in self._names])
        for value in (*tensors_in(result), *kept):
            if id(value) in self._results:
                self._refused.add(self._results[id(value)][0])

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside.append(module)
        if isinstance(module, nn.MultiheadAttention):
            sequences = [*args, *(kwargs.get(k) for k in ("query", "key", "value"))]
            sequences = [x for x in sequences if x is not None][:3]
            if any(x is not sequences[0] for x in sequences):  # one weight meets several inputs
                seen = [self._results[id(x)] for x in sequences if id(x) in self._results]
                self._refused |= {norm for norm, _ in seen}

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._inside.pop()
        for norm, x in self._results.values():
            if result is x:
                self._refused.add(norm)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in _tensors([*args, *(kwargs or {}).values()]):
            seen = self._results.get(id(value))
            if seen is not None and func not in _HARMLESS:
                self._note(seen[0])
        return result

    def _note(self, norm: nn.Module) -> None:
        reader = self._inside[0] if self._inside else None
        if reader is None or not _reads_whole_rows(reader, norm):
            self._refused.add(norm)
        else:
            self._readers.setdefault(norm, set()).add(reader)


#: What may look at a tensor without computing with it.
_HARMLESS: tuple[Any, ...] = (
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.is_floating_point,
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_nested.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
)


def _plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def _reads_whole_rows(reader: nn.Module, norm: nn.Module) -> bool:
    """Whether ``reader`` is a layer whose weight has a column for each channel of ``norm``."""
    weight = norm._parameters.get("weight")
    width = [] if weight is None else list(weight.shape)
    if _plain(reader):
        return [reader.in_features] == width
    if type(reader) is nn.MultiheadAttention:
        return bool(reader._qkv_same_embed_dim) and [reader.embed_dim] == width
    return False


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _weight_of(layer: Any) -> torch.Tensor:
    """The weight [outputs, channels] that meets the norm's result."""
    attention = isinstance(layer, nn.MultiheadAttention)
    weight: torch.Tensor = layer.in_proj_weight if attention else layer.weight
    return weight.detach()


def _sample_rows(
    model: nn.Module, norms: list[str], sample: Sequence[Call]
) -> dict[str, torch.Tensor]:
    """Rows of each norm's result, spread over the sample, and never many."""
    rows: dict[str, torch.Tensor] = {}
    share = max(_ROWS // len(sample), 1)

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, result: torch.Tensor) -> None:
            flat = result.detach().flatten(0, -2)
            some = flat[:: max(len(flat) // share, 1)][:share]
            rows[name] = torch.cat([rows[name], some]) if name in rows else some.clone()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in norms]
    try:
        with torch.no_grad(), no_fast_path():
            for call in sample:
                call(model)
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _best_scales(
    rows: torch.Tensor, weight: torch.Tensor, per_token: bool, worth: float
) -> tuple[torch.Tensor, float, float] | None:
    """Scales [C], their alpha, and the share of the error left; None if they are not worth it."""
    largest, width = rows.abs().amax(0), weight.abs().amax(0)
    live = (largest > 0) & (width > 0)
    exact = F.linear(rows, weight)
    before = _error(rows, weight, exact, per_token)
    if before == 0 or int(live.sum()) < 2:
        return None
    best, least = None, before * worth
    for alpha in _ALPHAS:
        log = alpha * largest.clamp(min=1e-12).log() - (1 - alpha) * width.clamp(min=1e-12).log()
        scales = torch.where(live, log - log[live].mean(), torch.zeros_like(log)).exp()
        error = _error(rows / scales, weight * scales, exact, per_token)
        if error < least:
            best, least = (scales, alpha), error
    return None if best is None else (*best, least / before)


def _error(rows: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor, per_token: bool) -> float:
    """Mean squared error of the linear when both of its operands are rounded to int8."""
    rounded = _rounded(rows, 1) if per_token else _rounded(rows.reshape(1, -1), 1).view_as(rows)
    return float((F.linear(rounded, _rounded(weight, 1)) - exact).square().mean())


def _rounded(x: torch.Tensor, dim: int) -> torch.Tensor:
    step = (x.abs().amax(dim, keepdim=True) / 127).clamp(min=1e-30)
    return (x / step).round() * step
