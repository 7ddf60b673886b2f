"""Reports on models: a summary for the terminal and a page of HTML.

``model_report`` gathers facts, ``page`` and ``charts`` draw them, ``report`` does it all.
"""

from __future__ import annotations

from x86quant.reporting.facts import LayerFacts, ModelReport
from x86quant.reporting.model_report import model_report
from x86quant.reporting.written import report

__all__ = ["LayerFacts", "ModelReport", "model_report", "report"]
