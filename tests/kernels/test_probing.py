"""Versions of libraries that are on record, and trying those that are not."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from x86quant.errors import X86QuantWarning
from x86quant.hardware.cpu import cpu
from x86quant.kernels import all_kernels, saturation
from x86quant.kernels.probing import libraries, random_layers, trial
from x86quant.kernels.probing.libraries import LIBRARIES, judged_as
from x86quant.spec import OpSpec
from x86quant.tables.errata import read_errata

DENSE = OpSpec("conv2d", 8, 8, 1, (3, 3), (1, 1), (1, 1), (1, 1))
LINEAR = OpSpec("linear", 8, 8)


@pytest.fixture
def off_record(monkeypatch, tmp_path):
    """No version of any library is on record, and nothing was tried yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries, "_record", lambda: dict.fromkeys(LIBRARIES, ()))
    trial._tried.cache_clear()
    yield tmp_path
    trial._tried.cache_clear()


def answering(monkeypatch, *outcomes):
    """Processes that answer so, one after another: lines and an exit code; the commands given."""
    commands, left = [], list(outcomes)

    def run(command, **options):
        commands.append(command)
        lines, code = left.pop(0)
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        return subprocess.CompletedProcess(command, code, text, "died" if code else "")

    monkeypatch.setattr(trial.subprocess, "run", run)
    return commands


def ran(name, **found):
    return [{"begins": name}, {"part": name, **found}]


def exact(family, layout="none"):
    return ran(f"sums {family}", instructions=cpu().isa, layout=layout)


def reasons(kernel, spec):
    return all_kernels()[kernel].not_supported_reasons(spec, cpu())


def test_what_is_installed_is_on_record_and_nothing_is_tried(monkeypatch):
    commands = answering(monkeypatch)
    assert all(libraries.on_record(library) for library in LIBRARIES)
    assert [trial.of(library) for library in LIBRARIES] == [None] * 3
    assert libraries.on_record("native")
    assert not commands


def test_a_trial_of_what_is_installed_finds_what_is_on_record(off_record):
    with pytest.warns(X86QuantWarning, match="tried out now, once"):
        tried = trial.of("qnnpack")
    assert tried is not None
    assert tried.failed is None
    assert not tried.wrong
    assert {family for family, _ in tried.layouts} >= {"linear", "dense", "grouped", "depthwise"}
    for (family, instructions), layout in tried.layouts.items():
        assert layout == saturation.probed_layout("qnnpack", family, instructions)
    assert not reasons("qnnpack", DENSE)


def test_a_trial_is_kept_for_later_processes(off_record, monkeypatch):
    commands = answering(monkeypatch, (exact("dense"), 0))
    with pytest.warns(X86QuantWarning):
        first = trial.of("onednn")
    trial._tried.cache_clear()
    assert trial.of("onednn") == first
    assert len(commands) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "parts": [{}]}',
                                  '{"schema": 0, "parts": []}'])  # fmt: skip
def test_a_broken_file_of_a_trial_is_no_trial(off_record, monkeypatch, text):
    answering(monkeypatch, (exact("dense"), 0), (exact("dense"), 0))
    with pytest.warns(X86QuantWarning):
        trial.of("onednn")
    (file,) = (off_record / "x86quant" / "trials").iterdir()
    file.write_text(text)
    trial._tried.cache_clear()
    with pytest.warns(X86QuantWarning):
        assert trial.of("onednn").layouts


def test_a_family_that_was_wrong_is_not_legal_and_others_are(off_record, monkeypatch):
    why = "9 steps off on conv2d 8→8"
    lines = [*exact("dense"), *exact("linear"), *ran("layers conv2d dense", why=why)]
    answering(monkeypatch, (lines, 0))
    with pytest.warns(X86QuantWarning):
        (reason,) = reasons("onednn", DENSE)
    assert "not on record" in reason
    assert why in reason
    assert not reasons("onednn", LINEAR)
    assert not reasons("onednn", DENSE.replace(op="conv1d", kernel=(3,), stride=(1,),
                                               padding=(1,), dilation=(1,)))  # fmt: skip


def test_sums_that_were_not_seen_are_not_legal(off_record, monkeypatch):
    lines = [*exact("linear"), *ran("sums dense", why="three products share a sum")]
    answering(monkeypatch, (lines, 0))
    with pytest.warns(X86QuantWarning):
        (reason,) = reasons("onednn", DENSE)
    assert "three products" in reason
    (unseen,) = reasons("onednn", DENSE.replace(in_channels=16, out_channels=16, groups=2))
    assert "were not seen" in unseen


def test_a_layout_seen_here_counts_where_it_is_less_exact(off_record, monkeypatch):
    answering(monkeypatch, (exact("dense", saturation.ANY), 0))
    weight = torch.full((8, 8, 3, 3), 127, dtype=torch.int8)
    spec = DENSE.replace(weights=saturation.weight_facts(weight))
    with pytest.warns(X86QuantWarning):
        (reason,) = reasons("onednn", spec)
    assert "saturate" in reason


def test_a_process_that_dies_costs_the_part_it_died_in(off_record, monkeypatch):
    died = ([*exact("dense"), {"begins": "layers conv2d dense"}], -11)
    commands = answering(monkeypatch, died, (exact("linear"), 0))
    with pytest.warns(X86QuantWarning):
        (reason,) = reasons("onednn", DENSE)
    assert "ended with code -11" in reason
    assert commands[1][-2:] == ["sums dense", "layers conv2d dense"]
    assert not reasons("onednn", LINEAR)


def test_where_nothing_can_be_tried_nothing_is_legal_and_nothing_is_kept(off_record, monkeypatch):
    answering(monkeypatch, ([], 1))
    with pytest.warns(X86QuantWarning):
        (reason,) = reasons("onednn", LINEAR)
    assert "could not be tried out: died" in reason
    assert not (off_record / "x86quant" / "trials").exists()


def test_a_kernel_that_is_off_by_more_than_a_step_is_noticed(monkeypatch):
    right = random_layers.run

    def off(kernel, spec, *operands):
        codes = right(kernel, spec, *operands).int()
        return codes + (2 if spec.stride == (2, 2) else 0)

    families = {
        (op, family): specs
        for op, family, specs in random_layers.families(all_kernels()["qnnpack"], lambda _: True)
    }
    specs = families["conv2d", "dense"]
    assert random_layers.first_wrong("qnnpack", specs) is None
    monkeypatch.setattr(random_layers, "run", off)
    found = random_layers.first_wrong("qnnpack", specs)
    assert found is not None
    assert found.spec.stride == (2, 2)
    assert "2 steps off" in str(found)


def test_errata_of_the_newest_torch_on_record_count_for_newer_ones():
    assert judged_as("2.13.0+cpu") == "2.13.0+cpu"
    assert judged_as("2.14.1") == "2.14.1"
    assert judged_as("2.15.0+cu132") == judged_as("3.0") == "2.14"
    newest = read_errata("2.14.1")
    assert newest
    assert read_errata(judged_as("2.15.0")) == newest
    assert read_errata("2.15.0") != newest  # so that it matters


def test_onednn_has_a_version_of_its_own():
    assert libraries.version("onednn").count(".") == 2
    assert libraries.version("fbgemm") == libraries.release(torch.__version__)
