"""What ``python -m benchmarks.transformers`` asks for and how it judges."""

from __future__ import annotations

from benchmarks import transformer_models, transformers
from tests.bench_samples import model_run, ran


def met(*runs: object) -> list[bool | None]:
    return [target.met for target in transformers.targets(runs, 1)]  # type: ignore[arg-type]


def test_targets() -> None:
    fast = model_run("bert-base", x86quant=ran(1, 30), openvino=ran(3, 20), fp32=4)
    slow = model_run("minilm", x86quant=ran(1, 20), openvino=ran(1.2, 30), fp32=0.5)
    assert met(fast) == [True] * 4
    assert met(fast, slow) == [False] * 4
    assert met(model_run("bert-base", x86quant=1)) == [True, True]


def test_each_size_is_measured_in_a_place_of_its_own() -> None:
    requests = transformers.requests_for(transformers.USUAL, 2, 3, ["openvino"])
    assert len({transformers.place(one) for one in requests}) == len(requests) == 8
    assert {one.setting.batch for one in requests if one.name == "minilm"} == {1, 32}


def test_further_models_are_compared_and_held_to_nothing() -> None:
    requests = transformers.requests_for([*transformers.MORE], 1, 3, ["openvino"])
    assert len({transformers.place(one) for one in requests}) == len(transformers.MORE)
    for one in requests:
        assert callable(getattr(transformer_models, one.name.rpartition(":")[2]))
    slow = model_run("benchmarks.transformer_models:gpt2", x86quant=2, openvino=1)
    assert met(slow) == met() == [True, True]
