"""Fitting tables to measurements: what is known to be best is found, scores are honest."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import isa, synthetic
from tests.synthetic import Times, case, conv, linear, measure
from x86quant.errors import MeasurementError, UnsupportedError
from x86quant.kernels import all_kernels, kernel_names, lookup_kernels
from x86quant.routing.router import Routing, choose
from x86quant.spec import OpSpec, lookup_spec
from x86quant.tables.table import Rule, RuleTable
from x86quant.tables.table_reader import parse_table
from x86quant.tables.table_writer import dumps
from x86quant.tuning import fit as fitting
from x86quant.tuning import plots, user_table
from x86quant.tuning.fit import fit
from x86quant.tuning.measurements import Case, MeasurementSet, usual
from x86quant.tuning.predicates import Predicate, conditions
from x86quant.tuning.regret import (
    always,
    by_network,
    judge,
    leave_one_out,
    score,
    summarize,
)
from x86quant.tuning.rule_learner import Problem, gains_over_default, next_rule, rule_pattern
from x86quant.tuning.samples import Sample, choice_of, samples


def chosen(table: RuleTable, measured: MeasurementSet) -> dict[Case, str]:
    return {s.case: choice_of(s, table).kernel for s in samples(measured)}


def best(measured: MeasurementSet) -> dict[Case, str]:
    return {s.case: min(s.times, key=lambda k: s.times[k]) for s in samples(measured)}


def text_of(table: RuleTable) -> str:
    text = dumps(table)
    assert parse_table(text, kernels=kernel_names()).rules == table.rules
    return text


# ---------------------------------------------------------------------------- what is found


def test_known_rules_are_recovered_in_few_lines() -> None:
    measured = synthetic.example()
    table = fit(measured).table
    assert chosen(table, measured) == best(measured)
    assert len(table.rules) == 4  # a rule and a default for linears, and for convolutions
    assert table.hardware.when["isa"].source == "amx_int8"
    text_of(table)


def test_the_rules_hold_for_shapes_that_were_not_measured_and_for_unknown_rows() -> None:
    table = fit(synthetic.example()).table
    amx, kernels = isa.at("amx_int8"), all_kernels()
    spec = linear(72, 99, 1, caller="stock").replace(rows=None, dynamic=None)
    pieces = Routing(amx, table, kernels).route(spec).ranges
    assert [(rows, choice.kernel) for rows, choice in pieces] == [(7, "fbgemm"), (None, "onednn")]
    depthwise = conv(72, groups=72, caller="stock")
    assert choose(depthwise, cpu=amx, table=table, kernels=kernels).kernel == "native"


def test_every_rule_gives_its_evidence() -> None:
    rules = fit(synthetic.example()).table.rules
    by_rows = next(rule for rule in rules if "rows" in rule.when or "multiply_adds" in rule.when)
    assert "cases of 5 networks" in by_rows.because
    assert "times as fast as by the rules below, best or level in 100%" in by_rows.because
    assert rules[-1].because.endswith("best or level in 100%")


def test_a_wrong_choice_costs_its_slowdown() -> None:
    """Nine cases of ten are 5% faster on one kernel, the tenth is 8 times faster on the other."""

    def times(one: Case) -> Times:
        if one.spec.in_channels % 10:
            return {"fbgemm": 10.0, "onednn": 10.5}
        return {"fbgemm": 80.0, "onednn": 10.0}

    # Nothing that a rule may test tells the tenth apart: not by size, nor by divisors.
    cases = [case(linear(c, 64, 16), f"net{c % 4}") for c in (61, 67, 70, 71, 73, 77, 79)]
    measured = measure(cases, times)
    assert fit(measured).table.rules[-1].use[0] == "onednn"


def test_ties_carry_no_weight() -> None:
    def times(one: Case) -> Times:
        return {"fbgemm": 10.0, "onednn": 10.2 if one.spec.in_channels > 100 else 9.9}

    cases = [case(linear(32 * c, 64, 16), f"net{c % 4}") for c in range(1, 13)]
    measured = measure(cases, times)
    assert len(fit(measured).table.rules) == 1
    assert all(set(s.losses.values()) == {0.0} for s in samples(measured))


def test_threads_and_callers_have_rules_of_their_own() -> None:
    def times(one: Case) -> Times:
        if one.caller == "graph":
            return {"native": 10.0}
        alone = one.spec.threads == 1
        return {"fbgemm": 10.0 if alone else 30.0, "onednn": 20.0}

    cases = [
        case(linear(32 * c, 64, 16, threads=threads), f"net{c % 4}", caller=caller)
        for c in range(1, 9)
        for threads in (1, 2)
        for caller in ("stock", "graph")
    ]
    measured = measure(cases, times)
    table = fit(measured).table
    assert chosen(table, measured) == best(measured)
    assert [rule.when["caller"].source for rule in table.rules] == ["stock", "stock", "graph"]
    assert "threads" in table.rules[0].when


def test_kernels_that_failed_may_not_be_chosen_and_wrong_ones_are_denied() -> None:
    def times(one: Case) -> Times:
        if one.spec.in_channels == 96:
            wrong = "wrong: 7 steps off" if one.spec.rows == 4 else 1.0
            return {"fbgemm": wrong, "onednn": 20.0, "qnnpack": "failed: raised"}
        return {"fbgemm": 10.0, "onednn": 20.0, "qnnpack": 30.0}

    cases = [case(linear(32 * c, 64, r), f"net{c % 4}") for c in range(1, 9) for r in (4, 16)]
    measured = measure(cases, times)
    table = fit(measured).table
    assert [(d.spec.in_channels, d.kernel, d.because) for d in table.denials] == [
        (96, "fbgemm", "7 steps off")
    ]
    of_96 = [s for s in samples(measured) if s.spec.in_channels == 96]
    assert [set(s.times) - {"qnnpack"} for s in of_96] == [{"onednn"}] * 2
    again = parse_table(text_of(table))
    amx, kernels = isa.at("amx_int8"), all_kernels()
    for rows, inputs, kernel in ((4, 96, "onednn"), (999, 96, "onednn"), (4, 64, "fbgemm")):
        spec = linear(inputs, 64, rows, caller="stock")
        choice = choose(spec, cpu=amx, table=again, kernels=kernels)
        assert choice.kernel == kernel
        if inputs == 96:
            denied = dict(choice.passed_over)["fbgemm"]
            assert denied == ("denied by amx_int8:deny#1: 7 steps off",)


def test_a_kernel_for_narrow_weights_only_is_preferred_where_it_may_run() -> None:
    cases = [case(conv(16 * c, groups=16 * c), f"net{c % 4}") for c in range(1, 9)]
    measured = measure(cases, lambda _: {"fbgemm?": 10.0, "onednn": 20.0, "qnnpack": 30.0})
    found = samples(measured)
    assert [s.weight for s in found] == [0.5] * 16
    assert ["fbgemm" in s.times for s in found[:2]] == [True, False]
    table = fit(measured).table
    assert table.rules[-1].use == ("fbgemm", "onednn", "qnnpack")
    assert summarize(judge(table, found)).mean == 0  # type: ignore[union-attr]


def test_narrow_weights_are_compared_with_narrow_weights() -> None:
    cases = [case(conv(16 * c), f"net{c % 4}") for c in range(1, 9)]
    measured = measure(cases, lambda _: {"fbgemm?": 10.0, "native": 20.0, "native?": 8.0})
    found = samples(measured)
    assert [dict(s.times) for s in found[:2]] == [{"fbgemm": 10.0, "native": 8.0}, {"native": 20.0}]
    assert [s.weight for s in found] == [0.5] * 16
    assert fit(measured).table.rules[-1].use[0] == "native"
    assert [m.median_us for m in usual(measured)] == [10.0, 20.0] * 8


def test_a_rule_names_what_runs_where_its_kernel_may_not() -> None:
    """Grouped: FBGEMM, or native on the odd sizes where FBGEMM refuses; else oneDNN."""

    def times(one: Case) -> Times:
        if one.spec.groups == 1:
            return {"fbgemm": 50.0, "native": 50.0, "onednn": 10.0}
        refused = one.spec.rows == 13 * 13
        return {"fbgemm": "unsupported: x" if refused else 10.0, "native": 15.0, "onednn": 60.0}

    cases = [
        case(conv(32 * c, size=size, groups=groups), f"net{c % 4}")
        for c in range(1, 9)
        for size in (13, 14)
        for groups in (1, 8)
    ]
    measured = measure(cases, times)
    table = fit(measured).table
    assert chosen(table, measured) == best(measured)
    assert table.rules[0].use == ("fbgemm", "native")
    text_of(table)


def test_no_rule_is_hidden_by_an_earlier_one() -> None:
    convolutions = [s for s in samples(synthetic.example()) if s.spec.op == "conv2d"]
    problem = Problem.of(convolutions, "conv2d")
    open_ = np.ones(len(convolutions), bool)
    gains = gains_over_default(problem, open_)
    first = next_rule(problem, open_, gains, [])
    assert first is not None
    above = rule_pattern(problem, first.predicates)
    second = next_rule(problem, open_, gains, [above])
    assert second is None or not above.covers(rule_pattern(problem, second.predicates))


def test_what_wins_over_a_rule_comes_before_it() -> None:
    """Small work: fbgemm is far better than the default; within it, tiny work: native is."""

    def times(one: Case) -> Times:
        work = one.spec.in_channels
        if work < 64:
            return {"onednn": 30.0, "fbgemm": 14.0, "native": 10.0}
        if work < 512:
            return {"onednn": 30.0, "fbgemm": 10.0, "native": 35.0}
        return {"onednn": 10.0, "fbgemm": 20.0, "native": 30.0}

    sizes = [*range(8, 64, 8), *range(64, 512, 16), *range(512, 2049, 32)]
    cases = [case(linear(c, 64, 16), f"net{i % 4}") for i, c in enumerate(sizes)]
    measured = measure(cases, times)
    assert chosen(fit(measured).table, measured) == best(measured)


def test_a_single_stalled_timing_makes_no_default() -> None:
    def times(one: Case) -> Times:
        stalled = 1e6 if one.spec.in_channels == 64 else 10.0
        return {"fbgemm": stalled, "onednn": 15.0}

    cases = [case(linear(32 * c, 64, 16), f"net{c % 4}") for c in range(1, 17)]
    assert fit(measure(cases, times)).table.rules[-1].use[0] == "fbgemm"


def lookup(rows: int, bags: int, each: int) -> OpSpec:
    spec = lookup_spec(rows, 64, 8, "sum", stock_rows=True, caller=None)
    return spec.replace(rows=bags, each=each, threads=1)


def test_embedding_tables_have_rules_of_their_own_for_each_caller() -> None:
    def times(one: Case) -> Times:
        if one.spec.op != "embedding_bag":
            return synthetic.example_times(one)
        best = "fbgemm" if one.caller == "stock" and (one.spec.rows or 0) >= 100 else "native"
        return {name: 1.0 if name == best else 2.0 for name in ("native", "fbgemm")}

    tables = [
        case(lookup(1000 * 4**n + 7 * m, bags, each), f"net{m}", caller=caller)
        for n, m, bags, each, caller in itertools.product(
            range(4), range(4), (1, 16, 128), (1, 20), ("stock", "graph")
        )
    ]
    table = fit(synthetic.measure([*synthetic.example_cases(), *tables], times)).table

    def chosen(caller: str, rows: int, bags: int) -> str:
        spec = lookup(rows, bags, 1).replace(caller=caller, each=None, threads=None)
        amx = isa.at("amx_int8")
        return choose(spec, cpu=amx, table=table, kernels=lookup_kernels()).kernel

    # Rows of a table are no channels: many more than were measured are in no other domain.
    for rows in (100, 10**8):
        assert [chosen("stock", rows, n) for n in (1, 16, 128)] == ["native", "native", "fbgemm"]
        assert [chosen("graph", rows, n) for n in (1, 16, 128)] == ["native"] * 3
    assert not table.in_domain(linear(64, 10**6, 1), isa.at("amx_int8"))
    assert parse_table(dumps(table), kernels=kernel_names()) == table


def test_rules_speak_for_what_was_measured() -> None:
    table = fit(synthetic.example()).table
    amx = isa.at("amx_int8")
    assert table.in_domain(linear(64, 64, 1), amx)
    assert not table.in_domain(linear(64, 10**6, 1), amx)
    assert not table.in_domain(conv(64, transposed=True), amx)
    assert table.base is not None
    assert table.base.name == "default"


# ---------------------------------------------------------------------------- stability


def disagreeing(share: float) -> MeasurementSet:
    """On wide linears this share of the networks runs far better on oneDNN, the rest worse."""
    nets = 10

    def times(one: Case) -> Times:
        net = int(one.nets[0][0])
        if one.spec.in_channels < 256:
            return {"fbgemm": 10.0, "onednn": 14.0}
        return {"fbgemm": 10.0, "onednn": 7.0 if net < share * nets else 13.0}

    cases = [
        case(linear(width + 32 * layer, 100 + net, 16), str(net))
        for net in range(nets)
        for width in (32, 256)
        for layer in range(4)
    ]
    return measure(cases, times)


def test_a_rule_that_changes_under_resampling_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(fit(disagreeing(1.0)).table.rules) == 2
    unstable = disagreeing(0.6)
    assert len(fit(unstable).table.rules) == 1
    monkeypatch.setattr("x86quant.tuning.rule_learner.STABLE", 0.0)
    assert len(fit(unstable).table.rules) > 1  # it did win, over all


def test_a_rule_rests_on_several_layers() -> None:
    def times(one: Case) -> Times:
        odd = one.spec.in_channels == 512
        return {"fbgemm": 100.0 if odd else 10.0, "onednn": 14.0}

    widths = [32, 64, 96, 128, 160, 192, 224, 512]
    cases = [case(linear(w, 64, rows), "a", "b") for w in widths for rows in (1, 16, 64)]
    assert len(fit(measure(cases, times)).table.rules) == 1


# ---------------------------------------------------------------------------- determinism


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_lines_changes_no_byte(rng: random.Random) -> None:
    measured = measure(synthetic.example_cases(3), synthetic.example_times)
    lines = list(measured.measurements)
    rng.shuffle(lines)
    shuffled = dataclasses.replace(measured, measurements=tuple(lines))
    assert text_of(fit(shuffled).table) == text_of(fit(measured).table)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_any_measurements_make_a_table_that_reads_back_and_beats_any_single_kernel(
    seed: int,
) -> None:
    rng = random.Random(seed)
    names = ("fbgemm", "onednn", "native")

    def times(one: Case) -> Times:
        found: list[float | str] = [5.0, 10.0, 20.0, "unsupported: x"]
        return {name: rng.choice(found) for name in names}

    picked = rng.sample(synthetic.example_cases(4), 20)
    made = {one: times(one) for one in picked}
    measured = measure(picked, lambda one: {**made[one], "qnnpack": 40.0})
    table = fit(measured).table
    text_of(table)
    found = samples(measured)

    def loss(one: RuleTable) -> float:
        return sum(math.log1p(j.regret) for j in judge(one, found))

    assert loss(table) <= min(loss(always(name)) for name in names) + 1e-4


# ---------------------------------------------------------------------------- scores


def test_regret_by_hand() -> None:
    times = {"a": 10.0, "b": 12.0, "c": 10.2}
    measured = measure(
        [case(linear(8, 8, 1), "x", "y"), case(linear(9, 8, 1), "x")], lambda _: times
    )
    judged = judge(always("b"), samples(measured))
    assert [(j.network, round(j.regret, 6), j.weight) for j in judged] == [
        ("x", 0.2, 0.5),
        ("y", 0.2, 0.5),
        ("x", 0.2, 1.0),
    ]
    found = summarize(judged)
    assert found is not None
    assert found.cases == 2
    assert (found.mean, found.p95, found.worst) == pytest.approx((0.2, 0.2, 0.2))
    assert "b instead of a" in found.worst_case
    assert summarize(judge(always("c"), samples(measured))).mean == 0  # type: ignore[union-attr]


def test_layers_weigh_by_their_cost() -> None:
    def times(one: Case) -> Times:
        big = one.spec.in_channels == 900
        return {"a": 900.0 if big else 100.0, "b": 1800.0 if big else 100.0}

    cases = [case(linear(width, 8, 1), "x") for width in (900, 100)]
    judged = judge(always("b"), samples(measure(cases, times)))
    assert by_network(judged) == {"x": pytest.approx(0.9)}
    found = summarize(judged)
    assert found is not None
    assert found.mean == pytest.approx(math.sqrt(2) - 1)
    assert found.weighted == pytest.approx(0.9)


def test_percentile_and_worst_are_told_apart() -> None:
    cases = [case(linear(8 + n, 8, 1), f"net{n % 2}") for n in range(100)]
    measured = measure(cases, lambda one: {"a": 1.0, "b": 1.0 + (one.spec.in_channels - 8) / 10})
    found = summarize(judge(always("b"), samples(measured)))
    assert found is not None
    assert (found.p95, found.worst) == pytest.approx((9.4, 9.9))


def test_no_network_is_judged_by_a_table_that_saw_its_layers() -> None:
    cases = [*synthetic.example_cases(4), case(conv(48), "net0", "net1", "net3")]
    found = samples(measure(cases, synthetic.example_times))
    seen: list[Sequence[Sample]] = []

    def fit_nothing(some: Sequence[Sample]) -> RuleTable:
        seen.append(some)
        return RuleTable("t", (Rule("*", {}, ("onednn",), name="t#1"),))

    judged = leave_one_out(found, fit_nothing)
    networks = ["net0", "net1", "net2", "net3"]
    assert len(seen) == 4
    for left_out, some in zip(networks, seen, strict=True):
        assert not any(left_out in sample.networks for sample in some)
        mine = {j.sample.case for j in judged if j.network == left_out}
        assert mine == {s.case for s in found if left_out in s.networks}
        assert not mine & {sample.case for sample in some}


def test_times_of_the_network_left_out_do_not_leak() -> None:
    """Where one network's times are turned round, its score must turn bad, not its table."""

    def turned(one: Case) -> Times:
        times = dict(synthetic.example_times(one))
        if one.nets[0][0] == "net2":
            slow, fast = max(times.values()), min(times.values())  # type: ignore[type-var]
            return {name: slow if t == fast else fast for name, t in times.items()}
        return times

    honest = fit(measure(synthetic.example_cases(5), turned))
    networks = honest.scores[0].networks
    assert networks["net2"] > 0.5
    plain = fit(measure(synthetic.example_cases(5), synthetic.example_times))
    assert plain.scores[0].networks["net2"] == pytest.approx(0)
    choices = [
        {j.sample.case: j.kernel for j in fitted.unseen if j.network == "net2"}
        for fitted in (honest, plain)
    ]
    assert choices[0] == choices[1]


def test_scores_stand_beside_the_baselines_and_in_the_table() -> None:
    fitted = fit(synthetic.example())
    assert [s.table for s in fitted.scores] == [
        "fitted, network left out",
        "pytorch-2.0",
        "always fbgemm",
        "always native",
        "always onednn",
    ]
    facts = fitted.table.provenance
    assert facts["regret"] == pytest.approx(0)
    assert float(facts["regret_pytorch_2_0"]) > float(facts["regret"])
    assert {"regret_p95", "regret_worst", "regret_weighted", "regret_always_onednn"} <= facts.keys()
    assert (facts["cases"], facts["networks"], facts["date"]) == (120, 5, "2026-01-01")


def test_one_network_has_no_score() -> None:
    fitted = fit(measure(synthetic.example_cases(1), synthetic.example_times))
    assert "regret" not in fitted.table.provenance
    assert fitted.unseen == ()


def test_what_one_kernel_alone_can_run_does_not_count() -> None:
    cases = [case(linear(32 * c, 64, 16), f"net{c % 3}") for c in range(1, 9)]
    measured = measure(cases, lambda _: {"fbgemm": 10.0, "onednn": "unsupported: x"})
    assert score(samples(measured), {"always fbgemm": always("fbgemm")}) == []
    assert summarize([]) is None


def test_measurements_of_several_levels_or_none() -> None:
    both = [case(linear(8, 8, 1), "x", isa=level) for level in ("avx2", "avx512")]
    with pytest.raises(MeasurementError, match="of the levels avx2, avx512"):
        fit(measure(both, lambda _: {"fbgemm": 1.0}))
    with pytest.raises(MeasurementError, match="none"):
        fit(measure([], lambda _: {}))


# ---------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ([Predicate("rows", low=8)], ">= 8"),
        ([Predicate("rows", high=7)], "< 8"),
        ([Predicate("rows", low=8), Predicate("rows", high=63)], "8..63"),
        ([Predicate("groups", low=4), Predicate("groups", high=4)], 4),
        ([Predicate("groups", low=4), Predicate("groups", multiple=8)], ">= 4 and multiple of 8"),
        ([Predicate("groups", multiple=2), Predicate("groups", multiple=8)], "multiple of 8"),
        ([Predicate("groups", equal=3), Predicate("groups", low=2)], 3),
        ([Predicate("depthwise", equal=True)], True),
        ([Predicate("groups", low=9), Predicate("groups", high=7)], None),
        ([Predicate("groups", equal=3), Predicate("groups", equal=4)], None),
        ([Predicate("groups", equal=3), Predicate("groups", multiple=2)], None),
    ],
)
def test_conditions_are_written_in_the_grammar(tests: list[Predicate], expected: object) -> None:
    found = conditions(tests, "conv")
    source = None if found is None else next(iter(found[1].values())).source
    assert source == expected
    if found is not None:
        (condition,) = found[1].values()
        for value in (True, False) if isinstance(expected, bool) else range(1, 100):
            assert condition.matches(value) == all(test.holds(value) for test in tests)


def test_a_condition_on_the_op_becomes_the_rules_op() -> None:
    assert conditions([Predicate("op", equal="conv1d")], "conv") == ("conv1d", {})
    both = [Predicate("op", equal="conv1d"), Predicate("op", equal="conv2d")]
    assert conditions(both, "conv") is None


def test_judged_regret_uses_what_is_legal() -> None:
    one = samples(measure([case(conv(8), "x")], lambda _: {"a": 5.0, "b": "unsupported: no"}))
    choice = choice_of(one[0], always("b"))
    assert (choice.kernel, choice.passed_over) == ("a", (("b", ("no",)),))


def test_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = synthetic.example()
    fitted = fitting.fit(measured)
    files = plots.draw(samples(measured), fitted.scores, tmp_path / "new")
    assert {f.name for f in files} == {
        "regret_stock.png",
        "stock_fbgemm_against_native.png",
        "stock_fbgemm_against_onednn.png",
        "stock_native_against_onednn.png",
    }
    assert all(f.stat().st_size > 1000 for f in files)


def test_plots_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    fitted = fitting.fit(synthetic.example())
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        plots.draw((), fitted.scores, tmp_path)


# ---------------------------------------------------------------------------- tuning a model


def test_what_was_wrong_in_a_users_model_is_denied_in_the_users_table() -> None:
    layer = case(linear(64, 64, 16), "model")
    measured = measure([layer], lambda _: {"fbgemm": "wrong: 9 steps off", "onednn": 20.0})
    table = user_table.with_entries(measured, isa.at("amx_int8"))
    assert [(d.spec.in_channels, d.kernel) for d in table.denials] == [(64, "fbgemm")]
    assert [entry.use for entry in table.entries] == [("onednn",)]
