"""The zoo: every architecture is quantized or refused in a sentence, is right, saves and loads."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.zoo import ZOO, Animal, Inputs, call, floats, sqnr
from tests.zoo.known_failures import UNSAVABLE, WRONG
from x86quant.calling.call import dense
from x86quant.errors import ArtifactError, InvalidInputError, X86QuantError

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages; ours are in the summary

#: Tests do not time: what int8 would lose is quantized all the same.
_UNTIMED: dict[str, Any] = (
    {"speed_check": False}
    if "speed_check" in inspect.signature(x86quant.quantize).parameters
    else {}
)
_FAST = [animal for animal in ZOO if not animal.slow]


def _parameter(animal: Animal) -> Any:
    missing = animal.needs and importlib.util.find_spec(animal.needs) is None
    skip = pytest.mark.skipif(bool(missing), reason=f"{animal.needs} is not installed")
    return pytest.param(animal, id=animal.name, marks=skip)


class Specimen:
    """An architecture, in float and in int8, made once for the tests that look at it."""

    def __init__(self, animal: Animal) -> None:
        self.animal, self.model = animal, animal.model()
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.int8: nn.Module | None = None
        self.refusal: X86QuantError | None = None
        try:
            self.int8 = x86quant.quantize(
                self.model, animal.calibration(), progress=False, **_UNTIMED, **animal.options
            )
        except X86QuantError as error:
            self.refusal = error


# Of the module's scope, so that pytest runs the tests of one architecture one after the other.
@pytest.fixture(scope="module", params=[_parameter(animal) for animal in _FAST])
def specimen(request: pytest.FixtureRequest) -> Specimen:
    """Each architecture in turn."""
    return Specimen(request.param)


def _may_fail(request: pytest.FixtureRequest, animal: Animal, known: dict[str, str]) -> None:
    if animal.name in known:
        request.applymarker(pytest.mark.xfail(strict=True, reason=known[animal.name]))


def test_it_is_right_or_refused(specimen: Specimen, request: pytest.FixtureRequest) -> None:
    animal = specimen.animal
    _may_fail(request, animal, WRONG)
    if animal.refused is not None:
        assert specimen.refusal is not None, "it is no longer refused"
        assert "\n" not in str(specimen.refusal)
        assert re.search(animal.refused, str(specimen.refusal))
        return
    assert specimen.refusal is None, specimen.refusal
    for key, value in specimen.model.state_dict().items():
        assert torch.equal(dense(value), dense(specimen.state[key])), (
            f"quantize changed {key} of the model"
        )
    for batch in (1, 5):
        for size in animal.sizes:
            # One result may happen to be close to zero.
            results = []
            for seed in range(9, 15):
                inputs = animal.sample(batch, size, seed)
                results.append((call(specimen.model, inputs), call(specimen.int8, inputs)))
            found = sqnr(*zip(*results, strict=True))
            assert found >= animal.bound, f"{found:.1f} dB, batch {batch}, size {size}"


def test_it_saves_and_loads(
    specimen: Specimen, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    animal = specimen.animal
    _may_fail(request, animal, {**WRONG, **UNSAVABLE})
    if animal.refused is not None:
        pytest.skip("it is refused")
    path = tmp_path / "model.x86q"
    if animal.save is not None:
        with pytest.raises(ArtifactError, match=animal.save):
            x86quant.save(specimen.int8, path)
        return
    x86quant.save(specimen.int8, path)
    loaded, with_class = None, x86quant.load(path, model=animal.model())
    try:
        loaded = x86quant.load(path)
    except ArtifactError as error:  # the code of a user's own class is in no file
        if "load(path, model=...)" not in str(error):
            raise
    else:
        again = tmp_path / "again.x86q"
        x86quant.save(loaded, again)
        loaded = x86quant.load(again)
    compared = 0
    for batch in (1, 5):
        for size in animal.sizes:
            inputs = animal.sample(batch, size, seed=9)
            expected = floats(call(specimen.int8, inputs))
            answers = [_answer(model, inputs) for model in (with_class, loaded)]
            assert all(found is None or _equal(expected, found) for found in answers)
            compared += answers[0] is not None
    assert compared


#: How a loaded model says, in one sentence, that a call is unlike the one it was saved with.
_UNLIKE = (
    "this file holds the model for|the example the model was saved with|does not hold for this"
)


def _answer(model: nn.Module | None, inputs: Inputs) -> list[torch.Tensor] | None:
    """What ``model`` answers; None if there is none, or it refuses the call."""
    if model is None:
        return None
    try:
        return floats(call(model, inputs))
    except InvalidInputError as error:
        if not re.search(_UNLIKE, str(error)):
            raise
        return None


def _equal(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    return len(expected) == len(actual) and all(map(torch.equal, expected, actual))


def test_names_are_unique_and_known_failures_exist() -> None:
    names = [animal.name for animal in ZOO]
    assert len(set(names)) == len(names) >= 60
    assert {*WRONG, *UNSAVABLE} <= {animal.name for animal in _FAST}
    assert not set(WRONG) & set(UNSAVABLE)
