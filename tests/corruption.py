"""Corruptions of an artifact: blind ones, and hostile ones with the checksum put right.

``corrupted(data, seed)`` gives damaged bytes and what loading them must do:

* ``"refuse"``: raise ArtifactError;
* ``"faithful"``: raise ArtifactError, or give the model that the changed file describes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from x86quant.artifacts.file import container

_LENGTH = 8
_PREFIX = "x86quant-artifact 2 "
_DIGEST = 64

Parts = tuple[dict[str, Any], dict[str, Any], bytes]


@dataclasses.dataclass
class Draft:
    """An artifact taken apart, to be changed in place."""

    rng: random.Random
    manifest: dict[str, Any]
    header: dict[str, Any]

    @property
    def graph(self) -> dict[str, Any]:
        """The graph, of a model that is one."""
        found: dict[str, Any] = self.manifest["model"]
        return found


#: Changes a draft; returns False where it does not apply.
Mutation = Callable[[Draft], bool]


def corrupted(data: bytes, seed: int) -> tuple[bytes, str, str]:
    """Damaged bytes, what must happen, and the name of the damage."""
    rng = random.Random(seed)
    if rng.random() < 0.4:
        name = rng.choice(sorted(BLIND))
        damaged = BLIND[name](rng, data)
        return damaged, "faithful" if damaged == data else "refuse", name
    if rng.random() < 0.15:
        name = rng.choice(sorted(_TEXT))
        manifest, header, tensors = parts(data)
        return _TEXT[name](rng, manifest, header, tensors), "refuse", name
    while True:
        name = rng.choice(sorted(_HOSTILE))
        mutation, expected = _HOSTILE[name]
        manifest, header, tensors = parts(data)
        if mutation(Draft(rng, manifest, header)):
            return assembled(manifest, header, tensors), expected, name


def corrupted_anywhere(data: bytes, seed: int) -> tuple[bytes, str, str]:
    """The same for a file of any form: blind damage, or one entry of the model is another."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        name = rng.choice(sorted(BLIND))
        damaged = BLIND[name](rng, data)
        return damaged, "faithful" if damaged == data else "refuse", name
    manifest, header, tensors = parts(data)
    entries = places(manifest["model"])
    for _ in range(rng.choice((1, 1, 2))):
        container, key = rng.choice(entries)
        how = rng.randrange(3)
        if how == 0:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        elif how == 1:  # what stands elsewhere is more often nearly right
            other, its = rng.choice(entries)
            container[key] = copy.deepcopy(other[its])
        elif isinstance(container, dict) and isinstance(key, str):
            container[rng.choice((f"{key}x", "__class__", "form"))] = container.pop(key)
        elif key < len(container):
            container.append(container.pop(key))
        if how:
            entries = places(manifest["model"])
    return assembled(manifest, header, tensors), "faithful", "entry"


JUNK: list[Any] = [
    *(None, True, -1, 2**70, 0.5, "", "x", "a.b", "__import__", "os.system", "torch.load"),
    *([], [[]], {}, {"a": 1}, {"leaf": 9}, {"node": 0}, {"named": ["tuple", "eval", {}]}),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every entry of nested JSON as (container, key)."""
    found: list[tuple[Any, Any]] = []
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        found.append((value, key))
        if isinstance(item, dict | list):
            found += places(item)
    return found


def parts(data: bytes) -> Parts:
    """The manifest, the tensors' header entries, and the tensors' bytes of an artifact."""
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    header = json.loads(data[_LENGTH:end])
    text = header.pop("__metadata__")["x86quant"]
    return json.loads(text.split("\n", 1)[1]), header, data[end:]


def assembled(
    manifest: dict[str, Any] | str, header: dict[str, Any] | str, tensors: bytes
) -> bytes:
    """An artifact of these parts, its checksum right; text stands for JSON as it is."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    metadata = json.dumps({"x86quant": f"{_PREFIX}{'0' * _DIGEST}\n{text}"})
    entries = header if isinstance(header, str) else json.dumps(header)[1:-1]
    head = f'{{"__metadata__":{metadata}{"," if entries else ""}{entries}}}'.encode()
    data = len(head).to_bytes(_LENGTH, "little") + head + tensors
    return container.seal(data, "0" * _DIGEST)


# --- blind damage ----------------------------------------------------------------------------


def _flip_bit(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    # Half of them in the first part, where the structure is.
    end = len(data) if rng.random() < 0.5 else min(len(data), 4096)
    damaged[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _set_bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    junk = rng.randbytes(rng.randrange(1, 65))
    return data[:at] + junk + data[at + len(junk) :]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _extend(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 100))


def _cut(rng: random.Random, data: bytes) -> bytes:
    a, b = sorted(rng.sample(range(len(data)), 2))
    return data[:a] + data[b:]


def _splice(rng: random.Random, data: bytes) -> bytes:
    a, b = sorted(rng.sample(range(len(data)), 2))
    at = rng.randrange(len(data))
    return data[:at] + data[a:b] + data[at:]


def _swap(rng: random.Random, data: bytes) -> bytes:
    a, b, c = sorted(rng.sample(range(len(data)), 3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _zero(rng: random.Random, data: bytes) -> bytes:
    a, b = sorted(rng.sample(range(len(data)), 2))
    return data[:a] + bytes(b - a) + data[b:]


def _length(rng: random.Random, data: bytes) -> bytes:
    length = rng.choice([0, 1, len(data), 2**31, 2**63, 2**64 - 1, rng.randrange(2**64)])
    return length.to_bytes(_LENGTH, "little") + data[_LENGTH:]


BLIND: dict[str, Callable[[random.Random, bytes], bytes]] = {
    function.__name__.strip("_"): function
    for function in (
        _flip_bit, _set_bytes, _truncate, _extend, _cut, _splice, _swap, _zero, _length,
    )
}  # fmt: skip

# --- hostile text behind a right checksum ----------------------------------------------------

_TextMutation = Callable[[random.Random, dict[str, Any], dict[str, Any], bytes], bytes]


def _metadata(value: str) -> _TextMutation:
    """``value``, which is no proper JSON, in place of the metadata."""

    def mutate(_: random.Random, manifest: Any, header: dict[str, Any], tensors: bytes) -> bytes:
        manifest["metadata"] = "HERE"
        return assembled(json.dumps(manifest).replace('"HERE"', value), header, tensors)

    return mutate


def _duplicate_key(rng: random.Random, manifest: Any, header: Any, tensors: bytes) -> bytes:
    text = json.dumps(manifest)
    key = rng.choice(["nodes", "op", "target", "args", "tensor", "x_scale", "modules", "torch"])
    return assembled(text.replace(f'"{key}":', f'"{key}": 1, "{key}":', 1), header, tensors)


def _duplicate_tensor(rng: random.Random, manifest: Any, header: Any, tensors: bytes) -> bytes:
    name = rng.choice(sorted(header))
    entries = json.dumps(header)[1:-1]
    again = json.dumps({name: rng.choice([header[name], header[min(header)]])})[1:-1]
    return assembled(manifest, f"{entries},{again}", tensors)


def _no_manifest(rng: random.Random, manifest: Any, header: Any, tensors: bytes) -> bytes:
    return assembled(rng.choice(["", "{", "[]", "null", "{}", '"x"', "\\ud800"]), header, tensors)


_TEXT: dict[str, _TextMutation] = {
    "deep_list": _metadata("[" * 200_000 + "]" * 200_000),
    "deep_object": _metadata('{"a":' * 100_000 + "1" + "}" * 100_000),
    "nan": _metadata('{"a": NaN}'),
    "infinity": _metadata('{"a": -Infinity}'),
    "long_number": _metadata(f'{{"a": {"9" * 10_000}}}'),
    "open_string": _metadata('{"a": "'),
    "duplicate_key": _duplicate_key,
    "duplicate_tensor": _duplicate_tensor,
    "no_manifest": _no_manifest,
}

# --- hostile edits behind a right checksum ---------------------------------------------------

_HOSTILE: dict[str, tuple[Mutation, str]] = {}


def _hostile(expected: str = "refuse") -> Callable[[Mutation], Mutation]:
    def decorate(mutation: Mutation) -> Mutation:
        _HOSTILE[mutation.__name__.strip("_")] = (mutation, expected)
        return mutation

    return decorate


def _calls(d: Draft, prefix: str = "") -> list[dict[str, Any]]:
    return [
        n for n in d.graph["nodes"] if n["op"] == "call_function" and n["target"].startswith(prefix)
    ]


def _kwargs(d: Draft, *suffixes: str) -> list[tuple[dict[str, Any], str]]:
    """Arguments of x86quant ops whose names end so, as (kwargs, name)."""
    return [
        (node["kwargs"], key)
        for node in _calls(d, "x86quant::")
        for key in node["kwargs"]
        if key.endswith(suffixes)
    ]


def _with_arguments(d: Draft) -> list[dict[str, Any]]:
    """Nodes to which a bad argument can be given: all but get_attr, which takes none."""
    return [n for n in d.graph["nodes"] if n["op"] not in ("get_attr", "placeholder")]


def _set_kwarg(d: Draft, value: Any, *names: str) -> bool:
    found = _kwargs(d, *names)
    if found:
        kwargs, key = d.rng.choice(found)
        kwargs[key] = [value] if isinstance(kwargs[key], list) else value
    return bool(found)


@_hostile()
def _bad_scale(d: Draft) -> bool:
    value = d.rng.choice([0.0, -1.0, {"float": "nan"}, {"float": "inf"}, None, "1", True, 1e-400])
    return _set_kwarg(d, value, "x_scale", "out_scale", "a_scale", "b_scale")


@_hostile()
def _bad_zero_point(d: Draft) -> bool:
    value = d.rng.choice([-1, 256, 2**40, -(2**70), 1.0, None, True, [0]])
    return _set_kwarg(d, value, "_zp")


@_hostile()
def _bad_clamp(d: Draft) -> bool:
    return _set_kwarg(d, d.rng.choice([-1, 256, 1e3, None, "0"]), "lo", "hi")


@_hostile()
def _bad_geometry(d: Draft) -> bool:
    value = d.rng.choice([0, -1, 2**40, 2**64, None, "1", 1.5, {"tuple": [1, 1, 1, 1, 1, 1]}])
    return _set_kwarg(d, value, "stride", "dilation", "groups")


@_hostile()
def _node_out_of_range(d: Draft) -> bool:
    number = d.rng.choice([-1, len(d.graph["nodes"]), 2**40, 2**80, 1.0, "0", None, True, [0]])
    d.rng.choice(_with_arguments(d))["args"].append({"node": number})
    return True


@_hostile()
def _cycle(d: Draft) -> bool:
    index = d.rng.randrange(len(d.graph["nodes"]))
    later = d.rng.randrange(index, len(d.graph["nodes"]))
    d.graph["nodes"][index]["args"].append({"node": later})
    return True


@_hostile()
def _unknown_op(d: Draft) -> bool:
    d.rng.choice(_calls(d))["target"] = d.rng.choice(
        [
            "os.system", "builtins.eval", "torch.load", "torch.ops.aten.from_file", "exec",
            "aten::from_file.default", "aten::set_.source_Storage", "x86quant::run_program",
            "x86quant::pack_graph_conv", "__import__", "torch.nn.functional.__builtins__", "",
            "getattr.__self__", "x86quant::", "operator.attrgetter", "a" * 100_000,
        ]
    )  # fmt: skip
    return True


@_hostile()
def _unknown_method(d: Draft) -> bool:
    node = d.rng.choice(_calls(d))
    node["op"] = "call_method"
    node["target"] = d.rng.choice(
        ["__class__", "numpy", "set_", "resize_", "data_ptr", "tofile", ""]
    )
    return True


@_hostile()
def _method_of_a_number(d: Draft) -> bool:
    node = d.rng.choice(_calls(d))
    node["op"], node["target"], node["kwargs"] = "call_method", "contiguous", {}
    node["args"] = [d.rng.choice([1, "a", [1]])]
    return True


@_hostile()
def _code_in_name(d: Draft) -> bool:
    code = d.rng.choice(
        ["x):\n    import os\n#", "x=print(1)", "a b", "", "class", "é", "x\n", "__import__('os')"]
    )
    node = d.rng.choice(d.graph["nodes"])
    where = d.rng.choice(["name", "kwargs", "target"])
    if where == "kwargs":
        node["kwargs"][code] = 1
    elif where == "name" or node["op"] == "call_function":
        node["name"] = code
    else:
        node["target"] = code
    return True


@_hostile()
def _hostile_attribute(d: Draft) -> bool:
    name = d.rng.choice(sorted(d.graph["attributes"]))
    content = d.graph["attributes"].pop(name)
    bad = d.rng.choice(
        ["__class__", "forward", "_buffers", "a.b.__init__", "..", "", "x'y", "a\nb", "_modules.x",
         "x" * 500, ".".join("a" * 100), "training"]
    )  # fmt: skip
    d.graph["attributes"][bad] = content
    for node in d.graph["nodes"]:
        if node["op"] == "get_attr" and node["target"] == name:
            node["target"] = bad
    return True


@_hostile()
def _getattr(d: Draft) -> bool:
    node = d.rng.choice(_calls(d))
    name = d.rng.choice(["__class__", "__globals__", "data", "grad_fn", "", 3, {"node": 0}])
    node.update(target="getattr", args=[{"node": 0}, name], kwargs={}, meta={})
    return True


@_hostile()
def _deep_argument(d: Draft) -> bool:
    value: Any = 0
    for _ in range(d.rng.choice([17, 50, 200])):
        value = d.rng.choice([[value], {"tuple": [value]}, {"dict": {"k": value}}])
    d.rng.choice(_with_arguments(d))["args"].append(value)
    return True


@_hostile()
def _bad_argument(d: Draft) -> bool:
    value = d.rng.choice(
        [{}, {"a": 1, "b": 2}, {"lambda": "x"}, {"dtype": "float99"}, {"dtype": ["float32"]},
         {"device": "cuda"}, {"slice": [1]}, {"slice": {}}, {"tuple": {}}, {"dict": []}, 2**64,
         {"layout": "sparse"}, {"memory_format": 1}, {"ellipsis": 1}, {"float": 1.0}]
    )  # fmt: skip
    d.rng.choice(_with_arguments(d))["args"].append(value)
    return True


@_hostile()
def _bad_arity(d: Draft) -> bool:
    node = d.rng.choice(_calls(d, "x86quant::"))
    if d.rng.random() < 0.5 and node["kwargs"]:
        names = node["kwargs"].keys() - {"contiguous"}  # which earlier versions did not write
        del node["kwargs"][d.rng.choice(sorted(names))]
    else:
        node["kwargs"]["surprise"] = 1
    return True


@_hostile()
def _missing_key(d: Draft) -> bool:
    places: list[dict[str, Any]] = [d.manifest, d.graph, d.rng.choice(d.graph["nodes"])]
    places += d.graph["modules"].values()
    place = d.rng.choice(places)
    del place[d.rng.choice(sorted(place))]
    return True


@_hostile()
def _wrong_type(d: Draft) -> bool:
    place = d.rng.choice([d.manifest, d.graph, d.rng.choice(d.graph["nodes"])])
    key = d.rng.choice(sorted(place))
    values: list[Any] = [None, 1, "x", [], {}, True, 1.5, [[]], [{}]]
    keeps = {type(place[key])} | ({bool} if key == "x" else set())
    wrong = [v for v in values if type(v) not in keeps]
    place[key] = d.rng.choice(wrong)
    return True


@_hostile()
def _qparams_on_floats(d: Draft) -> bool:
    nodes = [n for n in d.graph["nodes"] if n["target"] == "x86quant::dequantize"]
    nodes += [n for n in d.graph["nodes"] if n["op"] in ("placeholder", "get_attr", "output")]
    d.rng.choice(nodes)["meta"]["qparams"] = [0.5, 3]
    return True


@_hostile()
def _bad_qparams(d: Draft) -> bool:
    nodes = [n for n in d.graph["nodes"] if "qparams" in n["meta"]]
    value = d.rng.choice(
        [[], [0.0, 0], [1, 0], [1.0, 256], [1.0, True], [-1.0, 0], {}, [1.0, 0, 0]]
    )
    d.rng.choice(nodes)["meta"]["qparams"] = value
    return True


@_hostile()
def _layer_of_other_class(d: Draft) -> bool:
    layers = sorted(d.graph["modules"])
    if layers:
        d.graph["modules"][d.rng.choice(layers)]["class"] = d.rng.choice(
            ["Module", "DataParallel", "torch.nn.Linear", "Sequential", "__builtins__", ""]
        )
    return bool(layers)


@_hostile()
def _layer_too_large(d: Draft) -> bool:
    layers = [m for m in d.graph["modules"].values() if m["tensors"]]
    if not layers:
        return False
    arguments = d.rng.choice(layers)["arguments"]
    sizes = [k for k, v in arguments.items() if type(v) is int]
    if not sizes:
        return False
    arguments[d.rng.choice(sorted(sizes))] = d.rng.choice([10**9, 2**40, 2**62])
    return True


@_hostile()
def _tensor_of_nothing(d: Draft) -> bool:
    name = d.rng.choice(sorted(d.graph["attributes"]))
    d.graph["attributes"][name] = d.rng.choice(
        [{"tensor": "nowhere"}, {"tensor": 1}, {"tensor": None}, {}, {"value": {"node": 0}}, [], 1]
    )
    return True


@_hostile()
def _bad_order(d: Draft) -> bool:
    name = d.rng.choice(sorted(d.header))
    dims = len(d.header[name]["shape"])
    d.manifest["orders"][name] = d.rng.choice(
        [[0] * (dims + 1), [-1] * (dims + 1), [*range(1, dims + 1), 7], None, "01", [None]]
    )
    return True


@_hostile()
def _sparse_of_anything(d: Draft) -> bool:
    name = d.rng.choice(sorted(d.header))
    form = {"layout": "coo", "size": [4, 4], "parts": [name, name], "coalesced": False}
    change: dict[str, Any] = d.rng.choice(
        [{}, {"layout": "csr"}, {"layout": "sparse"}, {"layout": None}, {"size": [2**62] * 2},
         {"size": [-1]}, {"parts": []}, {"parts": ["odd", "odd"]}, {"coalesced": 1}, {"more": 1}]
    )  # fmt: skip
    d.manifest["sparse"] = {"odd": {**form, **change}}
    next(iter(d.graph["attributes"].values()))["tensor"] = "odd"
    return True


@_hostile()
def _bad_dtype(d: Draft) -> bool:
    d.header[d.rng.choice(sorted(d.header))]["dtype"] = d.rng.choice(
        ["F31", "object", "", None, 3, "F4", "C64", "F8_E4M3", "F6_E2M3"]
    )
    return True


@_hostile()
def _bad_shape(d: Draft) -> bool:
    d.header[d.rng.choice(sorted(d.header))]["shape"] = d.rng.choice(
        [[2**62, 2**62], [-1, -8], [0, 2**63], [10**12], [0.5], ["8"], None, {}, [2**40] * 8,
         [0] + [2**40] * 4, [1] * 100_000 + [10**9], [2**64 + 1]]
    )  # fmt: skip
    return True


@_hostile()
def _bad_offsets(d: Draft) -> bool:
    names = [
        n
        for n in sorted(d.header)
        if d.header[n]["data_offsets"][1] > d.header[n]["data_offsets"][0]
    ]
    entry, other = d.header[d.rng.choice(names)], d.header[d.rng.choice(names)]
    start, end = entry["data_offsets"]
    shifted = [[start + 1, end + 1], [end, start], [0, 2**62], [start, end - 1], [-1, end], [], [0]]
    overlapping = other["data_offsets"] if other is not entry else [end, end]
    entry["data_offsets"] = d.rng.choice([*shifted, overlapping])
    return True


@_hostile()
def _weights_cut_short(d: Draft) -> bool:
    """A vector of a layer as another tensor of the file, of a length that cannot fit."""
    convs = [n for n in _calls(d, "x86quant::") if "weight_scales" in n["kwargs"]]
    node = d.rng.choice(convs)
    weights = node["kwargs"]["weight"]
    node["kwargs"][d.rng.choice(["weight_scales", "bias", "lut"])] = weights
    return True


@_hostile("faithful")
def _swap_constants(d: Draft) -> bool:
    a, b = d.rng.choices(sorted(d.graph["attributes"]), k=2)
    attributes = d.graph["attributes"]
    attributes[a], attributes[b] = attributes[b], attributes[a]
    return True


@_hostile("faithful")
def _swap_arguments(d: Draft) -> bool:
    (one, key), (other, key2) = d.rng.choices(_kwargs(d, ""), k=2)
    one[key], other[key2] = other[key2], one[key]
    return True


@_hostile("faithful")
def _any_argument(d: Draft) -> bool:
    kwargs, key = d.rng.choice(_kwargs(d, ""))
    kwargs[key] = d.rng.choice(
        [0, 1, 2, 3, 7, 128, 255, 2**31 - 1, -1, 0.5, 1e30, 1e-30, True, None, "bilinear", [],
         [1, 1], [3, 3], [0, 0], [2**30, 1], {"node": d.rng.randrange(4)}, [0.5], {"tuple": [2, 2]}]
    )  # fmt: skip
    return True


@_hostile("faithful")
def _other_target(d: Draft) -> bool:
    a, b = d.rng.choice(d.graph["nodes"]), d.rng.choice(d.graph["nodes"])
    a["op"], a["target"] = b["op"], b["target"]
    return True


@_hostile("faithful")
def _swap_nodes(d: Draft) -> bool:
    nodes = d.graph["nodes"]
    a, b = d.rng.randrange(len(nodes)), d.rng.randrange(len(nodes))
    nodes[a], nodes[b] = nodes[b], nodes[a]
    return True


def _moved(value: Any, at: int) -> Any:
    """``value`` after a node was inserted at ``at``."""
    if isinstance(value, list):
        return [_moved(item, at) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"node"}:
        return {"node": value["node"] + (value["node"] >= at)}
    return {key: _moved(item, at) for key, item in value.items()}


@_hostile("faithful")
def _repeat_node(d: Draft) -> bool:
    nodes = d.graph["nodes"]
    again = copy.deepcopy(d.rng.choice(nodes))
    again["name"] = "again"
    at = d.rng.randrange(len(nodes))
    for node in nodes[at:]:
        for key in ("args", "kwargs"):
            node[key] = _moved(node[key], at)
    nodes.insert(at, again)
    return True


@_hostile("faithful")
def _drop_node(d: Draft) -> bool:
    d.graph["nodes"].pop(d.rng.randrange(len(d.graph["nodes"])))
    return True


@_hostile("faithful")
def _reshape_tensor(d: Draft) -> bool:
    shape = d.header[d.rng.choice(sorted(d.header))]["shape"]
    change = d.rng.choice(["flatten", "reverse", "split", "one"])
    if change == "reverse":
        shape.reverse()
    elif change == "one":
        shape.insert(d.rng.randrange(len(shape) + 1), 1)
    elif shape:
        total = 1
        for size in shape:
            total *= size
        shape[:] = [total] if change == "flatten" or total % 2 else [2, total // 2]
    return True


@_hostile("faithful")
def _other_dtype(d: Draft) -> bool:
    same_size = {"F32": "I32", "I32": "F32", "I8": "U8", "U8": "BOOL", "I64": "F64"}
    entry = d.header[d.rng.choice(sorted(d.header))]
    entry["dtype"] = same_size.get(entry["dtype"], entry["dtype"])
    return True


@_hostile("faithful")
def _layer_argument(d: Draft) -> bool:
    layers = [m for m in d.graph["modules"].values() if m["arguments"]]
    if not layers:
        return False
    arguments = d.rng.choice(layers)["arguments"]
    arguments[d.rng.choice(sorted(arguments))] = d.rng.choice(
        [0, 1, 2, 3, -1, None, True, "sum", 0.5]
    )
    return True


@_hostile("faithful")
def _other_meta(d: Draft) -> bool:
    a, b = d.rng.choice(d.graph["nodes"]), d.rng.choice(d.graph["nodes"])
    a["meta"], b["meta"] = b["meta"], a["meta"]
    return True


def content(data: bytes) -> dict[str, Any]:
    """What an artifact says, whatever its tensors are called."""
    manifest, header, tensors = parts(data)
    graph = manifest["model"]

    def tensor(name: str) -> list[Any]:
        start, end = header[name]["data_offsets"]
        order = manifest["orders"].get(name)
        return [header[name]["dtype"], header[name]["shape"], order, tensors[start:end]]

    attributes = {
        path: tensor(found["tensor"]) if "tensor" in found else found
        for path, found in graph["attributes"].items()
    }
    layers = {
        path: {**layer, "tensors": {k: tensor(name) for k, name in layer["tensors"].items()}}
        for path, layer in graph["modules"].items()
    }
    used = {n["target"] for n in graph["nodes"] if n["op"] in ("get_attr", "call_module")}
    return {
        "nodes": graph["nodes"],
        "signature": graph["signature"],
        "attributes": {k: v for k, v in attributes.items() if k in used},
        "layers": {k: v for k, v in layers.items() if k in used},
    }
