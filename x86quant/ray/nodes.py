"""The machines of a Ray cluster, and whether x86quant is on each of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from x86quant.errors import UnsupportedError
from x86quant.version import __version__

Node = dict[str, Any]

#: Seconds for the first process on a node to answer.
_PATIENCE = 120.0


def alive() -> list[Node]:
    """The nodes that can run something."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def name_of(node: Node) -> str:
    """What people know a node by."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"


def only_on(node: Node) -> NodeAffinitySchedulingStrategy:
    """The strategy that runs something on this node and on no other."""
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def ask_each(nodes: Sequence[Node], question: Callable[[], Any]) -> list[Any]:
    """The answer of each node, also of one whose CPUs are taken; or the error that it ended in."""
    task = ray.remote(num_cpus=0, max_retries=1)(lambda: question())
    asked = [task.options(scheduling_strategy=only_on(node)).remote() for node in nodes]
    answers: list[Any] = []
    for answer in asked:
        try:
            answers.append(ray.get(answer, timeout=_PATIENCE))
        except RayError as error:
            answers.append(error)
    return answers


def check_packages(nodes: Sequence[Node]) -> None:
    """See that each node has this x86quant and this torch.

    Raises:
        UnsupportedError: one has not; the message names each such node.
    """
    wanted = {"x86quant": __version__, "torch": _public(importlib.metadata.version("torch"))}

    # Defined here, it travels as code: a node without x86quant could not import it.
    def versions() -> dict[str, str | None]:
        import importlib.metadata

        found: dict[str, str | None] = {"torch": None, "x86quant": None}
        try:
            found["torch"] = importlib.metadata.version("torch")
            from x86quant.version import __version__ as there

            found["x86quant"] = there
        except ImportError:
            pass
        return found

    problems = []
    for node, found in zip(nodes, ask_each(nodes, versions), strict=True):
        if isinstance(found, RayError):
            problems.append(f"{name_of(node)} does not answer: {last_line(found)}")
            continue
        for package, version in found.items():
            if version is None:
                problems.append(f"{name_of(node)} has no {package}")
            elif _public(version) != wanted[package]:
                problems.append(f"{name_of(node)} has {package} {version}")
    if problems:
        raise UnsupportedError(
            f"every node needs x86quant {__version__} with torch {wanted['torch']}, as here, but "
            f"{'; '.join(problems)}. Install them there, or put them into the cluster's image"
        )


def last_line(error: BaseException) -> str:
    """What went wrong, of a message that may hold a whole traceback."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)


def _public(version: str) -> str:
    """Without the name of the build."""
    return version.partition("+")[0]
