"""The wheel that tools/wheel.py writes: the same bytes of the same files, and what they are."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import zipfile
from pathlib import Path

import pytest

from tools import wheel_files, wheel_sbom
from tools.wheel import parts_for_others

INFO = "x86quant-1.2.dist-info"
METADATA = (
    "Metadata-Version: 2.4\nName: x86quant\nVersion: 1.2\nSummary: s\nLicense-Expression: MIT\n"
)
FILES = {
    "x86quant/__init__.py": b"one",
    "x86quant/_C.so": b"two",
    "x86quant/libx86quant_runtime.so": b"three",
    f"{INFO}/METADATA": METADATA.encode(),
    f"{INFO}/RECORD": b"stale",
}


def wheel(path: Path, seed: int) -> Path:
    names = list(FILES)
    random.Random(seed).shuffle(names)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name, (2000 + seed, 1, 1, 0, 0, 0)), FILES[name])
    return path


def test_order_and_times_of_a_build_do_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    one, two = wheel(tmp_path / "1.whl", 1), wheel(tmp_path / "2.whl", 2)
    assert one.read_bytes() != two.read_bytes()
    for path in (one, two):
        wheel_files.rewrite(path, {f"{INFO}/sboms/a.json": b"{}"})
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}
        assert archive.infolist()[-1].filename.startswith(INFO)


def test_record_names_every_file_with_its_hash(tmp_path: Path) -> None:
    path = wheel(tmp_path / "1.whl", 1)
    wheel_files.rewrite(path, {f"{INFO}/sboms/a.json": b"{}"})
    files = wheel_files.contents(path)
    lines = files[f"{INFO}/RECORD"].decode().splitlines()
    rows = dict(line.split(",", 1) for line in lines)
    assert set(rows) == set(files) == {*FILES, f"{INFO}/sboms/a.json"}
    assert rows.pop(f"{INFO}/RECORD") == ","
    for name, row in rows.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode()
        assert row == f"sha256={digest.rstrip('=')},{len(files[name])}"


def test_parts_for_other_torchs_are_taken_from_other_wheels(tmp_path: Path) -> None:
    ours, theirs = (tmp_path / folder / "x-1-cp310-abi3-any.whl" for folder in ("a", "b"))
    for path in (ours, theirs):
        path.parent.mkdir()
        wheel(path, 1)
    new = {
        "x86quant/_stock_torch_2_14.so": b"stock",
        "x86quant/_fast_torch_2_14_cpython_311.so": b"fast",
        "x86quant/_other.so": b"no part",
    }
    wheel_files.rewrite(theirs, {**new, "x86quant/_C.so": b"another"})
    files = wheel_files.contents(ours)
    found = parts_for_others(ours, files, [theirs])
    assert set(found) == set(new) - {"x86quant/_other.so"}
    assert parts_for_others(ours, {**files, **found}, [theirs]) == {}
    with pytest.raises(SystemExit, match=r"y\.whl is not of what"):
        parts_for_others(ours, files, [tmp_path / "y.whl"])


def test_the_bill_names_the_package_its_libraries_and_torchs_headers() -> None:
    made = wheel_sbom.sbom(FILES, torch="2.13.0+cpu", compiler="g++ 12")
    assert made == wheel_sbom.sbom(FILES, torch="2.13.0+cpu", compiler="g++ 12")
    bill = json.loads(made)
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/x86quant@1.2"
    parts = {part["name"]: part for part in bill["components"]}
    assert set(parts) == {"x86quant/_C.so", "x86quant/libx86quant_runtime.so", "torch"}
    hashed = parts["x86quant/_C.so"]["hashes"][0]
    assert hashed == {"alg": "SHA-256", "content": hashlib.sha256(b"two").hexdigest()}
    other = json.loads(wheel_sbom.sbom(FILES, torch="2.14.1", compiler="g++ 12"))
    assert other["serialNumber"] != bill["serialNumber"]
