"""Random products by grouped weights, some of them, and that a wrong byte would be seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks import group_products as campaign
from tests.native import capi
from x86quant import extension


@pytest.fixture(scope="module")
def library() -> capi.Library:
    extension.load()
    found = capi.Library(Path(extension.__file__).with_name("_C.so"))
    found.enable_amx()
    return found


def test_every_level_gives_the_bytes_of_the_plain_loops(library: capi.Library) -> None:
    assert campaign.levels()
    for number in range(150):
        spec = campaign.drawn(number)
        want = campaign.product(library, spec, "reference")
        for level in campaign.levels():
            for unpack in campaign.UNPACKED:
                found = campaign.product(library, spec, level, unpack)
                assert np.array_equal(found, want), (level, unpack, str(spec))


def test_a_wrong_code_is_seen(library: capi.Library) -> None:
    spec = campaign.drawn(3)
    weight = spec.weight.copy()
    weight[0, 0] ^= 1
    spec.rows[0][:, 0] = 255
    other = dataclasses.replace(spec, weight=weight)
    for level in campaign.levels():
        found = [campaign.product(library, one, level) for one in (spec, other)]
        assert not np.array_equal(*found)
