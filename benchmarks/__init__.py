"""Measurements behind every claim about speed. Run them as ``python -m benchmarks.<name>``."""
