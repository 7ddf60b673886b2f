"""Runs a lowered graph: segments of int8 ops in one native call each, torch for whatever is left.

::

    graph of x86quant ops ── partition ──▶ segments and float nodes
    segment + input shapes ── plan ──▶ steps on tensors of an arena ── program ──▶ C++

A plan is made for one set of input shapes and kept; packed weights are shared between plans.
"""

from __future__ import annotations

from x86quant.runtime.partition import partition
from x86quant.runtime.plan import Plan
from x86quant.runtime.segment import Segment

__all__ = ["Plan", "Segment", "partition"]
