"""A user's module with int8 layers in it: all its tensors, and what stands where; not its code.

The caller of ``load`` passes a module of the same class, the skeleton, or transformers makes one.
Every module of the skeleton must be there by path and class, and every tensor by name and shape;
what quantization put in is put in again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from x86quant.artifacts.file.content import Content
from x86quant.artifacts.file.stored_tensors import TensorReader, TensorWriter
from x86quant.artifacts.file.values import check_keys, decode, encode, typed
from x86quant.artifacts.records import transformers_models
from x86quant.artifacts.records.guarded_form import Write, read_token_step, write_token_step
from x86quant.artifacts.records.modules import hooks_within
from x86quant.calling.baking import as_written, bake, computes_weights
from x86quant.calling.state import with_shared_tensors
from x86quant.compiled import GuardedModule
from x86quant.compiled.baked import TORCHS_OWN, Baked
from x86quant.compiled.block_graphs import (
    BlockGraphs,
    blocks_of,
    give_token_step,
    token_step_of,
)
from x86quant.compiled.guarded import GuardedGraph
from x86quant.compiled.token_step import TokenStep
from x86quant.compiled.watch import is_known_hook
from x86quant.dynamic import note_in_config
from x86quant.dynamic.convert import adapt_containers
from x86quant.dynamic.experts import open_experts
from x86quant.dynamic.layers import Int8Sequential, carry_attributes
from x86quant.errors import ArtifactError, ExtensionError
from x86quant.module_copy import HOOKS

_ENTRIES = {
    "class", "config", "classes", "hooks", "replaced", "tensors", "graphs", "values", "tokens"
}  # fmt: skip


def write_tree(
    model: nn.Module,
    tensors: TensorWriter,
    write: Write,
    is_replaced: Callable[[nn.Module], bool],
) -> dict[str, Any]:
    """``model`` as JSON; ``write`` gives the records of what quantization put into it."""
    classes: dict[str, str] = {}
    hooks: dict[str, int] = {}
    replaced: dict[nn.Module, list[str]] = {}
    state: dict[str, str] = {}
    graphs: list[Any] = []
    values: dict[str, dict[str, Any]] = {}

    def visit(path: str, module: nn.Module) -> None:
        if count := _hooks(module):
            hooks[path] = count
        if path and is_replaced(module):
            if any(hooks_within(child) for child in module.children()):
                raise ArtifactError(f"the hooks in {path} have no form in a file: remove them")
            replaced.setdefault(module, []).append(path)
            return
        classes[path] = _class_name(module)
        if plain := _plain_values(module):
            values[path] = plain
        if _keeps_state_elsewhere(module):
            raise ArtifactError(
                f"{path or 'it'} is a {type(module).__name__}, which keeps more than tensors: "
                "compile a stock-converted model as a whole (x86quant.compile) and save that"
            )
        if (block := blocks_of(module)) is not None:
            graphs.append([path, _written(block, tensors, write)])
        prefix = f"{path}." if path else ""
        for group in (module._parameters, module._buffers):
            for name, tensor in group.items():
                if tensor is not None:
                    state[f"{prefix}{name}"] = tensors.add(f"{prefix}{name}", tensor)
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{prefix}{name}", child)

    visit("", model)
    is_known = transformers_models.is_one(model)
    return {
        "class": _class_name(model),
        "config": transformers_models.write(model, classes) if is_known else None,
        "classes": classes,
        "hooks": hooks,
        "replaced": [[paths, write(module, tensors)] for module, paths in replaced.items()],
        "tensors": state,
        "graphs": graphs,
        "values": values,
        **_written_step(model, tensors, write),
    }


def read_tree(
    content: dict[str, Any], tensors: TensorReader, read: Callable[[object], Content]
) -> Content:
    """What ``write_tree`` wrote; ``read`` reads the records in it."""
    content = {"graphs": [], "values": {}, "tokens": None, **content}  # older files have none
    check_keys("a tree", content, _ENTRIES)
    name = typed(str, content["class"], "class")
    classes = _texts(content["classes"], "classes")
    hooks = typed(dict, content["hooks"], "hooks")
    state = {
        path: tensors.take(stored) for path, stored in _texts(content["tensors"], "tensors").items()
    }
    stored = _texts(content["tensors"], "tensors")
    if "" not in classes:
        raise ArtifactError("a tree has no class of its own")
    if not all(type(count) is int for count in hooks.values()):
        raise ArtifactError("the hooks of a tree are no numbers")
    replaced: dict[str, Content] = {}
    parts: list[Any] = []
    for entry in typed(list, content["replaced"], "replaced"):
        paths, record = _pair(entry)
        inner = read(record)
        if inner.needs is not None:
            raise ArtifactError("a tree within a tree")
        parts += inner.parts
        for path in paths:
            if path in replaced or path in classes or not path:
                raise ArtifactError(f"two modules have the path {path[:80]!r}")
            replaced[path] = inner
    blocks: dict[str, list[GuardedGraph]] = {}
    for entry in typed(list, content["graphs"], "graphs"):
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in classes:
            raise ArtifactError("the graphs of a tree are of no module in it")
        blocks[entry[0]] = [_block(read(x).build(None)) for x in typed(list, entry[1], "graphs")]
    config = content["config"]
    values = typed(dict, content["values"], "values")
    for path, plain in values.items():
        found = {name: decode(x, ()) for name, x in typed(dict, plain, "values").items()}
        if path not in classes or not all(map(_is_plain, found.values())):
            raise ArtifactError("the values of a tree are no plain values of its modules")
        values[path] = found
    tokens = content["tokens"]
    step = None if tokens is None else read_token_step(tokens, read)
    tree = _Tree(name, classes, hooks, replaced, state, stored, blocks, values, step)

    def build(skeleton: nn.Module | None) -> nn.Module:
        if skeleton is not None:
            return tree.filled(_copied(skeleton))
        if config is None:
            raise ArtifactError(
                f"it holds the layers of a {name[:80]} but not its code: give "
                f"load(path, model=...) a {name[:80]} made with the same arguments"
            )
        try:  # without memory of its own, where its code takes that
            return tree.filled(transformers_models.build(name, config, "meta"))
        except ArtifactError:
            return tree.filled(transformers_models.build(name, config, "cpu"))

    return Content(build, needs=name if config is None else None, parts=tuple(parts))


def _pair(entry: object) -> tuple[list[str], object]:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], list):
        raise ArtifactError("what was replaced in a tree is no pair of paths and a module")
    if not entry[0] or not all(isinstance(path, str) for path in entry[0]):
        raise ArtifactError("what was replaced in a tree has no paths")
    return entry[0], entry[1]


def _texts(value: object, what: str) -> dict[str, str]:
    found = typed(dict, value, what)
    if not all(isinstance(item, str) for item in found.values()):
        raise ArtifactError(f"the {what} of a tree are no names")
    return found


def _written(block: BlockGraphs, tensors: TensorWriter, write: Write) -> list[Any]:
    """The records of the graphs that have a form in a file; without the others layers run."""
    found = []
    for graph in block.graphs:
        with contextlib.suppress(ArtifactError):
            write(graph, TensorWriter(copies=False))  # it leaves nothing behind where it fails
            found.append(write(graph, tensors))
    return found


def _written_step(model: nn.Module, tensors: TensorWriter, write: Write) -> dict[str, Any]:
    """The entry of a decoder's token step, if it has one that has a form in a file."""
    step = token_step_of(model)
    if step is None:
        return {}
    with contextlib.suppress(ArtifactError):
        write_token_step(
            step, TensorWriter(copies=False), write
        )  # it leaves nothing behind where it fails
        return {"tokens": write_token_step(step, tensors, write)}
    return {}


def _block(module: nn.Module) -> GuardedGraph:
    if not isinstance(module, GuardedModule):
        raise ArtifactError("a graph of a module in a tree is none")
    return module.alone()


def _copied(skeleton: nn.Module) -> nn.Module:
    """Its structure; tensors are shared until they are replaced."""
    if not isinstance(skeleton, nn.Module):
        raise ArtifactError(f"model must be an nn.Module, not {type(skeleton).__name__}")
    return with_shared_tensors(skeleton)


class _Tree:
    """Fills a skeleton."""

    def __init__(
        self,
        name: str,
        classes: dict[str, str],
        hooks: dict[str, int],
        replaced: dict[str, Content],
        state: dict[str, torch.Tensor],
        stored: dict[str, str],
        blocks: dict[str, list[GuardedGraph]],
        values: dict[str, dict[str, Any]],
        step: TokenStep | None,
    ) -> None:
        self._step = step
        self._values = values
        self._blocks = blocks
        self._name, self._classes, self._hooks = name, classes, hooks
        self._replaced, self._state, self._stored = replaced, state, stored

    def filled(self, model: nn.Module) -> nn.Module:
        """``model`` itself, changed into what was saved.

        Raises:
            ArtifactError: it is not of the class that was saved, or made with other arguments.
        """
        as_written(model)
        if _class_name(model) != self._name:
            raise ArtifactError(f"model must be a {self._name}, not {type(model).__name__}")
        made: dict[int, nn.Module] = {}
        open_experts(model, self._replaced)
        for path, content in self._replaced.items():
            self._put(model, path, content, made)
        self._bake(model)
        found = self._walked(model)
        for path in found.keys() ^ self._classes.keys():
            which = "the file has not" if path in found else "the model has not"
            raise self._misfit(f"{which} the module {path!r}")
        for path, module in found.items():
            if _class_name(module) != self._classes[path]:
                raise self._misfit(
                    f"{path or 'it'} is a {type(module).__name__}, was {self._classes[path]}"
                )
            if _hooks(module) != self._hooks.get(path, 0):
                raise self._misfit(
                    f"{path or 'it'} has {_hooks(module)} hooks, had {self._hooks.get(path, 0)}"
                )
        self._give_tensors(found)
        for path, plain in self._values.items():
            own = vars(found[path])
            # Of the same type, so that it cannot become what the code does not expect.
            own.update({k: v for k, v in plain.items() if type(own.get(k)) is type(v)})
        adapt_containers(model)
        for module in model.modules():
            if isinstance(vars(module).get("forward"), BlockGraphs):  # of one quantized before
                del module.forward
        note_in_config(model)
        model.requires_grad_(False).eval()
        with contextlib.suppress(ExtensionError):  # without native kernels layers run by themselves
            for path, graphs in self._blocks.items():
                BlockGraphs(found[path], graphs).attach()
            if self._step is not None:
                give_token_step(model, self._step)
        return model

    def _put(
        self, model: nn.Module, path: str, content: Content, made: dict[int, nn.Module]
    ) -> None:
        """Make what was at ``path``, once for all its paths, with the attributes of what is there.

        Activations that were absorbed may be functions, and are modules that do nothing now.
        """
        parent, _, name = path.rpartition(".")
        try:
            home = model.get_submodule(parent)
        except AttributeError:
            raise self._misfit(f"the model has not the module {parent!r}") from None
        if name not in home._modules and not callable(getattr(home, name, None)):
            raise self._misfit(f"the model has not the module {path!r}")
        if name not in home._modules and (hasattr(type(home), name) or not vars(home).get(name)):
            raise self._misfit(f"{path!r} of the model is no layer")
        old = home._modules.get(name)
        if old is not None and _hooks(old) != self._hooks.get(path, 0):
            raise self._misfit(f"{path} has {_hooks(old)} hooks, had {self._hooks.get(path, 0)}")
        if id(content) not in made:
            new = made[id(content)] = content.build(old)
            if old is not None:
                if isinstance(new, Baked):
                    new.note_attributes_of(old)
                    new.show_class_of(old)
                carry_attributes(old, new)
                for kind in HOOKS:
                    getattr(new, kind).update(getattr(old, kind))
        setattr(home, name, made[id(content)])

    def _bake(self, model: nn.Module) -> None:
        """Let weights that are computed in ``model`` be plain where they are plain in the file."""
        for path, module in list(self._walked(model).items()):
            plain = path in self._classes and f"{path}.parametrizations" not in self._classes
            if plain and not self._hooks.get(path, 0) and computes_weights(module):
                bake(module)

    def _walked(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules of ``model`` by path, without replaced ones and what is in them."""
        found: dict[str, nn.Module] = {}

        def visit(path: str, module: nn.Module) -> None:
            if path in self._replaced:
                return
            found[path] = module
            for name, child in module._modules.items():
                if child is not None:
                    visit(f"{path}.{name}" if path else name, child)

        visit("", model)
        return found

    def _give_tensors(self, modules: dict[str, nn.Module]) -> None:
        left = dict(self._state)
        shared: dict[str, nn.Parameter] = {}
        for path, module in modules.items():
            prefix = f"{path}." if path else ""
            for kind in ("_parameters", "_buffers"):
                group: dict[str, Any] = getattr(module, kind)
                for name, old in group.items():
                    new = left.pop(f"{prefix}{name}", None)
                    if new is None and old is None:
                        continue
                    if new is None:
                        raise self._misfit(f"the file has not the tensor {prefix}{name}")
                    if old is not None and (old.shape, old.dtype) != (new.shape, new.dtype):
                        raise self._misfit(
                            f"{prefix}{name} is {old.dtype} {tuple(old.shape)}, was "
                            f"{new.dtype} {tuple(new.shape)}"
                        )
                    if kind == "_parameters":
                        stored = self._stored[f"{prefix}{name}"]
                        if stored not in shared:
                            shared[stored] = nn.Parameter(new, requires_grad=False)
                        new = shared[stored]
                    if isinstance(module, torch.jit.ScriptModule):  # of which this is a copy
                        module._c.setattr(name, new)
                    else:
                        group[name] = new
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise self._misfit(f"{prefix}{name} has no data: make the model on the CPU")
        if left:
            raise self._misfit(f"the model has not the tensor {min(left)}")

    def _misfit(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"the model given is not as the {self._name} that was saved: {what}; make it with the "
            "same arguments"
        )


#: A list of more values is data, which belongs into buffers.
_MOST_VALUES = 1024


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings and lists of them among the attributes of ``module``, as JSON.

    They say how the model was made, or are what a call has changed.
    """
    return {
        name: encode(value, {})
        for name, value in vars(module).items()
        if name not in TORCHS_OWN and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) <= _MOST_VALUES and all(map(_is_plain, value))
    if type(value) is str:
        return len(value) <= _MOST_VALUES
    return type(value) in (bool, int, float) and math.isfinite(value)


def _keeps_state_elsewhere(module: nn.Module) -> bool:
    """Whether ``module`` has state that is neither a parameter nor a buffer, such as packs."""
    if isinstance(module, torch.jit.ScriptModule):
        return False  # its code comes with the model's
    own = type(module).get_extra_state is not nn.Module.get_extra_state
    return own or any(isinstance(value, torch.ScriptObject) for value in vars(module).values())


def _class_name(module: nn.Module) -> str:
    """That of the float model: what ``to_dynamic`` made of a sequence is made anew."""
    return "Sequential" if type(module) is Int8Sequential else type(module).__name__


def _hooks(module: nn.Module) -> int:
    """How many hooks the user has put on ``module``; transformers puts its own where it likes."""
    hooks = [
        hook
        for kind in ("_forward_hooks", "_forward_pre_hooks")
        for hook in getattr(module, kind).values()
    ]
    return sum(not is_known_hook(hook) for hook in hooks)
