"""The node tests of the package onnx, by operator: passed, refused by name, wrong.

    python -m benchmarks.onnx_node_tests [--only NAME] [--verbose]

Each test is a model of one node, or a few, with inputs and the results that ONNX's own definition
gives. A model that is refused must be refused in a sentence that names the operator. Ends with
status 1 if any result is wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from x86quant.errors import UnsupportedError
from x86quant.onnx_models import from_onnx

#: How exact a sum can be, by type, as a share of the greatest value.
_STEPS = {"float16": 2e-3}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a test."""

    name: str
    operator: str
    kind: str  # "passed", "refused" or "wrong"
    detail: str = ""


def cases() -> list[Any]:
    """Every node test."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, at overflows that the tests are about
        return load_model_tests(kind="node")


def operator_of(case: Any) -> str:
    """The operator that a test is about."""
    nodes = case.model.graph.node
    known = {f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in nodes}
    if len(nodes) == 1:
        return known.pop()
    return "definitions by other operators" if "_expanded" in case.name else "several"


def verdict(case: Any) -> Verdict:
    """Read the model of ``case``, run it and compare."""
    named = operator_of(case)
    try:
        module = from_onnx(case.model)
    except UnsupportedError as error:
        text = str(error)
        return Verdict(case.name, named, "refused", text)
    except Exception as error:
        return Verdict(case.name, named, "wrong", f"{type(error).__name__}: {error}")
    for inputs, wanted in case.data_sets:
        try:
            with torch.no_grad():
                found = module(*map(_given, inputs))
        except Exception as error:
            return Verdict(case.name, named, "wrong", f"{type(error).__name__}: {error}")
        found = found if isinstance(found, tuple) else (found,)
        for mine, right in zip(found, wanted, strict=True):
            problem = _difference(mine, right, case.rtol, case.atol)
            if problem:
                return Verdict(case.name, named, "wrong", problem)
    return Verdict(case.name, named, "passed")


def _given(value: Any) -> Any:
    if isinstance(value, list):
        return [_given(one) for one in value]
    if type(value).__name__ == "TensorProto":
        from onnx import numpy_helper

        value = numpy_helper.to_array(value)
    if isinstance(value, np.ndarray):
        if value.dtype.name == "bfloat16":
            return torch.from_numpy(value.astype(np.float32)).to(torch.bfloat16)
        return torch.from_numpy(np.array(value))
    return value if value is None else torch.tensor(value)


def _difference(mine: Any, right: Any, rtol: float, atol: float) -> str:
    """What is wrong about ``mine``; "" if nothing is."""
    if isinstance(right, list):
        if not isinstance(mine, list | tuple) or len(mine) != len(right):
            return f"{len(mine)} elements instead of {len(right)}"
        found = (_difference(a, b, rtol, atol) for a, b in zip(mine, right, strict=True))
        return next(filter(None, found), "")
    if not isinstance(mine, torch.Tensor):
        return f"{type(mine).__name__} instead of a tensor"
    own = (mine.float() if mine.dtype is torch.bfloat16 else mine).numpy()
    if type(right).__name__ == "TensorProto":
        from onnx import numpy_helper

        right = numpy_helper.to_array(right)
    right = np.asarray(right)
    if right.dtype.name == "bfloat16":
        right, rtol = right.astype(np.float32), max(rtol, 2**-6)
    if own.shape != right.shape or own.dtype != right.dtype:
        return f"{own.dtype}{own.shape} instead of {right.dtype}{right.shape}"
    if right.dtype.kind == "f" and right.size:  # of sums of such values nothing smaller is known
        finite = np.abs(right[np.isfinite(right)].astype(np.float64))
        atol = max(atol, _STEPS.get(right.dtype.name, 1e-6) * float(finite.max(initial=0.0)))
    try:
        np.testing.assert_allclose(own, right, rtol=rtol, atol=atol)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""


def verdicts(only: str = "") -> Iterator[Verdict]:
    """Of all tests, or those whose names contain ``only``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases():
            if only in case.name:
                yield verdict(case)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="tests whose names contain this")
    parser.add_argument("--verbose", action="store_true", help="say what was refused and why")
    options = parser.parse_args()
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    total: collections.Counter[str] = collections.Counter()
    for one in verdicts(options.only):
        table[one.operator][one.kind] += 1
        total[one.kind] += 1
        if one.kind == "wrong" or (options.verbose and one.kind == "refused"):
            print(f"{one.kind}: {one.name}: {one.detail}")
    print(f"{'operator':34}{'passed':>8}{'refused':>9}{'wrong':>7}")
    for name, counts in sorted(table.items()):
        print(f"{name:34}{counts['passed']:8}{counts['refused']:9}{counts['wrong']:7}")
    print(f"{'all':34}{total['passed']:8}{total['refused']:9}{total['wrong']:7}")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
