"""A node of an ONNX graph, with its attributes as Python has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from x86quant.errors import UnsupportedError, first_line
from x86quant.onnx_models.operator_table import NEWEST
from x86quant.onnx_models.reading import STANDARD, OnnxFile

if TYPE_CHECKING:
    from onnx import NodeProto
    from onnx.defs import OpSchema


@dataclasses.dataclass(frozen=True)
class NodeView:
    """A node.

    Attributes:
        proto: as it is in the file.
        domain: of its operator, "" for ONNX's own.
        version: in which the operator became what it is.
        schema: what ONNX knows of it, if that is anything.
        attributes: with the operator's defaults for those left out.
        given: the names of those that were not left out.
    """

    proto: NodeProto
    domain: str
    version: int
    schema: OpSchema | None
    attributes: Mapping[str, Any]
    given: frozenset[str]

    @property
    def op_type(self) -> str:
        """The name of its operator."""
        return str(self.proto.op_type)

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs, "" for those left out."""
        return list(self.proto.input)

    @property
    def outputs(self) -> list[str]:
        """The names of its results, "" for those that nobody wants."""
        return list(self.proto.output)

    @property
    def label(self) -> str:
        """The node, for messages."""
        domain = f"{self.domain}." if self.domain else ""
        named = self.proto.name or next(iter(self.outputs), "")
        return f"{domain}{self.op_type} (version {self.version}, node {named!r})"

    def protos(self) -> dict[str, Any]:
        """Its attributes, and the defaults of those left out, as ONNX has them."""
        usual = {} if self.schema is None else self.schema.attributes
        found = {n: one.default_value for n, one in usual.items() if one.default_value.type}
        return found | {one.name: one for one in self.proto.attribute}

    def refusal(self, reason: str) -> UnsupportedError:
        """The error that says why this node is not read."""
        return UnsupportedError(f"the operator {self.label} is not read: {reason}")


def view(
    proto: NodeProto, file: OnnxFile, opsets: Mapping[str, int], around: Mapping[str, Any]
) -> NodeView:
    """``proto``, in a graph of these versions; in a function's body, attributes are ``around``.

    Raises:
        UnsupportedError: its operator is newer than what is known.
    """
    from onnx import defs

    domain = "" if proto.domain in STANDARD else proto.domain
    asked = opsets.get(domain, 1)
    try:
        schema = defs.get_schema(proto.op_type, asked, domain)
    except defs.SchemaError:
        schema = None
    version = asked if schema is None else schema.since_version
    attributes: dict[str, Any] = {}
    if schema is not None:
        for name, one in schema.attributes.items():
            if one.default_value.type:
                attributes[name] = _value(one.default_value, file)
    given = set()
    proto = _without_references(proto, around)
    for one in proto.attribute:
        attributes[one.name] = _value(one, file)
        given.add(one.name)
    found = NodeView(proto, domain, version, schema, attributes, frozenset(given))
    if schema is not None and not domain and version > NEWEST:
        raise found.refusal(f"versions up to {NEWEST} are known")
    return found


def _without_references(proto: NodeProto, around: Mapping[str, Any]) -> NodeProto:
    """``proto`` with the attributes of the node whose body it stands in."""
    if not any(one.ref_attr_name for one in proto.attribute):
        return proto
    found = type(proto)()
    found.CopyFrom(proto)
    del found.attribute[:]
    for one in proto.attribute:
        if not one.ref_attr_name:
            found.attribute.append(one)
        elif one.ref_attr_name in around:
            found.attribute.append(around[one.ref_attr_name])
            found.attribute[-1].name = one.name
    return found


def _value(attribute: Any, file: OnnxFile) -> Any:
    from onnx import AttributeProto, helper

    if attribute.type == AttributeProto.TENSOR:
        return file.tensor(attribute.t)
    try:
        value = helper.get_attribute_value(attribute)
    except ValueError as error:
        raise UnsupportedError(
            f"{file.name}: the attribute {attribute.name!r} cannot be read: {first_line(error)}"
        ) from error
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if attribute.type == AttributeProto.STRINGS:
        return [one.decode("utf-8", errors="replace") for one in value]
    if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
        return list(value)
    return value
