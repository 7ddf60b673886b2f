"""Corruptions of an artifact: blind ones, and hostile ones with the checksum put right.

``corrupted(data, seed)`` gives damaged bytes and what loading them must do:

* ``"refuse"``: raise ArtifactError;
* ``"faithful"``: raise ArtifactError, or give the model that the changed file describes.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from x86quant.artifacts import container

_LENGTH = 8
_PREFIX = "x86quant-artifact 1 "
_DIGEST = 64

Parts = tuple[dict[str, Any], dict[str, Any], bytes]
#: Changes the parts in place; returns False where it does not apply.
Mutation = Callable[[random.Random, dict[str, Any], dict[str, Any]], bool]


def corrupted(data: bytes, seed: int) -> tuple[bytes, str, str]:
    """Damaged bytes, what must happen, and the name of the damage."""
    rng = random.Random(seed)
    if rng.random() < 0.4:
        name = rng.choice(sorted(_BLIND))
        damaged = _BLIND[name](rng, data)
        return damaged, "faithful" if damaged == data else "refuse", name
    while True:
        name = rng.choice(sorted(_HOSTILE))
        mutation, expected = _HOSTILE[name]
        manifest, header, tensors = parts(data)
        if mutation(rng, manifest, header):
            return assembled(manifest, header, tensors), expected, name


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


_BLIND: dict[str, Callable[[random.Random, bytes], bytes]] = {
    function.__name__.strip("_"): function
    for function in (
        _flip_bit, _set_bytes, _truncate, _extend, _cut, _splice, _swap, _zero, _length,
    )
}  # fmt: skip

# --- hostile edits behind a right checksum ---------------------------------------------------

_HOSTILE: dict[str, tuple[Mutation, str]] = {}


def _hostile(expected: str = "refuse") -> Callable[[Mutation], Mutation]:
    def decorate(mutation: Mutation) -> Mutation:
        _HOSTILE[mutation.__name__.strip("_")] = (mutation, expected)
        return mutation

    return decorate


def _calls(manifest: dict[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    return [
        n
        for n in manifest["nodes"]
        if n["op"] == "call_function" and n["target"].startswith(prefix)
    ]


def _kwargs(manifest: dict[str, Any], *suffixes: str) -> list[tuple[dict[str, Any], str]]:
    """Arguments of x86quant ops whose names end so, as (kwargs, name)."""
    return [
        (node["kwargs"], key)
        for node in _calls(manifest, "x86quant::")
        for key in node["kwargs"]
        if key.endswith(suffixes)
    ]


def _set_kwarg(rng: random.Random, manifest: dict[str, Any], value: Any, *names: str) -> bool:
    found = _kwargs(manifest, *names)
    if found:
        kwargs, key = rng.choice(found)
        kwargs[key] = [value] if isinstance(kwargs[key], list) else value
    return bool(found)


@_hostile()
def _bad_scale(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    value = rng.choice([0.0, -1.0, {"float": "nan"}, {"float": "inf"}, None, "1", True, 1e-400])
    return _set_kwarg(rng, manifest, value, "x_scale", "out_scale", "a_scale", "b_scale")


@_hostile()
def _bad_zero_point(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    value = rng.choice([-1, 256, 2**40, -(2**70), 1.0, None, True, [0]])
    return _set_kwarg(rng, manifest, value, "_zp")


@_hostile()
def _bad_clamp(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    return _set_kwarg(rng, manifest, rng.choice([-1, 256, 1e3, None, "0"]), "lo", "hi")


@_hostile()
def _bad_geometry(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    value = rng.choice([0, -1, 2**40, 2**64, None, "1", 1.5, {"tuple": [1, 1, 1, 1, 1, 1]}])
    return _set_kwarg(rng, manifest, value, "stride", "dilation", "groups")


@_hostile()
def _node_out_of_range(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:  # fmt: skip
    number = rng.choice([-1, len(manifest["nodes"]), 2**40, 2**80, 1.0, "0", None, True, [0]])
    rng.choice(_with_arguments(manifest))["args"].append({"node": number})
    return True


@_hostile()
def _cycle(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    index = rng.randrange(len(manifest["nodes"]))
    later = rng.randrange(index, len(manifest["nodes"]))
    manifest["nodes"][index]["args"].append({"node": later})
    return True


@_hostile()
def _unknown_op(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    rng.choice(_calls(manifest))["target"] = rng.choice(
        [
            "os.system", "builtins.eval", "torch.load", "torch.ops.aten.from_file", "subprocess.run",
            "aten::from_file.default", "aten::set_.source_Storage", "x86quant::run_program",
            "x86quant::pack_graph_conv", "__import__", "torch.nn.functional.__builtins__", "",
            "getattr.__self__", "x86quant::", "operator.attrgetter", "a" * 100_000,
        ]
    )  # fmt: skip
    return True


@_hostile()
def _unknown_method(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    node = rng.choice(_calls(manifest))
    node["op"] = "call_method"
    node["target"] = rng.choice(["__class__", "numpy", "set_", "resize_", "data_ptr", "tofile", ""])
    return True


@_hostile()
def _code_in_name(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    code = rng.choice(
        ["x):\n    import os\n#", "x=print(1)", "a b", "", "class", "é", "x\n", "__import__('os')"]
    )
    node = rng.choice(manifest["nodes"])
    where = rng.choice(["name", "kwargs", "target"])
    if where == "kwargs":
        node["kwargs"][code] = 1
    elif where == "name" or node["op"] == "call_function":
        node["name"] = code
    else:
        node["target"] = code
    return True


@_hostile()
def _hostile_attribute(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:  # fmt: skip
    name = rng.choice(sorted(manifest["attributes"]))
    content = manifest["attributes"].pop(name)
    bad = rng.choice(
        ["__class__", "forward", "_buffers", "a.b.__init__", "..", "", "x'y", "a\nb", "_modules.x",
         "x" * 500, ".".join("a" * 100), "training"]
    )  # fmt: skip
    manifest["attributes"][bad] = content
    for node in manifest["nodes"]:
        if node["op"] == "get_attr" and node["target"] == name:
            node["target"] = bad
    return True


@_hostile()
def _getattr(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    node = rng.choice(_calls(manifest))
    name = rng.choice(["__class__", "__globals__", "data", "grad_fn", "", 3, {"node": 0}])
    node.update(target="getattr", args=[{"node": 0}, name], kwargs={}, meta={})
    return True


@_hostile()
def _deep_argument(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    value: Any = 0
    for _ in range(rng.choice([17, 50, 200])):
        value = rng.choice([[value], {"tuple": [value]}, {"dict": {"k": value}}])
    rng.choice(_with_arguments(manifest))["args"].append(value)
    return True


@_hostile()
def _bad_argument(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    value = rng.choice(
        [{}, {"a": 1, "b": 2}, {"lambda": "x"}, {"dtype": "float99"}, {"dtype": ["float32"]},
         {"device": "cuda"}, {"slice": [1]}, {"slice": {}}, {"tuple": {}}, {"dict": []}, 2**64,
         {"layout": "sparse"}, {"memory_format": 1}, {"ellipsis": 1}, {"float": 1.0}]
    )  # fmt: skip
    rng.choice(_with_arguments(manifest))["args"].append(value)
    return True


@_hostile()
def _bad_arity(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    node = rng.choice(_calls(manifest, "x86quant::"))
    if rng.random() < 0.5 and node["kwargs"]:
        del node["kwargs"][rng.choice(sorted(node["kwargs"]))]
    else:
        node["kwargs"]["surprise"] = 1
    return True


@_hostile()
def _missing_key(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    places: list[dict[str, Any]] = [manifest, rng.choice(manifest["nodes"])]
    places += [m for m in manifest["modules"].values()]
    place = rng.choice(places)
    del place[rng.choice(sorted(place))]
    return True


@_hostile()
def _wrong_type(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    place = rng.choice([manifest, rng.choice(manifest["nodes"])])
    key = rng.choice(sorted(place))
    values: list[Any] = [None, 1, "x", [], {}, True, 1.5, [[]], [{}]]
    keeps = {type(place[key])} | ({bool} if key == "x" else set())
    wrong = [v for v in values if type(v) not in keeps]
    place[key] = rng.choice(wrong)
    return True


@_hostile()
def _qparams_on_floats(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:  # fmt: skip
    nodes = [n for n in manifest["nodes"] if n["target"] == "x86quant::dequantize"]
    nodes += [n for n in manifest["nodes"] if n["op"] in ("placeholder", "get_attr", "output")]
    rng.choice(nodes)["meta"]["qparams"] = [0.5, 3]
    return True


@_hostile()
def _bad_qparams(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    nodes = [n for n in manifest["nodes"] if "qparams" in n["meta"]]
    value = rng.choice([[], [0.0, 0], [1, 0], [1.0, 256], [1.0, True], [-1.0, 0], {}, [1.0, 0, 0]])
    rng.choice(nodes)["meta"]["qparams"] = value
    return True


@_hostile()
def _layer_of_other_class(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:  # fmt: skip
    layers = sorted(manifest["modules"])
    if layers:
        manifest["modules"][rng.choice(layers)]["class"] = rng.choice(
            ["Module", "DataParallel", "torch.nn.Linear", "Sequential", "__builtins__", ""]
        )
    return bool(layers)


@_hostile()
def _layer_too_large(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    layers = [m for m in manifest["modules"].values() if m["tensors"]]
    if not layers:
        return False
    arguments = rng.choice(layers)["arguments"]
    sizes = [k for k, v in arguments.items() if type(v) is int]
    if not sizes:
        return False
    arguments[rng.choice(sorted(sizes))] = rng.choice([10**9, 2**40, 2**62, -1])
    return True


@_hostile()
def _tensor_of_nothing(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:  # fmt: skip
    name = rng.choice(sorted(manifest["attributes"]))
    manifest["attributes"][name] = rng.choice(
        [{"tensor": "nowhere"}, {"tensor": 1}, {"tensor": None}, {}, {"value": {"node": 0}}, [], 1]
    )
    return True


@_hostile()
def _bad_order(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    name = rng.choice(sorted(header))
    dims = len(header[name]["shape"])
    manifest["orders"][name] = rng.choice(
        [[0] * (dims + 1), [-1] * (dims + 1), list(range(1, dims + 1)) + [7], None, "01", [None]]
    )
    return True


@_hostile()
def _bad_dtype(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    header[rng.choice(sorted(header))]["dtype"] = rng.choice(
        ["F31", "object", "", None, 3, "F4", "C64", "F8_E4M3", "F6_E2M3"]
    )
    return True


@_hostile()
def _bad_shape(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    header[rng.choice(sorted(header))]["shape"] = rng.choice(
        [[2**62, 2**62], [-1, -8], [0, 2**63], [10**12], [0.5], ["8"], None, {}, [2**40] * 8,
         [0] + [2**40] * 4, [1] * 100_000 + [10**9], [2**64 + 1]]
    )  # fmt: skip
    return True


@_hostile()
def _bad_offsets(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    names = [n for n in sorted(header) if header[n]["data_offsets"][1] > header[n]["data_offsets"][0]]
    entry, other = header[rng.choice(names)], header[rng.choice(names)]
    start, end = entry["data_offsets"]
    shifted = [[start + 1, end + 1], [end, start], [0, 2**62], [start, end - 1], [-1, end], [], [0]]
    overlapping = other["data_offsets"] if other is not entry else [end, end]
    entry["data_offsets"] = rng.choice([*shifted, overlapping])
    return True


@_hostile()
def _weights_cut_short(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:  # fmt: skip
    """A vector of a layer as another tensor of the file, of a length that cannot fit."""
    convs = [n for n in _calls(manifest, "x86quant::") if "weight_scales" in n["kwargs"]]
    node = rng.choice(convs)
    weights = node["kwargs"]["weight"]
    node["kwargs"][rng.choice(["weight_scales", "bias", "lut"])] = weights
    return True


@_hostile("faithful")
def _swap_constants(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    a, b = rng.choices(sorted(manifest["attributes"]), k=2)
    attributes = manifest["attributes"]
    attributes[a], attributes[b] = attributes[b], attributes[a]
    return True


@_hostile("faithful")
def _swap_arguments(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    (one, key), (other, key2) = rng.choices(_kwargs(manifest, ""), k=2)
    one[key], other[key2] = other[key2], one[key]
    return True


@_hostile("faithful")
def _any_argument(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    kwargs, key = rng.choice(_kwargs(manifest, ""))
    kwargs[key] = rng.choice(
        [0, 1, 2, 3, 7, 128, 255, 2**31 - 1, -1, 0.5, 1e30, 1e-30, True, None, "bilinear", [],
         [1, 1], [3, 3], [0, 0], [2**30, 1], {"node": rng.randrange(4)}, [0.5], {"tuple": [2, 2]}]
    )  # fmt: skip
    return True


@_hostile("faithful")
def _other_target(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    a, b = rng.choice(manifest["nodes"]), rng.choice(manifest["nodes"])
    a["op"], a["target"] = b["op"], b["target"]
    return True


@_hostile("faithful")
def _swap_nodes(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    nodes = manifest["nodes"]
    a, b = rng.randrange(len(nodes)), rng.randrange(len(nodes))
    nodes[a], nodes[b] = nodes[b], nodes[a]
    return True


@_hostile("faithful")
def _repeat_node(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    nodes = manifest["nodes"]
    nodes.insert(rng.randrange(len(nodes)), copy.deepcopy(rng.choice(nodes)))
    return True


@_hostile("faithful")
def _drop_node(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    manifest["nodes"].pop(rng.randrange(len(manifest["nodes"])))
    return True


@_hostile("faithful")
def _reshape_tensor(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    shape = header[rng.choice(sorted(header))]["shape"]
    change = rng.choice(["flatten", "reverse", "split", "one"])
    if change == "reverse":
        shape.reverse()
    elif change == "one":
        shape.insert(rng.randrange(len(shape) + 1), 1)
    elif shape:
        total = 1
        for size in shape:
            total *= size
        shape[:] = [total] if change == "flatten" or total % 2 else [2, total // 2]
    return True


@_hostile("faithful")
def _other_dtype(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    same_size = {"F32": "I32", "I32": "F32", "I8": "U8", "U8": "BOOL", "I64": "F64"}
    entry = header[rng.choice(sorted(header))]
    entry["dtype"] = same_size.get(entry["dtype"], entry["dtype"])
    return True


@_hostile("faithful")
def _layer_argument(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    layers = [m for m in manifest["modules"].values() if m["arguments"]]
    if not layers:
        return False
    arguments = rng.choice(layers)["arguments"]
    arguments[rng.choice(sorted(arguments))] = rng.choice([0, 1, 2, 3, -1, None, True, "sum", 0.5])
    return True


@_hostile("faithful")
def _other_meta(rng: random.Random, manifest: dict[str, Any], header: dict[str, Any]) -> bool:
    a, b = rng.choice(manifest["nodes"]), rng.choice(manifest["nodes"])
    a["meta"], b["meta"] = b["meta"], a["meta"]
    return True


def _with_arguments(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Nodes to which a bad argument can be given: all but get_attr, which takes none."""
    return [n for n in manifest["nodes"] if n["op"] not in ("get_attr", "placeholder")]
