"""The joint search against looking at every split of every small budget."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from workloads import records

from libra.resources.cost_model import Requests, RolloutCosts, TrainingCosts
from libra.resources.specs import load_hardware, load_model
from libra.scheduler_plugin.planner import TrainTree, limits_of
from libra.scheduler_plugin.planner.joint import INFINITY, search
from libra.scheduler_plugin.planner.layouts import RolloutSide

HARDWARE = {name: load_hardware(name) for name in ("a800_80g", "h20", "h100")}


def sides(seed: int) -> tuple[TrainTree, RolloutSide]:
    rng = np.random.default_rng(seed)
    model = load_model(str(rng.choice(["Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B"])))
    hardware = HARDWARE[str(rng.choice(list(HARDWARE)))]
    workload = records(int(rng.integers(8, 80)), seed=seed, mean=float(rng.uniform(1000, 12000)))
    tree = TrainTree(
        TrainingCosts(model, hardware, np.array([float(r.context) for r in workload])), limits_of("megatron")
    )
    return tree, RolloutSide(Requests.from_records(workload), RolloutCosts.from_specs(model, hardware))


def exhaustive(tree: TrainTree, side: RolloutSide, budget: int) -> float:
    best = INFINITY
    for gpus in range(1, budget):
        trained = tree.best(gpus)
        if trained is None:
            continue
        left = budget - gpus
        layouts = [side.solver.solve(left).seconds]
        layouts += [side.mixed_seconds(counts) for counts in side.homogeneous_counts(left)]
        partition = side.partition(left)
        if partition is not None:
            layouts.append(side.mixed_seconds(side.counts_of(partition)))
        best = min(best, max(trained[1], min(layouts)))
    return best


@pytest.mark.parametrize("budget", range(2, 17))
@pytest.mark.parametrize("seed", range(6))
def test_within_1e_9_of_exhaustive_search(seed: int, budget: int) -> None:
    tree, side = sides(seed)
    found = search(tree, side, budget).best
    expected = exhaustive(tree, side, budget)
    if expected == INFINITY:
        assert found is None
    else:
        assert found is not None
        assert found.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_never_worse_than_the_best_homogeneous_layout(seed: int) -> None:
    tree, side = sides(seed)
    for budget in (12, 40, 100):
        found = search(tree, side, budget)
        assert found.best is not None
        assert found.homogeneous is not None
        assert found.best.seconds <= found.homogeneous.seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_more_devices_never_make_the_exact_search_slower(seed: int) -> None:
    tree, side = sides(seed)
    seconds = [s.seconds if (s := search(tree, side, budget).partition) else INFINITY for budget in range(2, 60, 3)]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(seconds))
