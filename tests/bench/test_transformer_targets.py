"""What ``python -m benchmarks.transformers`` asks for and how it judges."""

from __future__ import annotations

from benchmarks import transformer_models, transformers
from tests.bench_samples import SETTING, model_run, ran
from x86quant.bench.results import BackendResult, ModelRun


def met(*runs: object) -> list[bool | None]:
    return [target.met for target in transformers.targets(runs, 1)]  # type: ignore[arg-type]


def test_targets() -> None:
    fast = model_run("bert-base", x86quant=ran(1, 30), openvino=ran(3, 20), fp32=4)
    slow = model_run("minilm", x86quant=ran(1, 20), openvino=ran(1.2, 30), fp32=0.5)
    assert met(fast) == [True] * 4
    assert met(fast, slow) == [False] * 4
    assert met(model_run("bert-base", x86quant=1)) == [True, True]


def test_each_size_is_measured_in_a_place_of_its_own() -> None:
    requests = transformers.requests_for(transformers.HELD, 2, 3, ["openvino"])
    assert len({transformers.place(one) for one in requests}) == len(requests) == 8
    assert {one.setting.batch for one in requests if one.name == "minilm"} == {1, 32}


def test_further_models_are_compared_and_held_to_nothing() -> None:
    requests = transformers.requests_for([*transformers.MORE], 1, 3, ["openvino"])
    assert len({transformers.place(one) for one in requests}) == len(transformers.MORE)
    for one in requests:
        assert callable(getattr(transformer_models, one.name.rpartition(":")[2]))
    slow = model_run("benchmarks.transformer_models:gpt2", x86quant=2, openvino=1)
    assert met(slow) == met() == [True, True]


def test_the_table_has_all_peers_and_says_who_did_not_run() -> None:
    ours, theirs = ran(20, 31.25, minimum=10), ran(30, 20, minimum=5)
    refused = BackendResult("skipped", "no such instructions")
    gpt2 = "benchmarks.transformer_models:gpt2"
    runs = [
        model_run("minilm", "1×16 int64, 1×16 int64", x86quant=ours, openvino=theirs, bf16=refused),
        model_run(gpt2, "1×128 int64", x86quant=BackendResult("failed", "why"), openvino=theirs),
        ModelRun("swin_t", SETTING, error="no such model"),
    ]
    assert transformers.table(runs).splitlines() == [
        "|  | x86quant, ms | OpenVINO int8 | PyTorch bf16 |",
        "| --- | --- | --- | --- |",
        "| minilm 1×16 | 20.0, 31.2 dB | 1.50 / 0.50, 20.0 dB | skipped |",
        "| gpt2 1×128 | failed | 30.0 ms, 20.0 dB |  |",
        "| swin_t |  |  |  |",
        "",
        "- swin_t: no such model",
        "- minilm 1×16: The machine was not quiet: medians are up to 6.0 times the least times",
        "- minilm 1×16: PyTorch bf16 skipped: no such instructions",
        "- gpt2 1×128: The machine was not quiet: medians are up to 6.0 times the least times",
        "- gpt2 1×128: x86quant int8 failed: why",
    ]


def test_a_level_is_asked_of_every_size() -> None:
    requests = transformers.requests_for(["minilm", "gpt2"], 1, 3, ["openvino"], "avx2")
    assert {one.setting.isa for one in requests} == {"avx2"}
