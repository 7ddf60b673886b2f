"""Reading, checking, matching, printing and writing rule tables."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import isa
from x86quant.errors import RuleError
from x86quant.kernels import kernel_names
from x86quant.spec import OP_KINDS, ROUTED_KINDS, OpSpec, WeightFacts
from x86quant.tables.conditions import ConditionError, Pattern, parse_condition, parse_pattern
from x86quant.tables.features import FEATURES
from x86quant.tables.shipped import find_table, shipped_tables
from x86quant.tables.table import Entry, RuleTable
from x86quant.tables.table_reader import parse_table, read_table
from x86quant.tables.table_writer import dumps, write_table

KERNELS = {"fbgemm", "onednn", "qnnpack"}


AMX = isa.at("amx_int8")
AVX2 = isa.at("avx2")


def conv(channels: int = 64, outputs: int = 64, kernel: int = 3, **fields: object) -> OpSpec:
    values: dict[str, object] = {
        "kernel": (kernel, kernel),
        "stride": (1, 1),
        "padding": (kernel // 2, kernel // 2),
        "dilation": (1, 1),
        "output_padding": (0, 0),
    }
    values.update(fields)
    return OpSpec("conv2d", channels, outputs, **values)


def table(body: str, head: str = 'schema = 1\nname = "t"\n') -> RuleTable:
    return parse_table(head + body, "t.toml")


END = '\n[[rule]]\nop = "*"\nuse = "fbgemm"\n'


def rules(*conditions: str, op: str = "*") -> str:
    return (
        "".join(f'[[rule]]\nop = "{op}"\nwhen = {{ {c} }}\nuse = "onednn"\n' for c in conditions)
        + END
    )


# ---------------------------------------------------------------------------- conditions


@pytest.mark.parametrize(
    ("source", "inside", "outside"),
    [
        (7, [7], [6, 8]),
        ("> 100", [101, 10**9], [100, 1]),
        (">= 3", [3, 4], [2]),
        ("< 8", [1, 7], [8]),
        ("<= 8", [8], [9]),
        ("!= 1", [2, 50], [1]),
        ("3..7", [3, 5, 7], [2, 8]),
        ("multiple of 8", [8, 64], [4, 12]),
        ("not multiple of 8", [4, 12], [8, 64]),
        ("> 8 and not multiple of 8", [9, 12], [4, 8, 16]),
        ("multiple of 8 and 16..32", [16, 24, 32], [8, 20, 40]),
        ([3, 5, "> 8"], [3, 5, 9], [4, 8]),
    ],
)
def test_number_conditions(source: object, inside: list[int], outside: list[int]) -> None:
    condition = parse_condition(FEATURES["groups"], source)
    assert [v for v in (*inside, *outside) if condition.matches(v)] == inside
    assert not condition.matches(None)


@pytest.mark.parametrize(
    "source",
    ["100", "> x", ">100.5", "=> 3", "multiple of 0", "7 .. ", 1.5, float("nan"), True, {}, []],
)
def test_conditions_that_make_no_sense(source: object) -> None:
    with pytest.raises(ConditionError, match="groups"):
        parse_condition(FEATURES["groups"], source)


@pytest.mark.parametrize("source", ["7..3", "< 1", "> 3 and < 2", "<= 0"])
def test_conditions_that_can_never_match(source: str) -> None:
    with pytest.raises(ConditionError, match="never match"):
        parse_condition(FEATURES["groups"], source)


def test_rows_are_not_tested_for_multiples() -> None:
    with pytest.raises(ConditionError, match="not known when weights are packed"):
        parse_condition(FEATURES["rows"], "multiple of 8")


ATOMS = st.one_of(
    st.integers(1, 12),
    st.sampled_from([">", ">=", "<=", "!="]).flatmap(
        lambda sign: st.integers(1, 12).map(lambda n: f"{sign} {n}")
    ),
    st.tuples(st.integers(1, 12), st.integers(0, 6)).map(lambda p: f"{p[0]}..{p[0] + p[1]}"),
    st.integers(1, 6).map(lambda n: f"multiple of {n}"),
    st.integers(2, 6).map(lambda n: f"not multiple of {n}"),
    st.tuples(st.integers(1, 9), st.integers(2, 4)).map(
        lambda p: f">= {p[0]} and not multiple of {p[1]}"
    ),
)
SOURCES = st.one_of(ATOMS, st.lists(ATOMS, min_size=1, max_size=3))


@settings(max_examples=400, deadline=None)
@given(SOURCES, SOURCES)
def test_implication_is_sound(one: object, other: object) -> None:
    a, b = (parse_condition(FEATURES["groups"], source) for source in (one, other))
    if a.implies(b):
        assert not [n for n in range(1, 200) if a.matches(n) and not b.matches(n)]
    assert a.implies(a)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (5, "> 4"),
        ("> 5", ">= 5"),
        ("3..4", ["1..3", "4..9"]),
        ("multiple of 16", "multiple of 8"),
        ("not multiple of 8", "not multiple of 16"),
        ("> 8 and multiple of 8", "multiple of 4"),
        ([3, 5], "!= 4"),
    ],
)
def test_implication_is_found(narrow: object, wide: object) -> None:
    a, b = (parse_condition(FEATURES["groups"], source) for source in (narrow, wide))
    assert a.implies(b)
    assert not b.implies(a)


def test_unknown_matches_nothing() -> None:
    spec = OpSpec("linear", 64, 64)
    for name, source in (("rows", ">= 0"), ("dynamic", False), ("symmetric", True)):
        assert not Pattern(*parse_pattern("*", {name: source})).matches(spec, AMX)
    known = spec.replace(rows=0, dynamic=False, weights=WeightFacts(()))
    when = {"rows": ">= 0", "dynamic": False, "symmetric": True}
    assert Pattern(*parse_pattern("*", when)).matches(known, AMX)


def test_every_feature_reads_a_conv_a_linear_or_a_table() -> None:
    dilated = conv(
        64, 128, groups=64, stride=(2, 1), dilation=(1, 2), batch=2, rows=10, threads=1,
        caller="stock", dynamic=False, post_op="relu", weights=WeightFacts((), symmetric=False),
        spatial=(9, 9),
    )  # fmt: skip
    table = OpSpec("embedding_bag", 100, 8, bits=4, pooling="max")
    values = {
        name: feature.get(table if feature.of == "table" else dilated, AMX)
        for name, feature in FEATURES.items()
    }
    grouped = OpSpec("linear", 64, 8, bits=4, weight_group=32)
    values["weight_group"] = FEATURES["weight_group"].get(grouped, AMX)  # linears alone have it
    assert None not in values.values()
    kinds = {"int": int, "bool": bool, "text": str}
    assert {n: type(v) for n, v in values.items()} == {
        n: kinds[f.type] for n, f in FEATURES.items()
    }
    assert values["depth_multiplier"] == 2
    assert values["multiply_adds"] == 10 * 128 * 9
    assert (values["stride_max"], values["dilation_max"], values["padding_max"]) == (2, 2, 1)
    assert not values["same_padding"]
    assert not values["symmetric"]
    linear = OpSpec("linear", 8, 8)
    known = {n for n, f in FEATURES.items() if f.get(linear, AMX) is not None}
    assert not [n for n in known if FEATURES[n].of in ("conv", "table") and n != "depthwise"]


@pytest.mark.parametrize(
    ("op", "matching"),
    [
        ("*", set(ROUTED_KINDS)),
        ("embedding_bag", {"embedding_bag"}),
        ("linear", {"linear"}),
        ("conv", {"conv1d", "conv2d", "conv3d"}),
        ("conv3d", {"conv3d"}),
    ],
)
def test_ops(op: str, matching: set[str]) -> None:
    pattern = Pattern(*parse_pattern(op, {}))
    assert {k for k in ROUTED_KINDS if pattern.matches(OpSpec(k, 1, 1), AMX)} == matching


# ---------------------------------------------------------------------------- errors

HEAD = 'schema = 1\nname = "t"\n'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("schema = 1\nname = ", 2, "not valid TOML"),
        ("schema = 1\nschema = 1", 2, "not valid TOML"),
        ('name = "t"', 1, "no schema"),
        ('name = "t"\nschema = "1"', 2, "no schema"),
        ('name = "t"\nschema = 99', 2, "upgrade x86quant"),
        ("schema = 1", 1, "no name"),
        ("schema = 1\n\nname = 3", 3, "name must be a text"),
        (HEAD + "nmae = 1" + END, 3, "unknown key 'nmae'; did you mean 'name'"),
        (HEAD + "rule = 3", 3, "array of tables"),
        (HEAD + "rule = [3]", 3, "array of tables"),
        (HEAD + "[rule]\nop = 1", 3, "array of tables"),
        (HEAD + "[provenance]\nregret = nan" + END, 4, "no finite number"),
        (HEAD + "[provenance]\nregret = []" + END, 4, "a text or a number"),
        (HEAD + '[[rule]]\nuse = "fbgemm"', 3, "no op"),
        (HEAD + '[[rule]]\nop = "conv4d"\nuse = "fbgemm"', 4, "did you mean 'conv"),
        (HEAD + '[[rule]]\nop = "*"', 3, "no kernel"),
        (HEAD + '[[rule]]\nop = "*"\nuse = 3', 5, "use = 3"),
        (HEAD + '[[rule]]\nop = "*"\nuse = ["a", "a"]', 5, "twice"),
        (HEAD + '[[rule]]\nop = "*"\nuse = []', 5, "best first"),
        (HEAD + '[[rule]]\nop = "*"\nuse = "fbgemm"\nbecause = 1', 6, "because must be a text"),
        (HEAD + '[[rule]]\nop = "*"\nwhy = "x"\nuse = "fbgemm"', 5, "unknown key 'why'"),
        (HEAD + '[[rule]]\nop = "*"\nwhen = 3\nuse = "fbgemm"', 5, "must be a table"),
        (HEAD + rules("group = 1"), 5, "did you mean 'groups'"),
        (HEAD + rules('groups = "~ 3"'), 5, "write 7,"),
        (HEAD + rules("groups = 1.5"), 5, "1.5"),
        (HEAD + rules("vnni = 1"), 5, "write true or false"),
        (HEAD + rules("isa = 3"), 5, "write a text"),
        (HEAD + rules('isa = "amx"'), 5, "isa is never 'amx'; choose from amx_int8"),
        (HEAD + rules("groups = 0"), 5, "never match"),
        (HEAD + rules("kernel_max = 3", op="linear"), 5, "a linear has no kernel_max"),
        (HEAD + rules("groups = 1", "groups = 1"), 7, "unreachable: the rule at line 3"),
        (HEAD + rules('groups = "> 4"', "groups = 5, vnni = true"), 7, "unreachable"),
        (HEAD + END + END, 8, "unreachable: the rule at line 4"),
        (HEAD + '[[rule]]\nop = "conv"\nuse = "fbgemm"', 3, "no default for linear"),
        (HEAD, 1, "no default for linear"),
        (HEAD + 'extends = "nowhere"' + END, 3, "unknown rule table 'nowhere'"),
        (HEAD + "[domain]\ngroups = 1" + END, 3, 'extends = "default"'),
        (HEAD + "[hardware]\ngroups = 1" + END, 3, "does not belong in [hardware]"),
        (HEAD + "[hardware]\nisa = 1" + END, 4, "write a text"),
        (HEAD + 'extends = "default"\n[domain]\nvnni = true', 4, "does not belong in [domain]"),
        (HEAD + '[[entry]]\nuse = "fbgemm"' + END, 3, "no spec"),
        (HEAD + '[[entry]]\nspec = { op = "linear" }\nuse = "a"' + END, 4, "no in_channels"),
        (HEAD + '[[entry]]\nspec = { opp = "linear" }\nuse = "a"' + END, 4, "did you mean 'op'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_table(text, "dir/t.toml", KERNELS)
    assert str(caught.value).startswith(f"dir/t.toml:{line}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ('op = "conv2d", in_channels = 8, out_channels = 8, kernel = [3]', "needs 2 numbers"),
        ('op = "conv9d", in_channels = 8, out_channels = 8', "op = 'conv9d'"),
        ('op = "linear", in_channels = true, out_channels = 8', "in_channels = True"),
        ('op = "linear", in_channels = 0, out_channels = 8', "at least 1"),
        ('op = "linear", in_channels = 8, out_channels = 8, rows = "8"', "rows = '8'"),
        ('op = "linear", in_channels = 8, out_channels = 8, spatial = 3', "spatial = 3"),
        ('op = "linear", in_channels = 8, out_channels = 8, dynamic = 1', "dynamic = 1"),
    ],
)
def test_entries_are_checked(spec: str, words: str) -> None:
    with pytest.raises(RuleError, match=r"t\.toml:4: ") as caught:
        table(f'[[entry]]\nspec = {{ {spec} }}\nuse = "fbgemm"\n{END}')
    assert words in str(caught.value)


def test_the_same_entry_twice() -> None:
    entry = '[[entry]]\nspec = { op = "linear", in_channels = 8, out_channels = 8 }\nuse = "a"\n'
    with pytest.raises(RuleError, match=r"t\.toml:6: same spec as line 3"):
        table(entry + entry + END)


def test_unknown_kernel() -> None:
    text = HEAD + '[[rule]]\nop = "*"\nuse = ["fbgemm",\n "onednm"]\n'
    with pytest.raises(
        RuleError, match=r"t\.toml:3: t#1 names the unknown kernel 'onednm'; did you mean 'onednn'"
    ):
        parse_table(text, "t.toml", KERNELS)
    assert parse_table(text, "t.toml").kernels().keys() == {"fbgemm", "onednm"}


def test_lines_are_right_after_texts_of_several_lines() -> None:
    body = 'description = """\n[[rule]]\nop = "x"\n"""\n[[rule]]\nop = "nope"\nuse = "a"\n'
    with pytest.raises(RuleError, match=r"t\.toml:8: unknown op"):
        table(body)


def test_sub_tables_keep_their_lines() -> None:
    body = '[[rule]]\nop = "*"\nuse = "a"\n[rule.when]\nvnni = true\ngroup = 3\n'
    with pytest.raises(RuleError, match=r"t\.toml:8: unknown feature 'group'"):
        table(body)


def test_a_narrower_rule_after_a_wider_one_on_another_feature_is_reachable() -> None:
    assert len(table(rules('groups = "> 4"', "in_channels = 8", 'groups = "> 3"')).rules) == 4


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_unreadable_files(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "t.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RuleError, match=r"t\.toml: "):
        read_table(path)


# ---------------------------------------------------------------------------- finding, extending


def test_shipped_tables_are_complete_and_name_known_kernels() -> None:
    assert {"default", "pytorch-2.0"} <= set(shipped_tables())
    for name, path in shipped_tables().items():
        shipped = read_table(path, kernel_names())
        assert shipped.name == name
        assert all(rule.because for rule in shipped.rules)


def test_find_table_tells_the_names() -> None:
    with pytest.raises(RuleError, match=r"did you mean 'pytorch-2.0'.*choose from.*default"):
        find_table("pytorch2.0")
    with pytest.raises(RuleError, match="no such rule table"):
        find_table("no/such.toml")


def test_extending_a_shipped_table_and_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('schema = 1\nname = "a"\nextends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('schema = 1\nname = "b"\nextends = "pytorch-2.0"\n')
    names = [t.name for t in read_table(tmp_path / "a.toml").chain()]
    assert names == ["a", "b", "pytorch-2.0"]


def test_extending_in_a_circle(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        text = f'schema = 1\nname = "{one}"\nextends = "{other}.toml"\n'
        (tmp_path / f"{one}.toml").write_text(text)
    with pytest.raises(RuleError, match="break the circle"):
        read_table(tmp_path / "a.toml")


# ---------------------------------------------------------------------------- hardware, domain


def test_hardware_and_domain() -> None:
    head = 'extends = "default"\n[hardware]\nisa = "amx_int8"\nvendor = "intel"\n'
    mine = table(head + '[domain]\nin_channels = "16..64"\nrows = "< 100"\n')
    assert mine.fits(AMX)
    assert not mine.fits(AVX2)
    assert mine.in_domain(OpSpec("linear", 64, 1), AMX)
    assert not mine.in_domain(OpSpec("linear", 65, 1), AMX)
    assert not mine.in_domain(OpSpec("linear", 64, 1, rows=100), AMX)


def test_entry_distance() -> None:
    entry = Entry(OpSpec("linear", 100, 100, rows=10), ("a",))
    assert entry.distance(OpSpec("linear", 100, 100, rows=10, bias=False)) == 0
    far = entry.distance(OpSpec("linear", 200, 50, rows=10))
    assert far == pytest.approx(2 * 0.6931, abs=1e-3)
    assert entry.distance(OpSpec("linear", 100, 100)) == float("inf")
    assert Entry(conv(), ("a",)).distance(conv(stride=(2, 2))) == float("inf")
    assert Entry(conv(rows=None), ("a",)).distance(conv(rows=3)) == 0
    assert Entry(conv(64, 64, groups=64), ("a",)).distance(conv(64, 64, groups=32)) == float("inf")


# ---------------------------------------------------------------------------- rows


def test_row_breaks_are_where_answers_change() -> None:
    mine = table(rules('rows = "8..63"', 'multiply_adds = ">= 1000000"', 'rows = "!= 3"'))
    spec = OpSpec("linear", 100, 100)
    breaks = mine.row_breaks(spec, AMX)
    assert breaks == (3, 4, 8, 64, 100)
    # Whatever number of rows it is asked with.
    assert mine.row_breaks(spec.replace(rows=50), AMX) == breaks
    assert mine.rules[1].row_breaks(spec.replace(rows=50), AMX) == {100}

    def matching(rows: int) -> list[int]:
        one = spec.replace(rows=rows)
        return [rule.line for rule in mine.rules if rule.matches(one, AMX)]

    changes = {n for n in range(2, 300) if matching(n) != matching(n - 1)}
    assert changes <= set(breaks)


def test_row_breaks_of_entries_and_extended_tables() -> None:
    entry = '[[entry]]\nspec = { op = "linear", in_channels = 8, out_channels = 8, rows = 49 }\n'
    mine = table('extends = "default"\n' + entry + 'use = "onednn"\n')
    # Itself, and as far as it is the nearest measured one: 49 rows times or over exp(RADIUS).
    assert {49, 50, 30, 81} <= set(mine.row_breaks(OpSpec("linear", 8, 8), AMX))
    # Entries of other shapes cost nothing when weights are packed; the table extended counts.
    breaks = set(mine.row_breaks(OpSpec("linear", 2000, 2000), AMX))
    assert 8 in breaks
    assert not {49, 50, 30, 81} & breaks


# ---------------------------------------------------------------------------- printing, writing


def test_printed_table_says_it_all() -> None:
    text = str(read_table(find_table("pytorch-2.0")))
    assert "pytorch-2.0#3: conv when groups > 100 → fbgemm" in text
    assert "depthwise with more than 100 layers" in text


FULL = """\
schema = 1
name = "full"
description = "with \\"quotes\\", a \\\\ and\\nlines"
extends = "default"

[provenance]
torch = "2.13.0"
regret = 0.03
cases = 400
"odd key" = true

[hardware]
isa = ["amx_int8", "avx512_vnni"]

[domain]
in_channels = "16..4096"

[[entry]]
spec = { op = "linear", in_channels = 8, out_channels = 8, dynamic = true, rows = 256, threads = 1 }
use = "onednn"
because = "132 us"

[[entry]]
spec = { op = "conv2d", in_channels = 8, out_channels = 8, kernel = [3, 3], padding = [1, 1] }
use = ["fbgemm", "onednn"]

[[rule]]
op = "conv"
when = { groups = ["> 100", 3], depthwise = false }
use = "onednn"
because = "µs"
"""


def test_what_is_written_reads_back_and_is_the_same_bytes(tmp_path: Path) -> None:
    full = parse_table(FULL)
    assert dumps(full) == FULL
    path = tmp_path / "full.toml"
    write_table(full, path)
    again = read_table(path)
    assert again == full
    assert path.read_text(encoding="utf-8") == FULL
    for shipped in map(read_table, shipped_tables().values()):
        assert parse_table(dumps(shipped)) == shipped


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20), SOURCES)
def test_any_text_and_condition_round_trips(text: str, source: object) -> None:
    op, when = parse_pattern("conv", {"groups": source})
    base = read_table(find_table("default"))
    rule = dataclasses.replace(base.rules[0], op=op, when=when, because=text)
    mine = dataclasses.replace(base, rules=(rule, *base.rules))
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    body = dumps(dataclasses.replace(mine, rules=(rule,), base=base))
    assert parse_table(body).rules == (rule,)


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.toml"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_table(parse_table(FULL), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.toml"]


def test_readers_never_see_half_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    full = parse_table(FULL)
    write_table(full, path)
    done = threading.Event()

    def keep_writing() -> None:
        while not done.is_set():
            write_table(full, path)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        assert all(path.read_text(encoding="utf-8") == FULL for _ in range(200))
    finally:
        done.set()
        writer.join()


# ---------------------------------------------------------------------------- pytorch-2.0


@pytest.mark.parametrize("vnni", [True, False])
def test_pytorch_2_0_is_the_stock_rule(vnni: bool) -> None:
    """Against the stock rule written out once more, over all its corner conditions."""
    cpu = AMX if vnni else isa.at("avx_vnni")
    stock = read_table(find_table("pytorch-2.0"))
    cases = itertools.product(
        OP_KINDS, (1, 100, 101), (True, False), ((), (0, 0), (0, 1)), (True, False), (True, False)
    )
    for op, groups, symmetric, output_padding, transposed, per_channel in cases:
        if op == "linear" and (groups > 1 or transposed or output_padding):
            continue
        dims = 0 if op == "linear" else int(op[4])
        spec = OpSpec(
            op, 10100, 10100, groups, (1,) * dims, (1,) * dims, (0,) * dims, (1,) * dims,
            (output_padding * 2)[:dims] or (0,) * dims,
            transposed, per_channel, weights=WeightFacts((), symmetric),
        )  # fmt: skip
        onednn = (
            op != "linear"
            and vnni
            and groups <= 100
            and symmetric
            and not (transposed and per_channel)
            and not any(spec.output_padding)
        )
        chosen = next(rule for rule in stock.rules if rule.matches(spec, cpu))
        assert chosen.use == ("onednn" if onednn else "fbgemm",), spec
