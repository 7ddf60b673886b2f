"""What is no model, or a damaged or hostile one, is refused in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import x86quant
from tests.onnx_models.small_models import (
    convolutional,
    held_against_onnx_runtime,
    model,
    node,
    noise,
)
from x86quant import InvalidInputError, UnsupportedError, from_onnx
from x86quant.onnx_models import graph_building


def with_external_data(folder: Path, location: str, **entries: str) -> Path:
    """A model of x + w, with w in ``location``."""
    proto = model([node("Add", "x w", "y")], {"x": [4]}, ["y"], {"w": noise(4)})
    weight = proto.graph.initializer[0]
    (folder / "w.bin").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=value)
    path = folder / "net.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data_are_read(tmp_path: Path) -> None:
    path = with_external_data(tmp_path, "w.bin")
    weight = np.frombuffer((tmp_path / "w.bin").read_bytes(), np.float32)
    assert np.array_equal(from_onnx(path)(torch.zeros(4)).numpy(), weight)


@pytest.mark.parametrize("location", ["../../../../etc/passwd", "/etc/passwd", "", "../w.bin"])
def test_external_data_outside_of_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(16))
    path = with_external_data(tmp_path / "inner", location)
    with pytest.raises(InvalidInputError, match="nothing outside of it is read"):
        from_onnx(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link").symlink_to(tmp_path / "secret")
    path = with_external_data(tmp_path / "inner", "link")
    with pytest.raises(InvalidInputError, match="not in the model's folder"):
        from_onnx(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "8"}, "truncated"),
        ({"offset": "-4"}, "truncated"),
        ({"length": "99999999999"}, "truncated"),
        ({"length": "8"}, "truncated"),
        ({"offset": "many"}, "no number"),
    ],
)
def test_external_data_of_another_length_are_refused(
    tmp_path: Path, entries: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        from_onnx(with_external_data(tmp_path, "w.bin", **entries))


def test_missing_external_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"'other.bin', which is not beside the model"):
        from_onnx(with_external_data(tmp_path, "other.bin"))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(convolutional().SerializeToString()[:-100])
    with pytest.raises(InvalidInputError, match=r"net.onnx is not an ONNX model, or a truncated"):
        from_onnx(path)


@pytest.mark.parametrize("source", ["nowhere.onnx", Path("nowhere.onnx")])
def test_a_wrong_path_is_named(source: str | Path) -> None:
    with pytest.raises(InvalidInputError, match=r"there is no file nowhere.onnx"):
        x86quant.quantize(source, torch.zeros(1, 3, 8, 8))


def test_other_files_and_objects_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(3)}, path)
    with pytest.raises(InvalidInputError, match=r"weights.pt is not an ONNX model"):
        x86quant.quantize(path, torch.zeros(1, 3))
    with pytest.raises(InvalidInputError, match="as its path or as a ModelProto, not int"):
        from_onnx(3)
    with pytest.raises(InvalidInputError, match="no graph, opset or output"):
        from_onnx(onnx.ModelProto())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'x86quant\[onnx\]'"):
        from_onnx(tmp_path / "net.onnx")


def test_a_cycle_is_refused() -> None:
    nodes = [node("Add", "x b", "a"), node("Relu", "a", "b")]
    with pytest.raises(InvalidInputError, match=r"Add .* reads 'b'.*cycle"):
        from_onnx(model(nodes, {"x": [4]}, ["b"]))


def test_a_missing_value_is_named() -> None:
    with pytest.raises(InvalidInputError, match="reads 'w', which neither an input nor a node"):
        from_onnx(model([node("Mul", "x w", "y")], {"x": [4]}, ["y"]))


def test_an_unknown_operator_is_named_with_its_version_and_node() -> None:
    unknown = helper.make_node("DeformConv", ["x", "w", "o"], ["y"], name="deformed")
    proto = model(
        [unknown], {"x": [1, 3, 8, 8], "w": [4, 3, 3, 3], "o": [1, 18, 6, 6]}, ["y"], opset=19
    )
    with pytest.raises(UnsupportedError, match=r"DeformConv \(version 19, node 'deformed'\)"):
        from_onnx(proto)
    other = helper.make_node("Mystery", ["x"], ["y"], domain="org.nowhere")
    with pytest.raises(UnsupportedError, match=r"org.nowhere.Mystery .* it is unknown"):
        from_onnx(model([other], {"x": [1]}, ["y"]))


def test_newer_versions_of_operators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from x86quant.onnx_models import node_view

    monkeypatch.setattr(node_view, "NEWEST", 13)
    with pytest.raises(UnsupportedError, match=r"Relu \(version 14.*versions up to 13"):
        from_onnx(model([node("Relu", "x", "y")], {"x": [1]}, ["y"]))


@pytest.mark.parametrize("scale", [np.nan, np.inf, 0.0, -1.0])
def test_scales_that_are_none_are_refused(scale: float) -> None:
    constants = {"s": np.float32(scale).reshape(()), "z": np.uint8(0).reshape(())}
    proto = model([node("QuantizeLinear", "x s z", "y")], {"x": [4]}, ["y"], constants)
    with pytest.raises(InvalidInputError, match=r"QuantizeLinear .*not a finite number above zero"):
        from_onnx(proto)


def test_constants_of_wrong_sizes_are_refused() -> None:
    proto = model([node("Add", "x w", "y")], {"x": [4]}, ["y"], {"w": noise(4)})
    proto.graph.initializer[0].dims[0] = 400
    with pytest.raises(InvalidInputError, match=r"the constant 'w' of sizes \(400,\)"):
        from_onnx(proto)


def test_huge_constants_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_building, "_LARGEST_CONSTANT", 1000)
    sizes = {"s": np.array([1000, 1000])}
    with pytest.raises(UnsupportedError, match=r"ConstantOfShape .* a constant, is of sizes"):
        from_onnx(model([node("ConstantOfShape", "s", "y")], {}, ["y"], sizes))


def test_inputs_of_other_sizes_than_the_file_fixes_are_refused() -> None:
    module = from_onnx(convolutional())
    with pytest.raises(
        InvalidInputError, match=r"'x' is of sizes \(2, 3, 9, 8\).*\(any, 3, 8, 8\)"
    ):
        module(torch.zeros(2, 3, 9, 8))


def test_constants_that_are_inputs_too_are_constants() -> None:
    proto = model([node("Add", "x w", "y")], {"x": [4], "w": [4]}, ["y"], {"w": noise(4)})
    module = from_onnx(proto)
    assert module.input_names == ("x",)
    wanted = numpy_helper.to_array(proto.graph.initializer[0])
    assert np.array_equal(module(torch.zeros(4)).numpy(), wanted)


def test_functions_of_the_model_are_put_in_place() -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["aa"]), helper.make_node("Neg", ["aa"], ["r"])]
    opsets = [helper.make_opsetid("", 17)]
    function = helper.make_function("own", "Squared", ["a"], ["r"], body, opsets)
    proto = model([helper.make_node("Squared", ["x"], ["y"], domain="own")], {"x": [4]}, ["y"])
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    held_against_onnx_runtime(proto, x=noise(4))


@pytest.mark.parametrize("opset", [17, 2**40])
def test_nodes_that_onnx_itself_does_not_take_are_refused(opset: int) -> None:
    """By inference of types and by its table of versions, each of which raises its own errors."""
    proto = model([node("Shape", "x", "s"), node("Shape", "x", "s t")], {"x": [4]}, ["s"])
    proto.opset_import[0].version = opset
    with pytest.raises(InvalidInputError, match="the operator Shape"):
        from_onnx(proto)


def test_an_attribute_that_is_a_message_gets_into_no_code() -> None:
    proto = convolutional()
    proto.graph.input[0].type.tensor_type.elem_type = 0  # of no type is nothing inferred
    (concat,) = (one for one in proto.graph.node if one.op_type == "Concat")
    concat.attribute[0].type = onnx.AttributeProto.TYPE_PROTO
    with pytest.raises(InvalidInputError, match=r"Concat.* an attribute is a TypeProto"):
        from_onnx(proto)
