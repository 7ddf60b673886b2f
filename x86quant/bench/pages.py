"""All that a folder of results gets."""

from __future__ import annotations

from pathlib import Path

from x86quant.bench.results import RESULTS_FILE, BenchResults
from x86quant.bench.summary_page import results_page
from x86quant.bench.summary_plot import plot_png
from x86quant.bench.summary_text import as_csv, markdown
from x86quant.files import write_aside


def write_pages(results: BenchResults, folder: Path) -> None:
    """``results.json``, ``.csv``, ``report.html``, ``.md``, ``plot.png``: each as a whole."""
    write_aside(folder / RESULTS_FILE, results.to_json())
    write_aside(folder / "report.html", results_page(results))
    write_aside(folder / "report.md", markdown(results))
    write_aside(folder / "results.csv", as_csv(results))
    if (drawn := plot_png(results)) is not None:
        write_aside(folder / "plot.png", drawn)
