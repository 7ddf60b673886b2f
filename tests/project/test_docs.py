"""Every python block of the README and of docs/ runs, page by page, in order.

A page's blocks share one namespace, which starts with the names below, "your model" and the like.
A block that cannot run here says why in a comment before it: ``<!-- not run: the reason -->``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.routing import in_force

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Runs where there is a cluster already: tests/ray/test_ray.py.
_ON_A_CLUSTER = "ray"
_BLOCK = re.compile(
    r"^(<!-- not run: (?P<why>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```", re.M | re.S
)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The blocks of a page that run, with the lines they start at."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start("code")].count("\n"), found["code"])
        for found in _BLOCK.finditer(text)
        if found["why"] is None
    ]


def given() -> dict[str, Any]:
    """What pages take for granted: a model, data, and the stock workflow on them."""
    from torch.ao.quantization.quantize_fx import (
        convert_fx,
        convert_to_reference_fx,
        prepare_fx,
    )

    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *head).eval()
    x = torch.randn(4, 3, 16, 16)
    loader = [torch.randn(4, 3, 16, 16) for _ in range(2)]
    mapping = x86quant.get_default_qconfig_mapping(observer="minmax")
    prepared = prepare_fx(model, mapping, (x,))
    prepared(x)
    converted = convert_to_reference_fx(prepared)
    Path("mine.toml").write_text((ROOT / "rules" / "default.toml").read_text())
    return {
        "torch": torch,
        "x86quant": x86quant,
        "prepare_fx": prepare_fx,
        "convert_fx": convert_fx,
        "model": model,
        "x": x,
        "example": x,
        "example_inputs": (x,),
        "loader": loader,
        "batches": loader,
        "calibrate": lambda prepared: prepared(x),
        "train": lambda prepared: prepared(x),
        "accuracy": lambda model: float(-model(x).abs().mean()),
        "converted": converted,
        "int8": x86quant.compile(converted, (x,)),
        "labels": ["one", "two", "three", "four"],
    }


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    engine = torch.backends.quantized.engine
    yield
    torch.backends.quantized.engine = engine
    x86quant.disable()
    in_force._tables.clear()
    in_force._overrides.clear()


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page) and page.stem != _ON_A_CLUSTER],
    ids=lambda page: page.stem,
)
def test_the_blocks_of_a_page_run(page: Path) -> None:
    names = given()
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)


def test_links_and_pages_of_the_site_agree() -> None:
    """Every page is in the menu; the build itself is strict about links."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES[1:] if f" {page.name}\n" not in menu]
