"""The float model beside the int8 one, in a report."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from tests.reporting.test_report import Page
from x86quant.cli import main
from x86quant.reporting import ModelReport
from x86quant.reporting.beside_float import noise_shares
from x86quant.reporting.output_terms import agreement, outcome
from x86quant.reporting.pictures import class_map, picture

MODULE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 25, 10),
    ).eval()

def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 1, 12, 12, generator=generator) for _ in range(3)]
"""


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, list[torch.Tensor]]:
    space: dict[str, object] = {}
    exec(MODULE, space)
    return space["net"](), space["batches"]()  # type: ignore[operator]


@pytest.fixture(scope="module")
def report(
    made: tuple[nn.Module, list[torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> ModelReport:
    net, batches = made
    int8 = x86quant.quantize(net, batches, speed_check=False)
    path = tmp_path_factory.mktemp("report") / "page.html"
    return x86quant.report(int8, path, float_model=net, data=batches, runs=2, progress=False)


def test_both_times_are_told_for_the_whole_and_by_layer(report: ModelReport) -> None:
    assert report.beside is not None
    assert report.beside.float_time is not None
    assert report.facts["beside float"].startswith("float takes ")
    by_layer = {layer.layer: layer for layer in report.layers}
    assert all(by_layer[name].float_us for name in ("0", "2", "5"))
    assert "float takes" in report.summary()[0]


def test_outputs_are_judged_in_their_own_terms(report: ModelReport) -> None:
    assert report.beside is not None
    (output,) = report.beside.outputs
    assert output.sqnr_db > 20
    assert "the largest value is the same one in" in output.told
    probabilities = torch.tensor([[0.75, 0.25], [0.125, 0.875]])
    told = agreement(probabilities, probabilities.flip(0), 3.0)
    assert told.startswith("probabilities of 2 classes")
    assert "in 0.0% of 2" in told
    told = agreement(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 5.5]), 11.0)
    assert told.endswith("apart by 25.00% of a typical value")


def test_noise_has_shares_gains_and_costs(report: ModelReport) -> None:
    assert report.beside is not None
    assert {one.layer for one in report.beside.noise} == {"0", "2", "5"}
    assert math.isclose(sum(one.share for one in report.beside.noise), 1.0)
    assert all(one.cost_us is not None for one in report.beside.noise)
    loud, quiet = noise_shares({"a": ("Conv2d", 10.0), "b": ("Linear", 13.0103)}, {"a": 9.0}, {})
    assert (loud.layer, loud.cost_us) == ("a", None)
    assert math.isclose(loud.share, 2 / 3, rel_tol=1e-4)
    assert math.isclose(loud.gain_db, 10 * math.log10(3), rel_tol=1e-4)
    assert quiet.share < loud.share


def test_the_worst_samples_come_first_with_their_pictures(
    made: tuple[nn.Module, list[torch.Tensor]], report: ModelReport
) -> None:
    assert report.beside is not None
    samples = report.beside.samples
    assert len(samples) == 4
    assert [s.sqnr_db for s in samples] == sorted(s.sqnr_db for s in samples)
    net, batches = made
    row = torch.cat(batches)[samples[0].number]
    with torch.no_grad():
        assert samples[0].exact == outcome(net(row[None])[0])
    ((what, url),) = samples[0].pictures
    assert (what, url) == ("input", picture(row))


def test_the_page_shows_all_of_it_and_is_whole(report: ModelReport) -> None:
    page = report.to_html()
    Page.void |= {"img"}
    parsed = Page(page)
    assert not parsed.open
    assert all(link.startswith("data:image/png;base64,") for link in parsed.links)
    assert parsed.seen.count("img") == 4
    for heading in ("A call", "Agreement with float", "Where the noise is made"):
        assert heading in parsed.text
    assert not any(text.strip() == "0.00%" for text in parsed.text[: parsed.text.index("Layers")])
    assert json.loads(report.to_json())["beside"]["outputs"][0]["number"] == 0


def test_pictures_are_png() -> None:
    from PIL import Image

    grey = torch.arange(64.0).view(1, 8, 8)
    data = base64.b64decode(picture(grey).partition(",")[2])
    assert data.startswith(b"\x89PNG")
    import io

    decoded = Image.open(io.BytesIO(data))
    assert decoded.size == (8, 8)
    assert [decoded.getpixel((0, 0)), decoded.getpixel((7, 7))] == [0, 255]
    classes = torch.zeros(3, 8, 8)
    classes[2, 0, 0] = 1
    decoded = Image.open(io.BytesIO(base64.b64decode(class_map(classes).partition(",")[2])))
    assert decoded.getpixel((0, 0)) == 255


def test_the_command_takes_data_alone_and_a_saved_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reported.py").write_text(MODULE)
    assert main(["report", "reported:net", "--data", "reported:batches", "--out", "a.html"]) == 0
    assert "float takes" in capsys.readouterr().out
    import importlib

    module = importlib.import_module("reported")
    int8 = x86quant.quantize(module.net(), module.batches(), speed_check=False)
    x86quant.save(int8, "net.x86q")
    assert main(["report", "net.x86q", "--out", "b.html"]) == 0
    assert "not compared with a float model" in capsys.readouterr().out
    command = ["report", "net.x86q", "--float", "reported:net", "--data", "reported:batches"]
    assert main([*command, "--out", "c.html"]) == 0
    assert "dB at the output" in capsys.readouterr().out
    assert all((tmp_path / f"{name}.html").stat().st_size for name in "abc")
