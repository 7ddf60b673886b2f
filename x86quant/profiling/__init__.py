"""What a compiled model runs, step by step, how long each step takes, and how long it could take.

``recorder`` runs a compiled model and says what ran; ``roofline`` measures what this CPU can do;
``profiler`` puts both together; ``trace`` writes it for a trace viewer.
"""

from __future__ import annotations

from x86quant.profiling.profiler import Profile, ProfiledStep, ProfileSummary, profile
from x86quant.profiling.roofline import Roofline, measure_roofline

__all__ = ["Profile", "ProfileSummary", "ProfiledStep", "Roofline", "measure_roofline", "profile"]
