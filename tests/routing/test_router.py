"""The choose loop: order of the look-up, reasons, errata, overrides, rows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests import isa
from tests.routing.fake_kernels import (
    AMX,
    KERNELS,
    STOCK,
    VNNI,
    FakeKernel,
    clean,
)
from x86quant.errors import InvalidInputError, RuleError, UnsupportedError
from x86quant.kernels import kernel_names
from x86quant.kernels.base import Situation
from x86quant.routing.in_force import current_overrides, override
from x86quant.routing.router import Routing, choose, make_override
from x86quant.routing.routes import Choice, Routes
from x86quant.routing.sizes import Sizes
from x86quant.spec import OpSpec, WeightFacts
from x86quant.tables.conditions import Span, parse_pattern
from x86quant.tables.errata import Erratum, read_errata
from x86quant.tables.shipped import find_table
from x86quant.tables.table import Rule, RuleTable
from x86quant.tables.table_reader import parse_table, read_table

__all__ = ["clean"]

CLIENT = isa.at("avx_vnni")


AVX2 = isa.at("avx2")


DEFAULT = read_table(find_table("default"), kernel_names())


def pick(spec: OpSpec, table: RuleTable = DEFAULT, cpu: Any = AMX, **more: Any) -> Choice:
    return choose(spec, cpu=cpu, table=table, kernels=more.pop("kernels", KERNELS), **more)


def conv(
    channels: int = 64, outputs: int | None = None, kernel: int = 3, **fields: object
) -> OpSpec:
    values: dict[str, object] = {
        "kernel": (kernel, kernel),
        "stride": (1, 1),
        "padding": (kernel // 2, kernel // 2),
        "dilation": (1, 1),
        "output_padding": (0, 0),
    }
    values.update(fields)
    return OpSpec("conv2d", channels, outputs or channels, **values)


def linear(inputs: int = 768, outputs: int = 768, **fields: object) -> OpSpec:
    return OpSpec("linear", inputs, outputs, **fields)


def table(text: str) -> RuleTable:
    return parse_table('schema = 1\nname = "t"\n' + text, "t.toml")


LAST = '[[rule]]\nop = "*"\nuse = "qnnpack"\nbecause = "last"\n'


# ---------------------------------------------------------------------------- the loop


def test_first_matching_rule_wins_and_says_why() -> None:
    mine = table(
        '[[rule]]\nop = "linear"\nwhen = { in_channels = 3 }\nuse = "fbgemm"\n'
        '[[rule]]\nop = "linear"\nuse = "onednn"\nbecause = "why not"\n' + LAST
    )
    choice = pick(linear(), mine)
    assert (choice.kernel, choice.rule, choice.reason) == ("onednn", "t#2", "why not")
    assert choice.steps == ("legal: fbgemm, onednn, native, qnnpack", "t#2: prefers onednn")
    assert str(choice) == "linear 768→768 → onednn by t#2 (why not)"
    assert pick(conv(), mine).kernel == "qnnpack"


def test_illegal_kernels_are_passed_over_with_reasons() -> None:
    mine = table('[[rule]]\nop = "conv"\nuse = ["onednn", "fbgemm"]\n' + LAST)
    choice = pick(conv(output_padding=(1, 1)), mine)
    assert choice.kernel == "fbgemm"
    assert choice.passed_over == (("onednn", ("no output padding",)),)
    assert choice.steps[0] == "onednn refused: no output padding"
    only = {name: KERNELS[name] for name in ("onednn", "qnnpack")}
    assert pick(conv(output_padding=(1, 1)), mine, kernels=only).rule == "t#2"


def test_fallback_takes_any_legal_kernel_in_registry_order() -> None:
    mine = table('[[rule]]\nop = "*"\nuse = "onednn"\n')
    choice = pick(conv(output_padding=(1, 1)), mine)
    assert (choice.kernel, choice.rule) == ("fbgemm", "fallback")
    turned = dict(reversed(KERNELS.items()))
    assert pick(conv(output_padding=(1, 1)), mine, kernels=turned).kernel == "qnnpack"


def test_nothing_legal_names_every_kernel_reason_and_the_shape() -> None:
    kernels = {
        "a": FakeKernel("a", frozenset({"amx_int8", "avx512"})),
        "b": FakeKernel("b", refuse=lambda spec: "only odd shapes"),
    }
    with pytest.raises(UnsupportedError) as caught:
        pick(linear(8, 16), cpu=AVX2, kernels=kernels)
    text = str(caught.value)
    for words in ("linear 8→16", "a: the CPU lacks amx_int8", "avx512", "b: only odd shapes"):
        assert words in text


def test_scrambled_tables_never_choose_an_illegal_kernel() -> None:
    def refuse_wide(spec: OpSpec) -> str | None:
        return "too wide" if spec.in_channels > 64 else None

    kernels = {**KERNELS, "fbgemm": FakeKernel("fbgemm", refuse=refuse_wide)}
    rng = random.Random(0)
    specs = [conv(c, groups=g, output_padding=(p, p)) for c in (64, 128) for g in (1, 64)
             for p in (0, 1)]  # fmt: skip
    for _ in range(50):
        shuffled = [*DEFAULT.rules, *STOCK.rules]
        rng.shuffle(shuffled)
        scrambled = dataclasses.replace(DEFAULT, rules=tuple(shuffled))
        for spec in specs:
            chosen = kernels[pick(spec, scrambled, kernels=kernels).kernel]
            assert not chosen.not_supported_reasons(spec, AMX)


def test_choice_round_trips_through_json() -> None:
    weights = WeightFacts((("linear", (-3, 7)),), symmetric=True)
    choice = pick(conv(weights=weights, output_padding=(1, 1)), STOCK)
    assert choice.passed_over
    again = Choice.from_json(json.loads(json.dumps(choice.to_json())))
    assert again == choice
    assert Choice.from_json(pick(linear()).to_json()) == pick(linear())


# ---------------------------------------------------------------------------- entries, domain

MEASURED = """
extends = "default"
[hardware]
isa = "amx_int8"
[domain]
in_channels = "64..1024"
[[entry]]
spec = { op = "linear", in_channels = 768, out_channels = 768, rows = 1 }
use = "qnnpack"
because = "9 us"
[[entry]]
spec = { op = "linear", in_channels = 2000, out_channels = 768 }
use = "qnnpack"
[[rule]]
op = "linear"
when = { in_channels = ">= 64" }
use = "onednn"
"""


def test_an_exact_entry_stands_above_the_rules() -> None:
    mine = table(MEASURED)
    choice = pick(linear(rows=1), mine)
    assert (choice.kernel, choice.rule, choice.reason) == ("qnnpack", "t:entry#1", "9 us")
    assert pick(linear(rows=2), mine).rule == "t#1"


def test_entries_of_other_hardware_do_not_count() -> None:
    choice = pick(linear(rows=1), table(MEASURED), cpu=VNNI)
    assert (choice.kernel, choice.rule) == ("onednn", "t#1")
    assert "t: its entries are for other hardware" in choice.steps


def test_outside_the_domain_the_nearest_entry_else_the_table_extended() -> None:
    mine = table(MEASURED)
    near = pick(linear(2200), mine)
    assert (near.kernel, near.rule) == ("qnnpack", "t:near#2")
    assert "0.10 away" in near.reason
    assert "t: the op is outside what its rules were fitted to" in near.steps
    assert pick(linear(8000), mine).rule == "default#8"
    assert pick(linear(2200), mine, cpu=VNNI).rule == "default#8"
    assert pick(linear(32), mine, cpu=VNNI).rule == "default#8"
    assert pick(linear(2000), mine).rule == "t:entry#2"


def test_the_nearer_entry_wins() -> None:
    mine = table(
        'extends = "default"\n[domain]\nin_channels = 1\n'
        '[[entry]]\nuse = "onednn"\n'
        'spec = { op = "linear", in_channels = 120, out_channels = 8 }\n'
        '[[entry]]\nuse = "qnnpack"\n'
        'spec = { op = "linear", in_channels = 101, out_channels = 8 }\n'
    )
    assert pick(linear(100, 8), mine).kernel == "qnnpack"


# ---------------------------------------------------------------------------- overrides


def test_an_override_stands_above_everything_but_legality() -> None:
    mine = make_override("qnnpack", "linear", in_channels="> 100")
    choice = pick(linear(), overrides=[mine])
    assert (choice.kernel, choice.rule) == ("qnnpack", "override")
    assert choice.reason == "linear when in_channels > 100"
    assert pick(linear(64), overrides=[mine]).rule == "default#8"
    assert pick(conv(), overrides=[mine]).kernel == "onednn"


def test_an_override_that_cannot_run_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match=r"onednn cannot run conv2d.*\n.*no output padding"):
        pick(conv(output_padding=(1, 1)), overrides=[make_override("onednn")])
    with pytest.raises(InvalidInputError, match="unknown kernel 'onednm'; did you mean 'onednn'"):
        pick(conv(), overrides=[make_override("onednm")])


def test_in_compiled_models_an_override_is_a_wish() -> None:
    """``override("onednn", op="linear")`` must not break models it was not written for."""
    refusing = {**KERNELS, "onednn": FakeKernel("onednn", refuse=lambda spec: "it may saturate")}
    spec, mine = linear(caller="graph"), make_override("onednn", "linear")
    choice = pick(spec, kernels=refusing, overrides=[mine])
    assert choice.kernel != "onednn"
    assert "override: prefers onednn" in choice.steps
    assert pick(spec, overrides=[mine]).rule == "override"
    older = make_override("qnnpack", "linear")
    assert pick(spec, kernels=refusing, overrides=[mine, older]).kernel == "qnnpack"
    for said in ({"caller": "graph"}, {"dynamic": True}):
        with pytest.raises(UnsupportedError, match=r"it may saturate\n.*Undo the override"):
            pick(
                spec.replace(dynamic=True),
                kernels=refusing,
                overrides=[make_override("onednn", "linear", **said)],
            )


@pytest.mark.parametrize(
    "features", [{"op": "conv7d"}, {"group": 1}, {"groups": "x"}, {"op": "linear", "kernel_max": 1}]
)
def test_overrides_are_checked_when_made(features: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"override\('fbgemm'\)"):
        make_override("fbgemm", **features)


# ---------------------------------------------------------------------------- errata

ERRATUM = """
schema = 1
[[erratum]]
kernel = "onednn"
torch = ">=2.13, <2.14"
op = "conv"
when = { transposed = true }
because = "wrong"
reference = "#1"
"""


def errata_file(folder: Path, text: str = ERRATUM) -> Path:
    path = folder / "errata.toml"
    path.write_text(text)
    return path


def test_errata_deny_a_kernel_with_a_reference(tmp_path: Path) -> None:
    errata = read_errata("2.13.0+cpu", errata_file(tmp_path))
    mine = table('[[rule]]\nop = "*"\nuse = ["onednn", "fbgemm"]\n')
    choice = pick(conv(transposed=True), mine, errata=errata)
    assert choice.kernel == "fbgemm"
    assert choice.passed_over == (("onednn", ("erratum: wrong (#1)",)),)
    assert pick(conv(), mine, errata=errata).kernel == "onednn"
    with pytest.raises(UnsupportedError, match="erratum: wrong"):
        pick(conv(transposed=True), errata=errata, overrides=[make_override("onednn")])


@pytest.mark.parametrize(
    ("versions", "version", "concerned"),
    [
        (">=2.13, <2.14", "2.13.0+cpu", True),
        (">=2.13, <2.14", "2.13.1", True),
        (">=2.13, <2.14", "2.14.0a0+git1", False),
        (">=2.13, <2.14", "2.12.9", False),
        ("<=2.13", "2.13.0", True),
        ("<=2.13", "2.13.1", False),
        ("> 2.9", "2.13.0", True),
        ("> 2.13", "2.13.0", False),
        ("< 2.13", "2.13.0", False),
        ("< 2.13.1", "2.13.0", True),
        ("==2.13.1", "2.13.1+cu118", True),
        ("==2.13", "2.13.0", True),
        ("==2.13.0", "2.13", True),
        ("==2", "2.0.0", True),
        ("==3.0.0", "3", True),
    ],
)
def test_errata_versions(versions: str, version: str, concerned: bool) -> None:
    assert Erratum("*", {}, "a", "b", "c", versions).concerns(version) == concerned


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("schema = 1", "schema = 9", 2),
        ('torch = ">=2.13, <2.14"', 'torch = "2.13"', 5),
        ('because = "wrong"\n', "", 3),
        ('reference = "#1"', "reference = 1", 9),
        ("transposed = true", 'transposd = "x"', 7),
        ('kernel = "onednn"', 'kernal = "onednn"', 4),
        ("[[erratum]]", "[[errata]]", 3),
    ],
)
def test_wrong_errata_are_named(tmp_path: Path, old: str, new: str, line: int) -> None:
    with pytest.raises(RuleError, match=f"errata.toml:{line}: "):
        read_errata("2.13.0", errata_file(tmp_path, ERRATUM.replace(old, new)))


def test_shipped_errata_are_read() -> None:
    assert {erratum.kernel for erratum in read_errata("2.13.0")} <= set(KERNELS)
    assert read_errata("2.12.0") == ()


# ---------------------------------------------------------------------------- rows


def by_rows(spec: OpSpec, table: RuleTable = DEFAULT, cpu: Any = AMX, **more: Any) -> list[Any]:
    more = {name: tuple(values) for name, values in more.items()}
    routes = Routing(cpu, table, KERNELS, **more).route(spec)
    return [(upper, choice.kernel) for upper, choice in routes.ranges]


def test_pieces_by_rows_agree_with_choosing_each() -> None:
    for cpu in (AMX, VNNI, CLIENT, AVX2):
        for inputs, outputs in ((64, 64), (256, 256), (768, 3072), (4096, 4096), (31, 1)):
            for dynamic in (None, True, False):
                spec = linear(inputs, outputs, dynamic=dynamic)
                pieces = by_rows(spec, cpu=cpu)
                for rows in (*range(1, 70), 100, 245, 976, 977, 5000, 10**6):
                    kernel = next(k for top, k in pieces if top is None or rows <= top)
                    assert kernel == pick(spec.replace(rows=rows), cpu=cpu).kernel, (spec, rows)
                kernels = [kernel for _, kernel in pieces]
                assert all(a != b for a, b in itertools.pairwise(kernels))
                assert pieces[-1][0] is None


def test_pieces_by_rows_of_the_default_table() -> None:
    assert by_rows(linear(768, 768)) == [(7, "fbgemm"), (None, "onednn")]
    dynamic = [(1, "native"), (7, "fbgemm"), (None, "onednn")]
    assert by_rows(linear(768, 768, dynamic=True)) == dynamic
    assert by_rows(linear(768, 768), cpu=VNNI) == [(127, "fbgemm"), (None, "onednn")]
    assert by_rows(linear(768, 768), cpu=AVX2) == [(None, "fbgemm")]


SHAPE = """
[[entry]]
use = "native"
[entry.spec]
op = "conv2d"
in_channels = 64
out_channels = 64
kernel = [3, 3]
padding = [1, 1]
"""


BY_SIZE = """
[[rule]]
op = "conv"
when = { batch = "3..4" }
use = "onednn"
[[rule]]
op = "*"
when = { multiply_adds = "> 5000000" }
use = "native"
"""


@pytest.mark.parametrize(
    "rules",
    [
        DEFAULT,
        STOCK,
        table(BY_SIZE + LAST),
        table(
            'extends = "default"\n[domain]\nrows = "<= 100"\n'
            + SHAPE
            + "rows = 800\n"
            + BY_SIZE
            + LAST
        ),
        table(SHAPE + "batch = 3\nspatial = [9, 9]\n" + BY_SIZE + LAST),
    ],
)
def test_sizes_of_one_key_have_one_answer(rules: RuleTable) -> None:
    width = parse_pattern("conv", {"out_width": 9})
    narrow = Erratum(*width, "native", "because", "reference", ">=2")
    wanted = make_override("fbgemm", rows="40..50", caller="graph")
    for more in ({}, {"errata": (narrow,)}, {"overrides": (wanted,)}):
        routing = Routing(AMX, rules, KERNELS, **more)
        for spec in (linear(caller="graph"), conv(caller="graph"), conv(8, 8, transposed=True)):
            ranges = routing.size_ranges(spec)
            answers: dict[Any, set[tuple[str, str]]] = {}
            for batch, side in itertools.product((1, 2, 3, 4, 5, 31), (*range(1, 20), 300)):
                if spec.op == "linear":
                    sizes = Sizes.of_linear((batch, side, 768))
                else:
                    sizes = Sizes.of_conv((batch, 0, side, side), (batch, 0, side, side))
                choice = routing.choose(sizes.of(spec))
                answers.setdefault(ranges.key(spec, sizes, AMX), set()).add(
                    (choice.kernel, choice.rule)
                )
            assert all(len(found) == 1 for found in answers.values()), (spec, answers)


def test_sizes_share_a_key_where_no_rule_tells_them_apart() -> None:
    ranges = Routing(AMX, table(LAST), KERNELS).size_ranges(conv())
    keys = {
        ranges.key(conv(), Sizes.of_conv((n, 0, side, side), (n, 0, side, side)), AMX)
        for n in (1, 8)
        for side in range(7, 200)
    }
    assert len(keys) == 1


def test_overrides_and_errata_break_rows_too() -> None:
    few = make_override("qnnpack", rows="3..5")
    assert by_rows(linear(), STOCK, overrides=[few]) == [
        (2, "fbgemm"), (5, "qnnpack"), (None, "fbgemm")
    ]  # fmt: skip
    wrong = Erratum("linear", make_override("x", rows="> 9").when, "fbgemm", "b", "r", ">=2")
    assert by_rows(linear(), DEFAULT, cpu=AVX2, errata=[wrong]) == [
        (9, "fbgemm"), (None, "onednn")
    ]  # fmt: skip


# ---------------------------------------------------------------------------- detours

NARROW, SIXTEENS = Situation("width", Span(1, 1)), Situation("width", Span(1, None, 16))


def routed(spec: OpSpec, prefers: list[str], *fakes: FakeKernel, errata: Any = ()) -> Routes:
    rule = Rule("*", {}, tuple(prefers), "said", "t#1")
    kernels: Any = {fake.name: fake for fake in fakes}
    return Routing(AMX, RuleTable("t", (rule,)), kernels, errata=tuple(errata)).route(spec)


def told(routes: Routes) -> list[tuple[int, str, str]]:
    return [(d.origin, str(d.situation), d.choice.kernel) for d in routes.detours]


def test_a_kernel_is_replaced_where_it_says_that_it_cannot_run() -> None:
    first = FakeKernel("first", where={NARROW: "mixes up columns"})
    last = FakeKernel("last")
    routes = routed(conv(), ["first", "last"], first, last)
    assert routes.kernels == ("first",)
    assert told(routes) == [(0, "the output is 1 wide", "last")]
    (detour,) = routes.detours
    assert detour.reason == "mixes up columns"
    assert "first refused: mixes up columns (where the output is 1 wide)" in detour.choice.steps
    assert Routes.from_json(routes.to_json()) == routes
    assert routed(conv(), ["last", "first"], first, last).detours == ()


def test_what_replaces_a_kernel_may_need_replacing_too() -> None:
    first = FakeKernel("first", where={NARROW: "a"})
    second = FakeKernel("second", where={SIXTEENS: "b"})
    third = FakeKernel("third", where={NARROW: "c"})
    last = FakeKernel("last")
    routes = routed(conv(), ["first", "second", "third", "last"], first, second, third, last)
    assert told(routes) == [
        (0, "the output is 1 wide", "second"),
        (1, "the output is a multiple of 16 wide", "last"),  # third is wrong where it is 1 wide
    ]
    ((one, _), (both, _)) = routes.detours_of(0)
    assert (one, both) == ((NARROW,), (NARROW, SIXTEENS))
    assert [d.choice.kernel for _, d in routes.detours_of(0)] == ["second", "last"]


def test_what_a_kernel_refuses_once_a_call_is_known_is_a_detour_without_being_said_again() -> None:
    """Every refusal of an input quantized as it runs, or of all 8 bits, is asked for."""
    first = FakeKernel("first", refuse=lambda spec: "no dynamic" if spec.dynamic else None)
    eight = FakeKernel("eight", refuse=lambda s: "saturates" if s.activation_max > 127 else None)
    last = FakeKernel("last")
    routes = routed(conv(), ["first", "last"], first, last)
    assert told(routes) == [(0, "the input is quantized as it runs", "last")]
    assert routes.detours[0].reason == "no dynamic"
    assert routed(conv(dynamic=False), ["first", "last"], first, last).detours == ()
    narrow = conv(activation_max=127)
    routes = routed(narrow, ["eight", "first", "last"], first, eight, last)
    assert told(routes) == [
        (0, "the input's zero point exceeds the 7 bits promised", "first"),
        (1, "the input is quantized as it runs", "last"),
    ]
    assert routes.detours[0].choice.spec.activation_max == 255
    assert Routes.from_json(routes.to_json()) == routes


def test_an_erratum_on_the_width_of_the_output_is_looked_at_by_the_pack() -> None:
    when = make_override("x", out_width="multiple of 16", transposed=False).when
    wrong = Erratum("conv2d", when, "first", "rows are mixed up", "#1", ">=2")
    first, last = FakeKernel("first"), FakeKernel("last")
    routes = routed(conv(), ["first"], first, last, errata=[wrong])
    assert told(routes) == [(0, "the output is a multiple of 16 wide", "last")]
    assert "rows are mixed up" in routes.detours[0].reason
    assert routed(conv(transposed=True), ["first"], first, last, errata=[wrong]).detours == ()
    known = conv(spatial=(9, 16))
    assert pick(known, kernels={"first": first, "last": last}, errata=[wrong]).kernel == "last"
    other = conv(spatial=(9, 17))
    assert pick(other, kernels={"first": first, "last": last}, errata=[wrong]).kernel == "first"


def test_an_erratum_on_something_not_known_yet_counts() -> None:
    when = make_override("x", batch="> 8").when
    wrong = Erratum("conv2d", when, "first", "b", "r", ">=2")
    kernels = {"first": FakeKernel("first"), "last": FakeKernel("last")}
    assert pick(conv(batch=None), kernels=kernels, errata=[wrong]).kernel == "last"
    assert pick(conv(batch=8), kernels=kernels, errata=[wrong]).kernel == "first"


def test_every_range_of_rows_has_its_own_detours() -> None:
    first = FakeKernel("first", where={SIXTEENS: "a"})
    second = FakeKernel("second", where={SIXTEENS: "b"})
    few = Rule("*", make_override("x", rows="< 8").when, ("second",), "", "t#1")
    table = RuleTable("t", (few, Rule("*", {}, ("first",), "", "t#2")))
    kernels: Any = {f.name: f for f in (first, second, FakeKernel("last"))}
    routes = Routing(AMX, table, kernels).route(linear())
    assert routes.kernels == ("second", "first")
    assert [d.origin for d in routes.detours] == [0, 1]
    assert [len(routes.detours_of(n)) for n in (0, 1)] == [1, 1]


# ---------------------------------------------------------------------------- the default table


@pytest.mark.parametrize(
    ("spec", "kernels"),
    [
        # the stock engine's traps                        AMX      VNNI     CLIENT   AVX2
        (conv(128, groups=128, dilation=(2, 2), padding=(2, 2)), "native native onednn onednn"),
        (conv(132, groups=132), "native native onednn onednn"),
        (conv(128, groups=128, kernel=9), "native native onednn onednn"),
        (conv(128, 256, groups=128), "native native fbgemm fbgemm"),
        (conv(128, groups=32), "fbgemm onednn fbgemm fbgemm"),
        (conv(116, groups=116), "native native onednn onednn"),
        (conv(128, groups=128), "native native fbgemm fbgemm"),
        (conv(256, groups=128), "fbgemm fbgemm fbgemm fbgemm"),
        (conv(768, groups=768, kernel=7), "native native fbgemm fbgemm"),
        (conv(256, groups=32, stride=(2, 2)), "fbgemm onednn onednn onednn"),
        (conv(128, groups=32, stride=(2, 2)), "fbgemm fbgemm fbgemm fbgemm"),
        (conv(128, 256, groups=32), "onednn onednn onednn onednn"),
        (conv(64), "onednn onednn onednn fbgemm"),
        (conv(960, 240, kernel=1, rows=1), "fbgemm fbgemm fbgemm fbgemm"),
        (linear(rows=256), "onednn onednn onednn fbgemm"),
        (linear(rows=1), "fbgemm fbgemm fbgemm fbgemm"),
        (linear(), "fbgemm fbgemm fbgemm fbgemm"),
        (
            OpSpec("conv1d", 256, 256, 256, (31,), (1,), (15,), (1,), (0,)),
            "onednn onednn onednn onednn",
        ),
    ],
)
def test_what_the_default_table_prefers(spec: OpSpec, kernels: str) -> None:
    chosen = [pick(spec, cpu=cpu).kernel for cpu in (AMX, VNNI, CLIENT, AVX2)]
    assert chosen == kernels.split()


def test_overrides_newest_first_and_scoped() -> None:
    override("fbgemm", op="conv")
    with override("qnnpack", groups="> 1"):
        assert [o.kernel for o in current_overrides()] == ["qnnpack", "fbgemm"]
        grouped = pick(conv(groups=8), overrides=current_overrides())
        assert grouped.kernel == "qnnpack"
        assert pick(conv(), overrides=current_overrides()).kernel == "fbgemm"
    assert [o.kernel for o in current_overrides()] == ["fbgemm"]
    with pytest.raises(InvalidInputError, match="unknown kernel"):
        override("nope")
