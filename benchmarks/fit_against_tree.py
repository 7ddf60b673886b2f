"""The rule learner beside scikit-learn's decision tree, on networks that neither has seen.

python -m benchmarks.fit_against_tree FILE.csv

The tree is the usual cost-sensitive one: it learns the best kernel of each case, weighed by what
the next best loses. Where its choice may not run, its next most likely one does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
from sklearn.tree import DecisionTreeClassifier

from x86quant.tables.features import FEATURES
from x86quant.tuning.fit import fit
from x86quant.tuning.measurement_files import read
from x86quant.tuning.samples import Sample, samples

LEAVES = (2, 4, 6, 8, 12, 24)
NAMES = [
    name
    for name, feature in FEATURES.items()
    if feature.type != "text" and feature.of != "cpu" and not name.endswith("padding_max")
]


def numbers(found: Sequence[Sample]) -> np.ndarray:
    def number(sample: Sample, name: str) -> float:
        value = FEATURES[name].get(sample.spec, sample.cpu)
        return -1.0 if value is None else float(value)

    return np.array([[number(s, name) for name in NAMES] + [s.spec.dims] for s in found])


def stakes(sample: Sample) -> float:
    """What a wrong choice loses at least, at most ln 16: one stalled timing is not everything."""
    return min(sorted(sample.losses.values())[1], math.log(16)) * sample.weight + 1e-9


def tree_losses(train: Sequence[Sample], test: Sequence[Sample], leaves: int) -> list[float]:
    tree = DecisionTreeClassifier(max_leaf_nodes=leaves, random_state=0)
    best = [min(s.times, key=lambda name: s.times[name]) for s in train]
    tree.fit(numbers(train), best, sample_weight=[stakes(s) for s in train])
    losses = []
    for sample, likely in zip(test, tree.predict_proba(numbers(test)), strict=True):
        order = [tree.classes_[k] for k in np.argsort(-likely, kind="stable")]
        rest = sorted(sample.times.keys() - set(order))
        losses.append(next(sample.losses[k] for k in [*order, *rest] if k in sample.times))
    return losses


def tree_regret(found: Sequence[Sample], leaves: int) -> float:
    """Geometric mean over all networks, each left out of its tree; a tree a caller and family."""
    lost = weights = 0.0
    groups: dict[tuple[str, bool], list[Sample]] = {}
    for sample in found:
        groups.setdefault((sample.case.caller, sample.spec.op == "linear"), []).append(sample)
    for group in groups.values():
        for network in sorted({net for s in group for net in s.networks}):
            train = [s for s in group if network not in s.networks]
            test = [s for s in group if network in s.networks]
            if train:
                for sample, loss in zip(test, tree_losses(train, test, leaves), strict=True):
                    weight = sample.weight / len(sample.networks)
                    lost, weights = lost + weight * loss, weights + weight
    return math.expm1(lost / weights)


def main() -> None:
    """Print the regret of trees of several sizes, and of the rules."""
    measured = read(sys.argv[1])
    found = [sample for sample in samples(measured) if sample.decided]
    for leaves in LEAVES:
        print(f"tree, at most {leaves:2} leaves each: {tree_regret(found, leaves):.2%}")
    fitted = fit(measured)
    for score in fitted.scores:
        if score.table.startswith("fitted"):
            print(f"{len(fitted.table.rules)} rules, {score.caller}: {score.regret.mean:.2%}")


if __name__ == "__main__":
    main()
