"""What the CPU can do, on recorded CPUs and on this one."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from cpuinfo import cpuinfo

import x86quant
from tests.stock_tensors import run_python
from x86quant.errors import CpuError
from x86quant.hardware import amx_probe, cpuid
from x86quant.hardware import cpu as cpu_info
from x86quant.hardware.allowance import Allowance, cpu_quota, fast_cpus
from x86quant.hardware.cpu import classify
from x86quant.hardware.isa import LEVELS, best_level, capped_features

# Family, model, brand and flags as Linux shows them. Entries with a source are whole; of the
# others' flags only those are kept that bear on int8.
RECORDED = [
    {**recorded, "flags": recorded["flags"].split()}
    for recorded in json.loads((Path(__file__).parents[1] / "cpus.json").read_text())
]
WHOLE = [recorded for recorded in RECORDED if "source" in recorded]
HERE = x86quant.cpu()


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r["what"])
def test_recorded_cpus_are_classified(recorded):
    found = classify(recorded)
    assert found.isa == recorded["isa"]
    assert found.vendor == recorded["vendor_id_raw"]
    assert (found.family, found.model) == (recorded["family"], recorded["model"])
    assert found.vnni == (recorded["isa"] in ("avx_vnni", "avx512_vnni", "amx_int8"))
    assert found.amx == (recorded["isa"] == "amx_int8")
    assert LEVELS[found.isa].features <= found.features


@pytest.mark.parametrize("recorded", WHOLE, ids=lambda r: r["what"])
def test_proc_cpuinfo_of_recorded_cpus_is_read(recorded, monkeypatch):
    text = "processor\t: 0\n" + "".join(
        f"{name}\t: {value}\n"
        for name, value in {
            "vendor_id": recorded["vendor_id_raw"],
            "cpu family": recorded["family"],
            "model": recorded["model"],
            "model name": recorded["brand_raw"],
            "stepping": recorded["stepping"],
            "flags": " ".join(recorded["flags"]),
            "vmx flags": "vnmi ept_ad",
        }.items()
    )
    monkeypatch.setattr(cpuinfo.DataSource, "cat_proc_cpuinfo", lambda: (0, text))
    found = classify(cpu_info._describe())
    assert found.isa == recorded["isa"]
    assert (found.vendor, found.name) == (recorded["vendor_id_raw"], recorded["brand_raw"])
    numbers = (recorded["family"], recorded["model"], recorded["stepping"])
    assert (found.family, found.model, found.stepping) == numbers


# The first registers of CPUID's leaf 1, as published for these CPUs.
@pytest.mark.parametrize(
    ("signature", "numbers"),
    [
        (0x000306C3, (6, 60, 3)),  # Haswell
        (0x000806F8, (6, 143, 8)),  # Sapphire Rapids
        (0x00800F12, (23, 1, 2)),  # Zen
        (0x00A00F11, (25, 1, 1)),  # Zen 3, server
        (0x00B00F21, (26, 2, 1)),  # Zen 5, server
    ],
)
def test_cpuid_is_decoded(signature, numbers):
    brand = b"AMD EPYC 7763  64-Core Processor  ".ljust(48, b"\0")
    b, d, c = struct.unpack("<3I", b"AuthenticAMD")
    leaves = {
        0: (16, b, c, d),
        1: (signature, 0, 0, 0),
        0x80000000: (0x8000001F, 0, 0, 0),
        **{0x80000002 + n: struct.unpack_from("<4I", brand, 16 * n) for n in range(3)},
    }
    found = cpuid.decode(leaves.__getitem__)
    assert found["vendor_id_raw"] == "AuthenticAMD"
    assert found["brand_raw"] == "AMD EPYC 7763 64-Core Processor"
    assert (found["family"], found["model"], found["stepping"]) == numbers
    leaves[0x80000000] = (0x80000001, 0, 0, 0)  # a CPU that does not tell its name
    assert "brand_raw" not in cpuid.decode(leaves.__getitem__)


def test_this_cpu_is_the_one_that_this_process_sees():
    """An emulator of user programs leaves the system's files as they are."""
    seen = cpuid.identity()
    assert seen is not None
    assert (HERE.vendor, HERE.family, HERE.model) == (
        seen["vendor_id_raw"],
        seen["family"],
        seen["model"],
    )


def test_cpuid_counts_where_the_system_describes_another_cpu():
    granite = next(r for r in RECORDED if r["what"] == "Granite Rapids")
    milan = {"vendor_id_raw": "AuthenticAMD", "family": 25, "model": 1, "stepping": 1}
    torch_sees = {"avx2": True, "fma3": True, "avx512_f": False, "l2_cache_size": 524288}
    both = cpu_info._confirmed_by_cpuid(granite, milan, torch_sees)
    assert both[0] == {**milan, "flags": ["avx2", "fma3"]}
    assert classify(both[0]).isa == "avx2"
    assert "describes another CPU (Intel(R) Xeon(R) 6972P)" in both[1][0]
    # The other way round: a new CPU emulated on an old one.
    flags = ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni")
    haswell, _ = cpu_info._confirmed_by_cpuid(RECORDED[0], milan, dict.fromkeys(flags, True))
    assert classify(haswell).isa == "avx512_vnni"
    # The same CPU, and one that cannot be asked: the system's word.
    same = {key: granite[key] for key in ("vendor_id_raw", "family", "model")}
    for seen in (same, None):
        assert cpu_info._confirmed_by_cpuid(granite, seen, torch_sees) == (granite, ())


def test_zen5_has_both_kinds_of_vnni():
    zen5 = next(r for r in RECORDED if "Zen 5, server" in r["what"])
    assert {"avx_vnni", "avx512_vnni"} <= classify(zen5).features


def test_py_cpuinfos_other_spellings_count():
    flags = ["avx2", "fma3", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"]
    assert classify({"flags": flags}).isa == "avx512_vnni"


def test_a_cpu_without_avx2_is_refused_with_a_reason():
    with pytest.raises(CpuError, match="needs a CPU with AVX2"):
        classify({"flags": ["sse4_2", "avx"], "brand_raw": "Intel(R) Core(TM) i5-2500K"})


def test_avx512_needs_all_four_parts():
    flags = ["avx2", "fma", "avx512f", "avx512cd", "avx512er", "avx512pf"]  # Xeon Phi
    assert classify({"flags": flags}).isa == "avx2"


def test_levels_are_ordered_and_capping_never_adds():
    everything = frozenset().union(*(level.features for level in LEVELS.values()))
    for name in LEVELS:
        capped = capped_features(everything, name)
        assert best_level(capped) == name
        assert LEVELS[name].features <= capped <= everything


def test_capping_above_the_cpu_says_what_is_missing():
    haswell = classify(RECORDED[0])
    with pytest.raises(CpuError, match=r"lacks avx512, avx512_vnni.*It reaches avx2"):
        haswell.capped("avx512_vnni")
    with pytest.raises(CpuError, match="is no ISA level; use one of avx2"):
        haswell.capped("sse2")


def test_a_capped_cpu_knows_what_was_withheld():
    granite = classify(next(r for r in RECORDED if r["what"] == "Granite Rapids"))
    capped = granite.capped("avx512_vnni")
    assert (granite.withheld, capped.withheld) == (frozenset(), {"amx_int8"})
    assert capped.capped("avx2").withheld == granite.features - {"avx2"}


def test_losing_a_feature_loses_what_needs_it():
    granite = classify(next(r for r in RECORDED if r["what"] == "Granite Rapids"))
    assert granite.without("avx512", "why").features == {"avx2", "avx_vnni"}
    assert granite.without("avx512", "why").notes == ("why",)


def test_a_feature_that_torch_does_not_see_is_not_used():
    granite = classify(next(r for r in RECORDED if r["what"] == "Granite Rapids"))
    names = {name: True for group in cpu_info._TORCH_NAMES.values() for name in group}
    assert cpu_info._confirmed_by_torch(granite, names).features == granite.features
    found = cpu_info._confirmed_by_torch(granite, {**names, "amx_int8": False})
    assert found.isa == "avx512_vnni"
    assert "torch does not see it" in found.notes[0]


def test_a_feature_that_only_torch_sees_is_not_used_but_noted():
    haswell = classify(RECORDED[0])
    found = cpu_info._confirmed_by_torch(haswell, {"avx2": True, "avx_vnni": True})
    assert found.features == haswell.features
    assert found.withheld == {"avx_vnni"}
    assert found.notes == (
        "torch sees avx_vnni, but the operating system does not list it; not used",
    )


@pytest.mark.parametrize(
    ("variables", "isa"),
    [
        ({}, "amx_int8"),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, "avx2"),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, "avx2"),
        ({"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "avx512"),
        ({"ONEDNN_MAX_CPU_ISA": "DEFAULT", "DNNL_MAX_CPU_ISA": "AVX2"}, "amx_int8"),
        ({"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": "AVX10_1_512"}, "avx512_vnni"),
        ({"ONEDNN_MAX_CPU_ISA": "nonsense"}, "amx_int8"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX_FP16"}, "amx_int8"),
        ({"FBGEMM_ENABLE_INSTRUCTIONS": "AVX512_256"}, "avx512"),
        ({"FBGEMM_ENABLE_INSTRUCTIONS": "AVX512_E1"}, "amx_int8"),
        ({"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "avx2"),
        ({"FBGEMM_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}, "avx2"),
    ],
)
def test_the_libraries_own_caps_count(monkeypatch, own_environment, variables, isa):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    granite = classify(next(r for r in RECORDED if r["what"] == "Granite Rapids"))
    found = cpu_info._capped_like_libraries(granite)
    assert found.isa == isa
    assert bool(found.notes) == (isa != "amx_int8")
    assert found.features | found.withheld == granite.features
    assert not found.features & found.withheld


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "x86quant" / "amx_probe.json"


def test_the_probes_answer_is_remembered(cache):
    asked = []

    def probe():
        asked.append(1)
        return "it faults"

    for _ in range(3):
        assert cpu_info._remembered("this cpu", probe) == "it faults"
    assert len(asked) == 1
    assert cpu_info._remembered("another cpu", lambda: None) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "k", "reason": 3}', "\x00"])
def test_a_broken_cache_is_ignored(cache, content):
    cache.parent.mkdir()
    cache.write_text(content)
    assert cpu_info._remembered("k", lambda: "asked again") == "asked again"
    assert json.loads(cache.read_text()) == {"key": "k", "reason": "asked again"}


def test_a_cache_that_cannot_be_written_costs_only_a_probe(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cpu_info._remembered("k", lambda: None) is None


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (subprocess.CompletedProcess([], 0), None),
        (subprocess.CompletedProcess([], -4), "died of signal 4"),
        (subprocess.CompletedProcess([], 2), "refuses its use"),
        (subprocess.CompletedProcess([], 3), "wrong result"),
        (subprocess.CompletedProcess([], 1), "exit code 1"),
        (subprocess.TimeoutExpired([], 1), "hung"),
    ],
)
def test_whatever_becomes_of_the_probe_is_put_into_words(monkeypatch, outcome, words):
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    reason = cpu_info._probe_amx()
    assert reason is None if words is None else words in reason


@pytest.fixture
def own_environment(monkeypatch):
    """The variables that detection may set, unset; put back afterwards."""
    for name in (*dict(LEVELS["avx2"].environment), "DNNL_MAX_CPU_ISA", "X86QUANT_ISA"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_amx_that_faults_does_not_count(monkeypatch, cache, own_environment):
    monkeypatch.setattr(cpu_info, "_probe_amx", lambda: "a probe of it died of signal 4")
    granite = classify(next(r for r in RECORDED if r["what"] == "Granite Rapids"))
    found = cpu_info._confirmed_by_probe(granite)
    assert found.isa == "avx512_vnni"
    assert "AMX is advertised, but a probe of it died of signal 4; not used" in found.notes
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"


def test_a_probe_that_could_not_be_started_is_asked_again(monkeypatch, cache, own_environment):
    def run(*_, **__):
        raise OSError("no processes left")

    monkeypatch.setattr(subprocess, "run", run)
    granite = classify(next(r for r in RECORDED if r["what"] == "Granite Rapids"))
    found = cpu_info._confirmed_by_probe(granite)
    assert "could not be started (no processes left)" in found.notes[0]
    assert not cache.exists()


@pytest.mark.parametrize(("name", "value"), [("executable", None), ("frozen", True)])
def test_no_program_but_python_is_started_as_a_probe(monkeypatch, name, value):
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(OSError, match="no Python interpreter"):
        cpu_info._probe_amx()


def test_nothing_is_remembered_where_reboots_cannot_be_told(monkeypatch, cache, own_environment):
    monkeypatch.setattr(cpu_info, "_probe_key", lambda _: None)
    monkeypatch.setattr(cpu_info, "_probe_amx", lambda: "it faults")
    granite = classify(next(r for r in RECORDED if r["what"] == "Granite Rapids"))
    assert not cpu_info._confirmed_by_probe(granite).amx
    assert not cache.exists()


@pytest.mark.skipif(not HERE.amx, reason="this CPU has no AMX, or is capped below it")
def test_the_probe_really_multiplies_tiles():
    assert cpu_info._probe_amx() is None
    broken = amx_probe._CODE.replace(bytes.fromhex("c4e2695ec1"), bytes(0))
    code = f"from x86quant.hardware import amx_probe as p; p._CODE = {broken!r}; print(p.main())"
    assert run_python(code).stdout.strip() == "3"


ISA_REPORT = """
import torch, x86quant
from tests.stock_tensors import activation, engine, weight
c = x86quant.cpu()
with engine("onednn"):
    pack = torch.ops.quantized.conv2d_prepack(weight(64, 64, 3, 3), None, [1, 1], [1, 1], [1, 1], 1)
torch.ops.quantized.conv2d(activation(1, 64, 9, 9), pack, 1.0, 0)
x = torch._make_per_tensor_quantized_tensor(torch.full((4, 64), 255, dtype=torch.uint8), 1.0, 0)
w = torch._make_per_channel_quantized_tensor(torch.full((64, 64), 127, dtype=torch.int8),
    torch.full((64,), 1e-4, dtype=torch.double), torch.zeros(64, dtype=torch.long), 0)
with engine("fbgemm"):
    pack = torch.ops.quantized.linear_prepack(w, None)
y = torch.ops.quantized.linear(x, pack, 1.0, 0)
print("ISA", c.isa, "EXACT", int(y.int_repr()[0, 0]) == round(64 * 255 * 127 * 1e-4))
"""
ONEDNN_NAMES = {
    "avx2": "avx2",
    "avx_vnni": "avx2_vnni",
    "avx512": "avx512_core",
    "avx512_vnni": "avx512_core_vnni",
    "amx_int8": "_amx",
}


@pytest.mark.parametrize("isa", LEVELS)
def test_forcing_a_level_caps_onednn_and_fbgemm(isa):
    if not LEVELS[isa].features <= HERE.features:
        pytest.skip(f"this CPU, or the cap in force, is below {isa}")
    done = run_python(ISA_REPORT, X86QUANT_ISA=isa, ONEDNN_VERBOSE="1")
    # FBGEMM multiplies exactly where it uses AVX512-VNNI, and saturates where it does not.
    exact = "avx512_vnni" in LEVELS[isa].features
    assert f"ISA {isa} EXACT {exact}" in done.stdout, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "convolution" in line and "exec" in line]
    assert lines
    assert all(ONEDNN_NAMES[isa] in line for line in lines), lines


SATURATING = """
import torch, x86quant
from tests.stock_tensors import engine
codes = torch.full((1, 64, 9, 9), 255, dtype=torch.uint8)
x = torch._make_per_tensor_quantized_tensor(codes, 1.0, 0)
w = torch._make_per_channel_quantized_tensor(torch.full((64, 64, 3, 3), 127, dtype=torch.int8),
    torch.full((64,), 1e-5, dtype=torch.double), torch.zeros(64, dtype=torch.long), 0)
right = round(64 * 9 * 255 * 127 * 1e-5)
with engine("x86"):
    for side in ("STOCK", "ROUTED"):
        if side == "ROUTED":
            x86quant.enable()
        conv = torch.ops.quantized.conv2d_prepack(w, None, [1, 1], [0, 0], [1, 1], 1)
        linear = torch.ops.quantized.linear_prepack(w.flatten(1), None)
        y = torch.ops.quantized.conv2d(x, conv, 1.0, 0), \
            torch.ops.quantized.linear(x[..., :3, :3].flatten(1), linear, 1.0, 0)
        print(side, *(int(t.int_repr().flatten()[0]) == right for t in y))
"""


@pytest.mark.parametrize(
    ("cap", "stock"),
    [("ONEDNN_MAX_CPU_ISA", "False True"), ("FBGEMM_ENABLE_INSTRUCTIONS", "True False")],
)
def test_a_library_capped_by_its_own_variable_gives_no_wrong_numbers(cap, stock):
    if not HERE.features >= LEVELS["avx512_vnni"].features:
        pytest.skip("needs a CPU with AVX512-VNNI, for the other library to be exact")
    free = dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS", "X86QUANT_ISA"), "")
    done = run_python(SATURATING, **{**free, cap: "AVX2"})
    assert f"STOCK {stock}" in done.stdout, done.stdout + done.stderr
    assert "ROUTED True True" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not HERE.amx, reason="this CPU has no AMX, or is capped below it")
def test_onednn_is_kept_off_amx_that_faults():
    faulty = "from x86quant.hardware import cpu; cpu._remembered = lambda *_: 'it faults'\n"
    done = run_python(faulty + ISA_REPORT, X86QUANT_ISA="", ONEDNN_VERBOSE="1")
    assert "ISA avx512_vnni EXACT True" in done.stdout, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "convolution" in line and "exec" in line]
    assert lines
    assert all("avx512_core_vnni" in line for line in lines), lines


def test_an_unknown_level_is_refused():
    done = run_python("import x86quant", X86QUANT_ISA="avx1024")
    assert done.returncode == 1
    assert "X86QUANT_ISA=avx1024 is no level; use one of avx2," in done.stderr


def test_a_level_is_read_in_any_case():
    done = run_python("import x86quant; print(x86quant.cpu().isa)", X86QUANT_ISA=" AVX2 ")
    assert done.stdout == "avx2\n", done.stdout + done.stderr


def test_a_cap_that_comes_too_late_is_an_error():
    if "avx512" not in HERE.features:
        pytest.skip("needs a CPU with AVX-512 to be capped below it")
    done = run_python(
        "import os, torch; torch.ones(3) + 1; os.environ['X86QUANT_ISA'] = 'avx2';"
        "import x86quant; x86quant.cpu()",
        X86QUANT_ISA="",
        ATEN_CPU_CAPABILITY="avx512",
    )
    assert "came too late" in done.stderr, done.stderr


def test_a_level_set_after_the_import_is_an_error():
    done = run_python(
        "import os, x86quant; os.environ['X86QUANT_ISA'] = 'avx2'; x86quant.cpu()",
        X86QUANT_ISA="",
    )
    assert "came too late: it was set after x86quant was imported" in done.stderr, done.stderr


def test_a_level_set_after_importing_torch_still_acts():
    if "avx512" not in HERE.features:
        pytest.skip("needs a CPU with AVX-512 to be capped below it")
    code = "import os, torch; os.environ['X86QUANT_ISA'] = 'avx2'\n"
    done = run_python(code + ISA_REPORT, X86QUANT_ISA="", ONEDNN_VERBOSE="1")
    assert "ISA avx2 EXACT False" in done.stdout, done.stdout + done.stderr
    assert "jit_uni_int8:avx2" in done.stdout


def test_this_cpu_prints_what_it_is():
    text = str(HERE)
    assert HERE.isa in text
    assert "cores" in text
    assert HERE.threads == os.cpu_count() or HERE.threads > 0


def test_detection_never_runs_py_cpuinfos_slow_query():
    code = (
        "import cpuinfo, x86quant\n"
        "def slow(): raise SystemExit('slow query')\n"
        "cpuinfo.get_cpu_info = slow\n"
        "print(x86quant.cpu().isa)"
    )
    assert run_python(code).stdout.strip() == HERE.isa


# A part of the CPU: masks, quotas, hybrids, from files as Linux shows them.


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


ALLOWANCES = json.loads((Path(__file__).parents[1] / "allowances.json").read_text())


@pytest.mark.parametrize("recorded", ALLOWANCES, ids=lambda r: r["what"])
def test_a_part_of_the_cpu_is_seen(recorded, tmp_path):
    root = written(tmp_path, recorded["files"])
    mask = recorded["mask"]
    found = Allowance(None if mask is None else frozenset(mask), cpu_quota(root), fast_cpus(root))
    assert found.quota == recorded["quota"]
    assert len(found.fast or ()) == recorded["fast"]
    assert found.threads(recorded["cores"], recorded["logical"]) == recorded["threads"]
    assert len(found.notes(recorded["logical"])) == recorded["notes"]
    description = {**RECORDED[0], "cores": recorded["cores"], "count": recorded["logical"]}
    cpu = classify(description, found)
    assert cpu.best_threads == recorded["threads"]
    assert cpu.notes == found.notes(recorded["logical"])


def test_a_mask_of_this_process_is_seen():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no CPU masks")
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import x86quant
        print(x86quant.cpu().best_threads, x86quant.cpu().threads)
    """
    best, threads = run_python(code).stdout.split()
    assert best == "1"
    assert int(threads) == HERE.threads


def test_info_advises_as_many_threads_as_can_run(monkeypatch, capsys):
    import dataclasses

    import torch

    from x86quant import cli

    monkeypatch.setattr(x86quant, "cpu", lambda: dataclasses.replace(HERE, best_threads=1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert cli.main(["info"]) == 0
    assert "torch.set_num_threads(1)" in capsys.readouterr().out
