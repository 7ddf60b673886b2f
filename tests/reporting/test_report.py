"""Reports of compiled models: the facts, the page, the summary."""

from __future__ import annotations

import dataclasses
import html.parser
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from tests.lowering.test_lowering import IMAGE
from tests.quantization.test_quantize import Deciding, Encoder
from tests.runtime.compiled_models import compiled
from tests.runtime.test_runtime import FloatMiddle
from x86quant.cli import main
from x86quant.reporting import ModelReport, model_report

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


@dataclasses.dataclass
class Known:
    sqnr_db: float = 12.5
    min: float = -1.0
    max: float = 2.0
    saturation_rate: float = 0.25


@pytest.fixture(scope="module")
def report() -> ModelReport:
    torch.backends.quantized.engine = "onednn"
    module = compiled(FloatMiddle(), *IMAGE)
    precision = {"first": Known(), "last": Known(sqnr_db=float("inf"), saturation_rate=0.0)}
    return model_report(
        module,
        (torch.randn(IMAGE),),
        title="<Net> & co",
        precision=precision,
        notes=[("Search", "kept <first> in float")],
        runs=2,
    )


def page_charts(page: str) -> int:
    return page.count('<div class="chart')


class Page(html.parser.HTMLParser):
    """Tags in order, all text, and what the page would fetch."""

    void = frozenset({"meta", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_every_step_is_a_layer_with_what_is_known(report: ModelReport) -> None:
    by_layer = {layer.layer: layer for layer in report.layers if layer.op.startswith("conv")}
    assert by_layer["first"].sqnr_db == 12.5
    assert by_layer["first"].saturation == 0.25
    assert by_layer["last"].sqnr_db is None, "no noise is no number"
    assert all(layer.microseconds is not None for layer in report.layers)
    assert [layer.op for layer in report.layers if layer.in_float] == ["cumsum (float)"]
    assert report.facts["int8 really ran"].startswith("2 convolutions and matrix products in int8")
    assert report.facts["least precise layer"] == "first: 12.5 dB"


def test_the_page_is_whole_escaped_and_needs_nothing_else(
    report: ModelReport, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    report.write(path)
    parsed = Page(path.read_text())
    assert not parsed.open, "every tag is closed"
    assert not parsed.links
    # Its one script, which sorts the table, is its own; links would show one of others.
    assert parsed.seen.count("script") == 1
    assert page_charts(path.read_text()) == 4  # times by kind and layer, SQNR, saturation
    assert "<Net> & co" in parsed.text
    assert "kept <first> in float" in parsed.text
    assert parsed.seen.count("tr") == 1 + len(report.layers)
    assert list(tmp_path.iterdir()) == [path]


def test_the_summary_is_five_lines_and_says_what_dominates(report: ModelReport) -> None:
    lines = report.summary()
    assert [line.partition(":")[0] for line in lines] == [
        "Speed",
        "Most time",
        "Int8",
        "Precision",
        "Measured on",
    ]
    longest = max(report.layers, key=lambda layer: layer.microseconds or 0.0)
    assert lines[1].startswith(f"Most time: {longest.layer} ")
    assert "2 convolutions and matrix products in int8" in lines[2]
    assert "first: 12.5 dB" in lines[3]
    assert str(report).split("\n\n")[1].splitlines() == lines


def test_what_dominates_comes_first_and_columns_sort(report: ModelReport) -> None:
    page = report.to_html()
    chart = page.split("Time: the longest first")[1].split("</section>")[0]
    drawn = [part.partition("<")[0] for part in chart.split('<span class="name">')[1:]]
    longest = sorted(report.layers, key=lambda layer: -(layer.microseconds or 0.0))
    assert drawn == [f"{layer.layer}: {layer.op}" for layer in longest]
    assert page.count("<th ") == page.count("data-sort=") == 11


def test_poor_layers_are_marked(report: ModelReport) -> None:
    page = report.to_html()
    assert '<td class="n warn" data-value="12.5">12.5</td>' in page
    assert '<td class="n warn" data-value="0.25">25.00%</td>' in page
    assert '<td class="n" data-value="0">0.00%</td>' in page


def test_it_prints_and_round_trips_as_json(report: ModelReport) -> None:
    text = str(report)
    assert "25.00%" in text
    assert "first" in text
    data = json.loads(report.to_json())
    assert len(data["layers"]) == len(report.layers)
    assert data["facts"] == dict(report.facts)


def test_a_compiled_model_writes_its_own(tmp_path: Path) -> None:
    torch.backends.quantized.engine = "onednn"
    module = compiled(nn.Sequential(nn.Conv2d(4, 4, 1)), *IMAGE)
    written = x86quant.report(module, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == written.to_html()
    assert written.facts["inputs"] == "×".join(map(str, IMAGE))


FACTORY = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

def data():
    return [torch.randn(2, 3, 8, 8) for _ in range(3)]
"""


def test_the_command_quantizes_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reported_net.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.html"
    options = ["report", "reported_net:net", "--shape", "2,3,8,8", "--out", str(page)]
    assert main([*options, "--data", "reported_net:data"]) == 0
    assert "SQNR" in capsys.readouterr().out
    assert page_charts(page.read_text()) >= 2  # times and SQNR
    assert main([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"]


def test_times_can_be_left_out() -> None:
    torch.backends.quantized.engine = "onednn"
    module = compiled(nn.Sequential(nn.Conv2d(4, 4, 1)), *IMAGE)
    report = model_report(module, (torch.randn(IMAGE),), runs=0)
    assert all(layer.microseconds is None for layer in report.layers)
    assert "time" not in report.facts
    assert page_charts(report.to_html()) == 0


def test_a_model_of_parts_reports_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Deciding().eval(), torch.randn(4, 3, 8, 8)
    quantized = x86quant.quantize(model, [x, x], progress=False)
    assert not isinstance(quantized, x86quant.CompiledModule)
    written = x86quant.report(quantized, tmp_path / "r.html", float_model=model)
    assert (tmp_path / "r.html").read_text() == written.to_html()
    kernels = {layer.layer: layer.kernel for layer in written.layers}
    assert "native" in kernels.values()
    assert all(name.startswith(("features.", "head")) for name in kernels)
    assert any(layer.sqnr_db is not None for layer in written.layers)
    assert all(layer.microseconds is not None for layer in written.layers)
    assert written.facts["inputs"] == "4×3×8×8"
    assert [heading for heading, _ in written.notes] == ["Quantization"]
    assert {layer.layer for layer in x86quant.explain(quantized)} <= set(kernels)


@pytest.mark.parametrize("mode", ["dynamic", "weight_only"])
def test_a_model_of_int8_layers_reports_each(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(2, 5, 6)
    quantized = x86quant.quantize(model, [x], mode=mode, progress=False)
    report = x86quant.report(quantized, tmp_path / "r.html", float_model=model)
    rows = {layer.layer: layer for layer in report.layers}
    int8 = [name for name, row in rows.items() if not row.in_float]
    assert len(int8) >= 2
    assert [name for name in int8 if rows[name].sqnr_db is not None]
    assert "time" in report.facts


def test_a_report_asks_for_inputs_it_cannot_know(tmp_path: Path) -> None:
    quantized = x86quant.quantize(Encoder().eval(), None, progress=False)
    with pytest.raises(x86quant.InvalidInputError, match="inputs="):
        x86quant.report(quantized, tmp_path / "r.html")
    x = torch.randn(2, 5, 6)
    assert x86quant.report(quantized, tmp_path / "r.html", x, runs=0).layers
