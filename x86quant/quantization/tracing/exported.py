"""What torch.export sees, as the graph of layers and functions that stock quantization expects.

An exported graph is flat: aten ops on parameters. Ops on the parameters of one of torch's layers
become calls of that layer again, and other ops the functions that stock quantization knows by name.
What has no entry in the tables stays an aten op and runs in float.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.calling.flat_call import FlatCall
from x86quant.calling.op_watch import OpWatch
from x86quant.calling.wording import quiet
from x86quant.errors import UnsupportedError, first_line
from x86quant.forms.call_form import CallForm, Structure
from x86quant.forms.exported_guard import guard_of
from x86quant.forms.guard import Guard
from x86quant.lowering.from_export import exported_layer, flat
from x86quant.lowering.functional import functionalized
from x86quant.lowering.mutation import without_mutations
from x86quant.terminal.silence import silent

aten = torch.ops.aten

#: Ops that a layer stands for, and where among their arguments the layer's weight is.
_LAYERS: dict[Any, tuple[tuple[type[nn.Module], ...], int]] = {
    aten.conv1d.default: ((nn.Conv1d,), 1),
    aten.conv2d.default: ((nn.Conv2d,), 1),
    aten.conv3d.default: ((nn.Conv3d,), 1),
    aten.conv1d.padding: ((nn.Conv1d,), 1),
    aten.conv2d.padding: ((nn.Conv2d,), 1),
    aten.conv3d.padding: ((nn.Conv3d,), 1),
    aten.conv_transpose1d.default: ((nn.ConvTranspose1d,), 1),
    aten.conv_transpose2d.input: ((nn.ConvTranspose2d,), 1),
    aten.conv_transpose3d.input: ((nn.ConvTranspose3d,), 1),
    aten.linear.default: ((nn.Linear,), 1),
    aten.layer_norm.default: ((nn.LayerNorm,), 2),
    aten.embedding.default: ((nn.Embedding,), 0),
    aten._native_batch_norm_legit_no_training.default: (
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        1,
    ),
}

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
    aten.max_pool1d.default: F.max_pool1d,
    aten.max_pool2d.default: F.max_pool2d,
    aten.avg_pool2d.default: F.avg_pool2d,
    aten.adaptive_avg_pool1d.default: F.adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d.default: F.adaptive_avg_pool2d,
    aten.adaptive_avg_pool3d.default: F.adaptive_avg_pool3d,
    aten.flatten.using_ints: torch.flatten,
    aten.mean.dim: torch.mean,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.reshape.default: torch.reshape,
    aten.view.default: torch.reshape,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """What torch.export made: a graph, the structure of its result, and when it holds."""

    graph_module: GraphModule
    results: Structure
    guard: Guard


Sizes = Callable[[Sequence[torch.Tensor]], Any]


def from_export(module: nn.Module, form: CallForm, leaves: Sequence[torch.Tensor]) -> Exported:
    """``module`` as torch.export traces it, with its layers called by their paths.

    Sizes stay free where export can leave them so; what it has to assume is the guard.

    Raises:
        UnsupportedError: it cannot be exported; says why.
    """
    return _exported(module, form, leaves, (_every_size, _first_size, _no_size), _spell)


def ops_from_export(
    module: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    *,
    free: bool = True,
    sizes: Sizes | None = None,
) -> Exported:
    """``module`` as torch.export traces it: aten ops and ours, constants by their paths.

    If ``free``, batch and tokens stay free where export can leave them so, or what ``sizes`` says.

    Raises:
        UnsupportedError: it cannot be exported; says why.
    """
    tries = (_batch_and_tokens, _first_size) if free else (_no_size,)
    return _exported(module, form, leaves, (sizes,) if sizes else tries, None)


def _exported(
    module: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    tries: Sequence[Sizes],
    spell: Callable[[GraphModule, FlatCall], None] | None,
) -> Exported:
    example = _two_rows(leaves)
    reasons: list[str] = []
    if tries != (_no_size,) and _reads_values(module, form, example):
        # It fails in any way, or in none: so the way that takes least time tells.
        try:
            _program(FlatCall(module, form, hooks=False), example, _no_size)
        # Export wraps and raises nearly anything, among it errors of the model's own code.
        except Exception as error:
            raise UnsupportedError(f"nor can torch.export ({first_line(error)})") from error
    for sizes in tries:
        try:
            return _exported_once(module, form, leaves, sizes, spell)
        except UnsupportedError as error:
            reasons.append(str(error))
            if type(error.__cause__).__name__ == _DATA_DEPENDENT or reasons[-1] in reasons[:-1]:
                break  # it has nothing to do with which sizes are free
    raise UnsupportedError(f"nor can torch.export ({reasons[0]})")


def _exported_once(
    module: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    sizes: Sizes,
    spell: Callable[[GraphModule, FlatCall], None] | None,
) -> Exported:
    """``module`` as torch.export traces it with the free sizes ``sizes``.

    Raises:
        UnsupportedError: it cannot be exported; the cause is what torch.export raised.
    """
    example = _two_rows(leaves)
    flat_form = FlatCall(module, form, hooks=False)
    try:
        program = _program(flat_form, example, sizes)
        with silent(), quiet(), torch.no_grad(), _without_fake_cache():
            gm = None if spell is None else _rewritten(program, example)
            if gm is None:
                program = functionalized(program)
                gm = flat(program.module(check_guards=False))
        guard = guard_of(program, form.names, leaves, doubts_one=True)
        if len(guard.conditions) > _MOST_CONDITIONS:
            raise UnsupportedError(f"{len(guard.conditions)} conditions on sizes")
    # Export wraps and raises nearly anything, among it errors of the model's own code.
    except Exception as error:
        raise UnsupportedError(first_line(error)) from error
    if spell is not None:
        spell(gm, flat_form)
    _name_inputs(gm, form.names)
    return Exported(gm, flat_form.results, guard)


def _program(
    flat_form: FlatCall, example: Sequence[torch.Tensor], sizes: Sizes
) -> torch.export.ExportedProgram:
    dims = sizes(example)
    with silent(), quiet(), torch.no_grad(), _without_fake_cache():
        return torch.export.export(
            flat_form,
            tuple(example),
            dynamic_shapes=None if dims is None else {"tensors": dims},
            strict=False,
        )


def _without_fake_cache() -> contextlib.AbstractContextManager[None]:
    """Fake tensors worked out anew for each op.

    Free sizes make an entry of torch's cache dearer than the answer it holds: a fifth of the time.
    """
    import torch._dynamo.config  # not at the top: it takes half a second, and few models need it

    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # type: ignore[no-any-return]


class _ReadsMode(OpWatch):
    """Notes whether the value of a tensor was read: by bool(), float() or item(), say."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = False

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and note whether it reads."""
        self.reads = self.reads or func is aten._local_scalar_dense.default
        return func(*args, **kwargs)


def _reads_values(module: nn.Module, form: CallForm, example: Sequence[torch.Tensor]) -> bool:
    """Whether ``module`` computes with values that only its inputs tell."""
    args, kwargs = form.call([x.clone() for x in example])
    mode = _ReadsMode()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), mode:
            module(*args, **kwargs)
    except Exception:  # it may not take two rows; export says so
        return False
    return mode.reads


def _rewritten(
    program: torch.export.ExportedProgram, example: Sequence[torch.Tensor]
) -> GraphModule | None:
    """The graph of ``program`` without writes in place, as :mod:`x86quant.lowering.mutation` does
    it; None if it cannot.

    torch's own way traces all of it again, which takes longer than the export itself.
    """
    if not all(map(_is_simple, program.graph.nodes)):
        return None
    gm = flat(program.module(check_guards=False))
    try:
        return without_mutations(gm, example)
    except UnsupportedError:
        return None


def _is_simple(node: Node) -> bool:
    """Whether ``node`` computes on its arguments: it calls no graphs, and updates no statistics."""
    target = node.target
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") in ("_operator", "math", "torch")
    switches = (True in node.args[5:6]) if target is aten.batch_norm.default else ()
    if target is aten.instance_norm.default:
        return node.args[3] is None and node.args[4] is None
    return not switches


def _two_rows(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The example with at least two rows: a single one would be taken for a constant."""
    if all(x.dim() and x.shape[0] == 1 for x in leaves):
        return [torch.cat([x, x]) for x in leaves]
    return list(leaves)


def _every_size(leaves: Sequence[torch.Tensor]) -> Any:
    return tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in leaves)


def _first_size(leaves: Sequence[torch.Tensor]) -> Any:
    return tuple({0: torch.export.Dim.AUTO} if x.dim() else {} for x in leaves)


def _no_size(_: Sequence[torch.Tensor]) -> Any:
    return None


def _batch_and_tokens(leaves: Sequence[torch.Tensor]) -> Any:
    """All sizes of ids and masks, two of rows of floats; of images, only how many there are."""

    def free(x: torch.Tensor) -> int:
        if not x.is_floating_point():
            return x.dim()
        return 2 if x.dim() == 3 else 1

    return tuple(dict.fromkeys(range(min(x.dim(), free(x))), torch.export.Dim.AUTO) for x in leaves)


#: What torch.export raises where the code depends on values: no choice of free sizes mends that.
_DATA_DEPENDENT = "GuardOnDataDependentSymNode"


#: With more than these, an export with fewer free sizes is the better one.
_MOST_CONDITIONS = 64


def _name_inputs(gm: GraphModule, names: Sequence[str]) -> None:
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, name in zip(inputs, names, strict=True):
        node.target = name
        node._rename(name)
    gm.recompile()


def _spell(gm: GraphModule, flat_form: FlatCall) -> None:
    """Call layers by their paths in the module, and functions as stock quantization knows them."""
    for node in list(gm.graph.nodes):
        _convert(gm, flat_form, node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _convert(gm: GraphModule, model: nn.Module, node: Node) -> None:
    if node.op != "call_function":
        return
    node.meta["scope"] = exported_layer(node).removeprefix("inner").removeprefix(".")
    if node.target in _LAYERS and (path := _layer(model, node)):
        _call_layer(gm, model, node, path)
    else:
        spelled_as_function(node)


def spelled_as_function(node: Node) -> None:
    """Let ``node``, a call of an aten op, call the function that stock quantization knows."""
    if node.target is aten.dropout.default:  # in evaluation mode
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    elif node.target is aten.sym_size.int:
        node.op, node.target = "call_method", "size"
    elif node.target in _FUNCTIONS:
        node.target = _FUNCTIONS[node.target]


def _layer(model: nn.Module, node: Node) -> str | None:
    """The path of the layer of torch's own whose call this is, with all of its arguments."""
    kinds, position = _LAYERS[node.target]
    weight = node.args[position] if len(node.args) > position else None
    if not isinstance(weight, Node) or weight.op != "get_attr":
        return None
    path, _, name = str(weight.target).rpartition(".")
    layer = model.get_submodule(path)
    if name != "weight" or type(layer) not in kinds or len(layer._parameters) > 2:
        return None
    expected = _arguments_of(layer, path)
    given = [_plain(x) for x in node.args]
    given += [_plain(x) for x in _defaults(node)[len(given) :]]
    return (
        path
        if all(a == b for a, b in zip(given, expected, strict=False) if b is not _ANY)
        else None
    )


#: An argument that may be anything.
_ANY = object()


def _arguments_of(layer: Any, path: str) -> list[Any]:
    """How the op of ``layer`` is called: constants, and parameters by their paths."""

    def own(name: str) -> str | None:
        return None if getattr(layer, name) is None else f"{path}.{name}"

    if isinstance(layer, nn.Linear):
        return [_ANY, own("weight"), own("bias")]
    if isinstance(layer, nn.Embedding):
        return [own("weight"), _ANY]
    if isinstance(layer, nn.LayerNorm):
        return [_ANY, list(layer.normalized_shape), own("weight"), own("bias"), layer.eps]
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        names = ("weight", "bias", "running_mean", "running_var")
        return [_ANY, *map(own, names), _ANY, layer.eps]
    if layer.padding_mode != "zeros":
        return [None]  # it is more than the op
    padding = layer.padding if isinstance(layer.padding, str) else list(layer.padding)
    sizes = [_ANY, own("weight"), own("bias"), list(layer.stride), padding]
    if layer.transposed:
        return [*sizes, list(layer.output_padding), layer.groups, list(layer.dilation)]
    return [*sizes, list(layer.dilation), layer.groups]


def _plain(value: Any) -> Any:
    if isinstance(value, Node):
        return str(value.target) if value.op == "get_attr" else value
    return list(value) if isinstance(value, tuple | list) else value


def _defaults(node: Node) -> list[Any]:
    """The default of every argument of the op, sizes as long as the op's are."""
    target: Any = node.target
    arguments = target._schema.arguments
    length = next((n for n in (1, 2) if f"{n}d" in target.name()), 3)
    found = []
    for argument in arguments:
        value = argument.default_value
        if isinstance(value, list) and len(value) == 1:
            value = value * length
        found.append(value)
    return found


def _call_layer(gm: GraphModule, model: nn.Module, node: Node, path: str) -> None:
    layer = model.get_submodule(path)
    path = path.removeprefix("inner.")
    parent, _, name = path.rpartition(".")
    holder: nn.Module = gm
    for part in filter(None, parent.split(".")):
        if not hasattr(holder, part):
            setattr(holder, part, nn.Module())
        holder = getattr(holder, part)
    setattr(holder, name, layer)
    is_embedding = node.target is aten.embedding.default
    with gm.graph.inserting_before(node):
        call = gm.graph.call_module(path, (node.args[1 if is_embedding else 0],))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    if node.target is aten._native_batch_norm_legit_no_training.default:
        for user in list(call.users):  # the op returns a tuple, the layer its first
            user.replace_all_uses_with(call)
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
