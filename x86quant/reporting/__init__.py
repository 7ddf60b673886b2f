"""Reports of compiled models: a summary for the terminal and a page of HTML.

``model_report`` gathers facts, ``page`` and ``charts`` draw them.
"""

from __future__ import annotations

from x86quant.reporting.model_report import LayerFacts, ModelReport, model_report

__all__ = ["LayerFacts", "ModelReport", "model_report"]
