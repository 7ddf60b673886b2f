"""A module as a flat graph by torch.export, with as free sizes as can be, and what it holds for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as symbolic_config
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from x86quant.calling.running import OpWatch
from x86quant.calling.wording import quiet
from x86quant.capture.lengths import free_length, lengths_by
from x86quant.capture.traced_graph import Traced
from x86quant.errors import UnsupportedError, first_line
from x86quant.forms.call_form import CallForm, Structure, take_apart
from x86quant.forms.guard import guard_of
from x86quant.lowering.from_export import flat, functionalized, take_parts_of_constants
from x86quant.lowering.mutation import without_mutations
from x86quant.lowering.row_passes.one_spelling import SPELLED
from x86quant.terminal.silence import silent

aten = torch.ops.aten

#: From an example, which of its sizes are to be free.
Sizes = Callable[[Sequence[torch.Tensor]], Any]
#: Rewrites a graph in other words.
Spell = Callable[[GraphModule], None]


def ops_from_export(
    module: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    *,
    free: bool = True,
    sizes: Sizes | None = None,
) -> Traced:
    """``module`` as torch.export traces it: aten ops and ours, constants by their paths.

    If ``free``, batch and tokens stay free where export can leave them so, or what ``sizes`` says.

    Raises:
        UnsupportedError: it cannot be exported; says why.
    """
    tries = (_batch_and_tokens, first_size) if free else (no_size,)
    return exported(module, form, leaves, (sizes,) if sizes else tries)


def exported(
    module: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    tries: Sequence[Sizes],
    spell: Spell | None = None,
) -> Traced:
    """``module`` as torch.export traces it with the first of ``tries`` that can be.

    Raises:
        UnsupportedError: it cannot be exported; says why.
    """
    example = two_rows(leaves)
    reasons: list[str] = []
    if tries != (no_size,) and _reads_values(module, form, example):
        # It fails in any way, or in none: so the way that takes least time tells.
        try:
            _program(FlatCall(module, form, hooks=False), example, no_size)
        # Export wraps and raises nearly anything, among it errors of the model's own code.
        except Exception as error:
            raise UnsupportedError(f"nor can torch.export ({_told(error)})") from error
    for sizes in tries:
        try:
            return exported_once(module, form, leaves, sizes, spell)
        except UnsupportedError as error:
            reasons.append(str(error))
            if type(error.__cause__).__name__ == _DATA_DEPENDENT or reasons[-1] in reasons[:-1]:
                break  # it has nothing to do with which sizes are free
    raise UnsupportedError(f"nor can torch.export ({reasons[0]})")


def _told(error: Exception) -> str:
    """What ``error`` says, in words where torch speaks of its own symbols."""
    if type(error).__name__ == _DATA_DEPENDENT:
        return "its code goes one way or another by what is computed"
    return first_line(error)


def exported_once(
    module: nn.Module,
    form: CallForm,
    leaves: Sequence[torch.Tensor],
    sizes: Sizes,
    spell: Spell | None = None,
    *,
    whole: bool = False,
) -> Traced:
    """``module`` as torch.export traces it with the free sizes ``sizes``.

    A graph of the ``whole`` of a model has the model's hooks in it, and takes one and zero for
    sizes like others: no branch for them is taken unseen. Other graphs with
    free sizes are of two rows at least, and hold for a single row or column where the proof has
    seen one.

    Raises:
        UnsupportedError: it cannot be exported; the cause is what torch.export raised.
    """
    example = leaves if whole or sizes is no_size else two_rows(leaves)
    flat_form = FlatCall(module, form, hooks=whole)
    try:
        with symbolic_config.patch(backed_size_oblivious=whole):  # type: ignore[attr-defined]
            program = _program(flat_form, example, sizes)
            with silent(), quiet(), torch.no_grad(), without_fake_cache():
                gm = None if whole else _rewritten(program, example, spelled=spell is not None)
                if gm is None:
                    program = functionalized(program)
                    gm = flat(program.module(check_guards=False))
                    _check_pure(program)
                take_parts_of_constants(gm)
        guard = guard_of(program, form.names, leaves, doubts_one=not whole)
        if len(guard.conditions) > _MOST_CONDITIONS:
            raise UnsupportedError(f"{len(guard.conditions)} conditions on sizes")
    # Export wraps and raises nearly anything, among it errors of the model's own code.
    except Exception as error:
        raise UnsupportedError(_told(error)) from error
    if spell is not None:
        spell(gm)
    _name_inputs(gm, form.names)
    return Traced(gm, form, flat_form.results, guard, "torch.export")


def _check_pure(program: torch.export.ExportedProgram) -> None:
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        raise UnsupportedError(f"a call changes {', '.join(changed)}")


def _program(
    flat_form: FlatCall, example: Sequence[torch.Tensor], sizes: Sizes
) -> torch.export.ExportedProgram:
    dims = sizes(example)
    with silent(), quiet(), torch.no_grad(), without_fake_cache():
        return torch.export.export(
            flat_form,
            tuple(example),
            dynamic_shapes=None if dims is None else {"tensors": dims},
            strict=False,
        )


def without_fake_cache() -> contextlib.AbstractContextManager[None]:
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
    program: torch.export.ExportedProgram, example: Sequence[torch.Tensor], *, spelled: bool
) -> GraphModule | None:
    """The graph of ``program`` without writes in place, as :mod:`x86quant.lowering.mutation` does
    it; None if it cannot, or if it is not to be ``spelled`` as layers and has a word that the
    passes on rows do not know.

    torch's own way traces all of it again, which takes longer than the export itself.
    """
    if not all(map(_is_simple, program.graph.nodes)):
        return None
    gm = flat(program.module(check_guards=False))
    if not spelled:
        _write_elsewhere(gm)
        if not all(map(_is_known, gm.graph.nodes)):
            return None
    try:
        return without_mutations(gm, example)
    except UnsupportedError:
        return None


def _write_elsewhere(gm: GraphModule) -> None:
    """Let ops that write over what another op has just made make something new instead.

    That is the same where nothing else is a view of that: ``scores += bias``, say.
    """
    for node in gm.graph.nodes:
        functional = _functional(node.target)
        source = node.args[0] if node.args else None
        if functional is None or not isinstance(source, Node) or not _is_fresh(source):
            continue
        others = [user for user in source.users if user is not node]
        seen = any(_shares(user.target) or user > node for user in others)
        if not seen and _type_of(functional, node) is node.meta["val"].dtype:
            node.target = functional
    gm.recompile()


def _type_of(op: torch._ops.OpOverload, node: Node) -> torch.dtype:
    """The type of what ``op`` makes of the arguments of ``node``: comparisons, say, make bools."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    made: torch.Tensor = op(*args, **kwargs)
    return made.dtype


def _functional(op: Any) -> torch._ops.OpOverload | None:
    """What computes as ``op`` does, which writes over its first argument alone."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable or op in SPELLED:
        return None
    name = op._schema.name.removeprefix("aten::")
    written = [x.is_write for x in op._schema.arguments]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    found = getattr(packet, op._overloadname, None)
    return found if sum(written) == 1 and written[0] and not _shares(found) else None


def _is_fresh(node: Node) -> bool:
    """Whether ``node`` makes memory of its own."""
    return isinstance(node.target, torch._ops.OpOverload) and not _shares(node.target)


def _shares(op: Any) -> bool:
    """Whether results of ``op`` are views of its arguments, or those themselves."""
    if not isinstance(op, torch._ops.OpOverload):
        return True  # as far as is known
    return any(x.alias_info is not None for x in op._schema.returns)


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


def _is_known(node: Node) -> bool:
    """Whether torch would leave ``node`` as it is, or the passes on rows spell it as torch does."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return True
    if op in SPELLED:
        return op is not aten.dropout.default or node.args[2:] == (False,)
    return not op._schema.is_mutable and not (_shares(op) and _is_composite(op))


def _is_composite(op: torch._ops.OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(str(op.name()), key)  # type: ignore[no-untyped-call]


def two_rows(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The example with at least two rows: a single one would be taken for a constant."""
    if all(x.dim() and x.shape[0] == 1 for x in leaves):
        return [torch.cat([x, x]) for x in leaves]
    return list(leaves)


def every_size(leaves: Sequence[torch.Tensor]) -> Any:
    """All sizes."""
    return tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in leaves)


def first_size(leaves: Sequence[torch.Tensor]) -> Any:
    """The number of rows."""
    return tuple({0: torch.export.Dim.AUTO} if x.dim() else {} for x in leaves)


def no_size(_: Sequence[torch.Tensor]) -> Any:
    """None."""
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


#: A formula for a size may have so many terms. Convolutions, pools and joins stay below twenty.
_MOST_TERMS = 64
#: So many tensors may be computed. Deep transformers stay below three thousand.
_MOST_TENSORS = 10_000
#: What makes as many tensors as a dimension has places.
_TAKE_APART = (torch.Tensor.__iter__, torch.Tensor.unbind, torch.unbind)
#: torch's recurrent layers as functions, which export takes apart into their steps.
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
#: So many steps may be taken: each takes as long to trace as a whole layer of a transformer.
_MOST_STEPS = 100


class TraceLimits(TorchFunctionMode):
    """A block in which a model is exported; raises where that takes longer than anybody waits.

    With free sizes torch works with formulas, and asks sympy to simplify them at each op. Padding
    to a multiple of a window and cutting windows out, layer upon layer, makes formulas with which
    a single op takes minutes, and then all memory: such sizes have to be fixed. And a loop over
    every value of a tensor is unrolled, at milliseconds a step, and so is a recurrent layer, at
    tens of them.

    Raises:
        UnsupportedError: at the op that goes beyond a limit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors = 0
        self._steps = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TAKE_APART:  # which by itself takes minutes
            self._count(_length(*args, **(kwargs or {})))
        if func in _RECURRENT:
            self._count_steps(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._count(len(tensors))
        check_sizes(tensors)
        return result

    def _count(self, tensors: int) -> None:
        self._tensors += tensors
        if self._tensors > _MOST_TENSORS:
            raise UnsupportedError(
                f"it computes more than {_MOST_TENSORS} tensors: a loop over values, say"
            )

    def _count_steps(self, input: torch.Tensor, given: Any, *layer: Any) -> None:
        """Count the steps of a call of a recurrent layer, whose settings end ``layer``."""
        if isinstance(given, torch.Tensor) and given.dim() == 1:  # packed: rows at each step
            *_, layers, _, _, bidirectional = layer
            steps = _length(given)
        else:
            *_, layers, _, _, bidirectional, batch_first = layer
            steps = _length(input, 1 if batch_first else 0)
        self._steps += steps * layers * (2 if bidirectional else 1)
        if self._steps > _MOST_STEPS:
            raise UnsupportedError(
                f"a recurrent layer in float would be unrolled into more than {_MOST_STEPS} steps"
            )


def _length(input: torch.Tensor, dim: int = 0) -> int:
    """How many places there are along ``dim`` in the example."""
    size = input.shape[dim] if input.dim() else 0
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size


def check_sizes(tensors: Iterable[torch.Tensor]) -> None:
    """Raise UnsupportedError if a size is a formula with which work takes minutes."""
    if any(_is_involved(size) for x in tensors for size in x.shape):
        raise UnsupportedError(
            "its sizes become formulas too involved to trace with sizes left free"
        )


def _is_involved(size: Any) -> bool:
    if not isinstance(size, torch.SymInt):
        return False
    waiting = [getattr(size.node, "expr", None)]
    terms = 0
    while waiting and terms <= _MOST_TERMS:
        terms += 1
        waiting += getattr(waiting.pop(), "args", ())
    return terms > _MOST_TERMS


class _Kept:
    """Keeps what torch.export would undo, were it an attribute of the module or in a list of it."""

    results: Structure | None = None


class FlatCall(nn.Module):
    """Takes the tensors of a call one by one, and returns those of the result.

    Attributes:
        inner: the module that is called.
        results: the structure of its result, once it was called.
    """

    def __init__(self, module: nn.Module, form: CallForm, *, hooks: bool) -> None:
        super().__init__()
        self.inner = module
        self._form = form
        self._hooks = hooks
        self._kept = _Kept()

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """The module's result, after its hooks if they count."""
        args, kwargs = self._form.call(tensors)
        with TraceLimits(), lengths_by(self.inner, free_length):
            found = (self.inner if self._hooks else self.inner.forward)(*args, **kwargs)
        structure, leaves = take_apart(found, _is_leaf)
        self._kept.results = structure
        return tuple(leaves)

    @property
    def results(self) -> Structure:
        """The structure of the result of the last call."""
        assert self._kept.results is not None
        return self._kept.results


def _is_leaf(value: object) -> bool:
    """Whether ``value`` is a tensor, or a size that is not fixed."""
    return isinstance(value, torch.Tensor | torch.SymInt)
