"""Aten ops as the layers and functions that stock quantization expects.

What ``torch.export`` makes is flat: aten ops on parameters. Where such an op is the whole of one of
torch's layers, a layer with these parameters stands in its place again, at the path of its weight:
everything that is known about layers, from folding batch norms to names in reports, holds then.
Other ops become the functions that stock quantization knows by name; what has no entry in the
tables stays an aten op and runs in float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import constant, given_by_name

aten = torch.ops.aten

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    # of weights that are not a layer's
    aten.conv1d.default: F.conv1d,
    aten.conv2d.default: F.conv2d,
    aten.conv3d.default: F.conv3d,
    aten.linear.default: F.linear,
    aten.relu.default: F.relu,
    aten.relu6.default: F.relu6,
    aten.hardtanh.default: F.hardtanh,
    aten.leaky_relu.default: F.leaky_relu,
    aten.elu.default: F.elu,
    aten.hardswish.default: F.hardswish,
    aten.hardsigmoid.default: F.hardsigmoid,
    aten.silu.default: F.silu,
    aten.gelu.default: F.gelu,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.softmax.int: F.softmax,
    aten.clamp.default: torch.clamp,
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.matmul.default: torch.matmul,
    aten.cat.default: torch.cat,
    aten.pad.default: F.pad,
    aten.max_pool1d.default: F.max_pool1d,
    aten.max_pool2d.default: F.max_pool2d,
    aten.avg_pool2d.default: F.avg_pool2d,
    aten.adaptive_avg_pool1d.default: F.adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d.default: F.adaptive_avg_pool2d,
    aten.adaptive_avg_pool3d.default: F.adaptive_avg_pool3d,
    aten.flatten.using_ints: torch.flatten,
    aten.group_norm.default: F.group_norm,
    aten.mean.dim: torch.mean,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.reshape.default: torch.reshape,
    aten.view.default: torch.reshape,
    aten.chunk.default: torch.chunk,
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split,
    aten.unbind.int: torch.unbind,
}

#: Arguments that ``F.interpolate`` takes otherwise: its mode, and where sizes and factors stand.
_UPSAMPLING: dict[Any, str] = {
    aten.upsample_nearest1d.vec: "nearest",
    aten.upsample_nearest2d.vec: "nearest",
    aten.upsample_nearest3d.vec: "nearest",
    aten.upsample_bilinear2d.vec: "bilinear",
}


def spell(gm: GraphModule, node: Node, prefix: str = "") -> None:
    """Let ``node`` call a layer or a function that stock quantization knows, if it can.

    A layer stands at the path of its weight without ``prefix``.
    """
    if not _as_layer(gm, node, prefix):
        _as_function(node)


def _as_layer(gm: GraphModule, node: Node, prefix: str) -> bool:
    """Call a layer in place of ``node``, if it is all that a layer does."""
    entry = _LAYERS.get(node.target)
    if entry is None or node.kwargs:
        return False
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given: dict[str, Any] = {a.name: a.default_value for a in schema}
    given |= {a.name: value for a, value in zip(schema, node.args, strict=False)}
    weight = given["weight"]
    if not isinstance(weight, Node) or weight.op != "get_attr":
        return False
    path, _, name = str(weight.target).rpartition(".")
    place = path.removeprefix(prefix)
    if not path or f"{path}." == prefix or name != "weight":
        return False
    tensors = {name: given[name] for name in _TENSORS if isinstance(given.get(name), Node)}
    if any(x.op != "get_attr" or str(x.target) != f"{path}.{n}" for n, x in tensors.items()):
        return False
    home = gm.get_submodule(path)
    layer = entry(home.weight, given)
    if layer is None or not _put(gm, place, home, layer):
        return False
    with gm.graph.inserting_before(node):
        call = gm.graph.call_module(place, (given["indices" if "indices" in given else "input"],))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    if node.target in _OF_SEVERAL:
        for user in list(call.users):  # the op returns a tuple, the layer its first
            user.replace_all_uses_with(call)
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return True


_TENSORS = ("weight", "bias", "running_mean", "running_var")


def spell_batch_norms(gm: GraphModule, source: nn.Module) -> None:
    """Call torch's layer where ``F.batch_norm`` is called on the tensors of a module of ``source``.

    So do subclasses whose ``forward`` has more in it, an activation say.
    """
    for node in gm.graph.find_nodes(op="call_function", target=F.batch_norm):
        given = given_by_name(node, _BATCH_NORM_ARGUMENTS)
        path = _home_of({name: given.get(name) for name in _TENSORS})
        if path is None or given.get("training"):
            continue
        kind = _batch_norm_kind(source.get_submodule(path), gm, given["input"])
        home: Any = gm.get_submodule(path)
        if kind is None:
            continue
        layer: Any = kind(len(home.running_mean), eps=given.get("eps", 1e-5), affine=False).eval()
        for name in _TENSORS:
            group = layer._buffers if name.startswith("running") else layer._parameters
            group[name] = None if given.get(name) is None else getattr(home, name)
        layer.affine = layer.weight is not None
        before = getattr(home, _NORM, layer)  # of another call of it
        if repr(before) != repr(layer):
            continue
        setattr(home, _NORM, before)
        with gm.graph.inserting_before(node):
            call = gm.graph.call_module(f"{path}.{_NORM}", (given["input"],))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)


def spell_convolutions(gm: GraphModule, source: nn.Module) -> None:
    """Call torch's layer where the code of one of its convolutions calls the function.

    So do subclasses of ``source`` that pad the input or compute their weight, which is a constant
    by now. What a function computes outside of such a module stays a function.
    """
    for node in list(gm.graph.nodes):
        kind = _FUNCTIONAL.get(node.target) if node.op == "call_function" else None
        scope = node.meta.get("scope")
        if kind is None or not scope or node.kwargs.keys() & {"input", "weight"}:
            continue
        given = given_by_name(node, _CONV_ARGUMENTS)
        weight, bias = constant(gm, given["weight"]), constant(gm, given.get("bias"))
        if not isinstance(_found(source, scope), kind) or weight is None:
            continue
        if (bias is None) != (given.get("bias") is None) or bool(_read_within(gm, scope, node)):
            continue
        defaults: dict[str, Any] = {"stride": (1,), "padding": (0,), "dilation": (1,), "groups": 1}
        wanted = {name: given.get(name, value) for name, value in defaults.items()}
        sizes = {
            name: value if isinstance(value, tuple | list | str) else (value,)
            for name, value in wanted.items()
            if name != "groups"
        }
        layer: Any = _conv(kind)(weight, {"bias": bias, "groups": wanted["groups"], **sizes})
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        _at(gm, scope)
        _move_out(gm, scope)
        gm.set_submodule(scope, layer.eval())
        node.op, node.target, node.args, node.kwargs = "call_module", scope, (given["input"],), {}
    gm.graph.eliminate_dead_code()


_FUNCTIONAL: dict[Any, type[nn.Module]] = {
    F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d
}  # fmt: skip
_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _found(source: nn.Module, path: str) -> nn.Module | None:
    try:
        return source.get_submodule(path)
    except AttributeError:
        return None


def _read_within(gm: GraphModule, scope: str, call: Node) -> list[Node]:
    """What is read of the module at ``scope`` besides what ``call`` reads."""
    return [
        node
        for node in gm.graph.nodes
        if node.op in ("get_attr", "call_module")
        and f"{node.target}.".startswith(f"{scope}.")
        and set(node.users) - {call}
    ]


def _move_out(gm: GraphModule, scope: str) -> None:
    """Give modules that are called within the one at ``scope``, to pad say, places elsewhere."""
    for node in gm.graph.find_nodes(op="call_module"):
        if node.target.startswith(f"{scope}."):
            place = node.target.replace(".", "_")
            while hasattr(gm, place):
                place += "_"
            gm.add_submodule(place, gm.get_submodule(node.target))
            node.target = place


_BATCH_NORM_ARGUMENTS = (
    "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
)  # fmt: skip
#: What the layer is called within the module whose tensors it has.
_NORM = "batch_norm"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (
    (nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d),
    (nn.Conv3d, nn.ConvTranspose3d),
)  # fmt: skip


def _home_of(tensors: dict[str, Any]) -> str | None:
    """The path of the module whose ``tensors`` these are, by their own names, all that it has."""
    homes = set()
    for name, node in tensors.items():
        if node is None:
            continue
        if not isinstance(node, Node) or node.op != "get_attr":
            return None
        home, _, own = str(node.target).rpartition(".")
        if own != name:
            return None
        homes.add(home)
    known = tensors["running_mean"] is not None and tensors["running_var"] is not None
    return homes.pop() if known and len(homes) == 1 and homes != {""} else None


def _batch_norm_kind(module: nn.Module, gm: GraphModule, x: Any) -> Any:
    """Torch's layer for the tensors of ``module``: its own base, or as the convolution before."""
    for kind, convolutions in zip(_BATCH_NORMS, _CONVOLUTIONS, strict=True):
        before = isinstance(x, Node) and x.op == "call_module"
        if isinstance(module, kind) or (
            before and isinstance(gm.get_submodule(str(x.target)), convolutions)
        ):
            return kind
    return None


def _put(gm: GraphModule, place: str, home: nn.Module, layer: nn.Module) -> bool:
    """Let ``layer`` stand at ``place`` with the tensors of ``home``; False if another one does."""
    before = _at(gm, place)
    if type(before) is not nn.Module:
        return type(before) is type(layer) and repr(before) == repr(layer)
    if before._modules or home._modules:
        return False
    for group in ("_parameters", "_buffers"):
        mine, its = getattr(layer, group), getattr(home, group)
        if {n for n, x in mine.items() if x is not None} - its.keys():
            return False
    for group in ("_parameters", "_buffers"):
        getattr(layer, group).update(getattr(home, group))
    gm.set_submodule(place, layer.eval())
    return True


def _at(gm: GraphModule, place: str) -> nn.Module:
    """What stands at ``place``; a new module if nothing does."""
    found: nn.Module = gm
    for name in place.split("."):
        if name not in found._modules:
            found.add_module(name, nn.Module())
        found = found.get_submodule(name)
    return found


def _conv(kind: type[nn.Module]) -> Callable[..., nn.Module | None]:
    def build(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module | None:
        rank, groups = weight.dim() - 2, given["groups"]
        transposed = "output_padding" in given
        channels = (weight.shape[0], weight.shape[1] * groups)
        names = ("stride", "padding", "dilation", *(["output_padding"] if transposed else []))
        sizes = {name: _sizes(given[name], rank) for name in names}
        make: Any = kind
        return make(  # type: ignore[no-any-return]
            *(channels if transposed else (weight.shape[1] * groups, weight.shape[0])),
            tuple(weight.shape[2:]),
            groups=groups,
            bias=given["bias"] is not None,
            device="meta",
            **sizes,
        )

    return build


def _sizes(value: Any, rank: int) -> tuple[int, ...] | str:
    if isinstance(value, str):  # "same" or "valid"
        return value
    found = tuple(value)
    return found * rank if len(found) == 1 else found


def _linear(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module:
    bias = given["bias"] is not None
    return nn.Linear(weight.shape[1], weight.shape[0], bias=bias, device="meta")


def _layer_norm(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module:
    bias = given["bias"] is not None
    return nn.LayerNorm(given["normalized_shape"], given["eps"], bias=bias, device="meta")


def _embedding(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module | None:
    if given["scale_grad_by_freq"] or given["sparse"]:
        return None
    return nn.Embedding(weight.shape[0], weight.shape[1], device="meta")


def _batch_norm(weight: torch.Tensor, given: dict[str, Any]) -> nn.Module | None:
    value = given["input"].meta.get("val")
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(
        value.dim() if isinstance(value, torch.Tensor) else 0
    )
    if given.get("training") or kind is None or given["running_mean"] is None:
        return None
    return kind(len(weight), eps=given["eps"], device="meta")


_LAYERS: dict[Any, Callable[..., nn.Module | None]] = {
    aten.conv1d.default: _conv(nn.Conv1d),
    aten.conv2d.default: _conv(nn.Conv2d),
    aten.conv3d.default: _conv(nn.Conv3d),
    aten.conv1d.padding: _conv(nn.Conv1d),
    aten.conv2d.padding: _conv(nn.Conv2d),
    aten.conv3d.padding: _conv(nn.Conv3d),
    aten.conv_transpose1d.default: _conv(nn.ConvTranspose1d),
    aten.conv_transpose2d.input: _conv(nn.ConvTranspose2d),
    aten.conv_transpose3d.input: _conv(nn.ConvTranspose3d),
    aten.linear.default: _linear,
    aten.layer_norm.default: _layer_norm,
    aten.embedding.default: _embedding,
    aten.batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
}
#: Those of them that return a tuple.
_OF_SEVERAL = (aten._native_batch_norm_legit_no_training.default,)


#: What does nothing in evaluation mode, by its third argument.
_DROPOUTS = (
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_dropout.default,
    aten.feature_dropout_.default,
    aten.alpha_dropout.default,
    aten.alpha_dropout_.default,
    aten.feature_alpha_dropout.default,
    aten.feature_alpha_dropout_.default,
)


def _as_function(node: Node) -> None:
    """Let ``node``, a call of an aten op, call the function that stock quantization knows."""
    if node.target in _DROPOUTS and node.args[2] is False:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)  # to torch.fx, what draws or writes is no dead code
    elif node.target is aten.sym_size.int:
        node.op, node.target = "call_method", "size"
    elif node.target in _UPSAMPLING:
        x, size, *more = node.args  # then aligned corners, where it has them, and factors
        mode, factor = _UPSAMPLING[node.target], more[-1]
        node.target, node.args = F.interpolate, (x, size, factor, mode, *more[:-1])
    elif node.target in _FUNCTIONS and _as_function_takes(node):
        node.target = _FUNCTIONS[node.target]


#: How many arguments of an op the function for it takes, and what a further one is called there.
_TAKEN: dict[Any, tuple[int, str | None]] = {
    aten.group_norm.default: (5, None),  # further, whether CUDA's library is to be used
    aten.softmax.int: (2, "dtype"),
}


def _as_function_takes(node: Node) -> bool:
    """Give ``node`` the arguments of the function for its op; says whether that can be."""
    if node.target is aten.elu.default:
        return len(node.args) <= 2  # with a scale as well it is another function
    taken, name = _TAKEN.get(node.target, (None, None))
    if taken is not None and len(node.args) > taken:
        if name is not None:
            node.kwargs = {**node.kwargs, name: node.args[taken]}
        node.args = node.args[:taken]
    return True
