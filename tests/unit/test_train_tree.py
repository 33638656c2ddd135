"""The training tree: every node with a reason, and searches that equal looking at every leaf."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from workloads import records

from libra.resources.cost_model import TrainingCosts
from libra.resources.specs import load_hardware, load_model
from libra.scheduler_plugin.planner import Limits, TrainTree, limits_of
from libra.tasks.registry import launches_of

A800 = load_hardware("a800_80g")
LENGTHS = np.array([float(r.context) for r in records(200, seed=2)])


def tree(model: str = "Qwen3-14B", limits: Limits | None = None) -> TrainTree:
    return TrainTree(TrainingCosts(load_model(model), A800, LENGTHS), limits or limits_of("megatron"))


@pytest.mark.parametrize("model", ["Qwen3-14B", "Qwen3-30B-A3B", "Qwen3-0.6B"])
@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 16, 24])
def test_the_search_equals_every_leaf_of_every_trace(model: str, gpus: int) -> None:
    searched = tree(model)
    leaves = [node for n in range(1, gpus + 1) for node in tree(model).expand(n) if node.level == "DP" and node.kept]
    found = searched.best(gpus)
    if not leaves:
        assert found is None
        return
    assert found is not None
    least = min(node.seconds for node in leaves if node.seconds is not None)
    assert found[1] == pytest.approx(least, rel=1e-9)
    limit = least * 1.5
    fewest = searched.fewest(limit, gpus)
    assert fewest is not None
    expected = min(n.degrees[0] * n.degrees[1] * n.degrees[2] * n.degrees[3] for n in leaves if n.seconds <= limit)  # type: ignore[operator]
    assert fewest[0].gpus == expected
    assert fewest[1] <= limit


@pytest.mark.parametrize("gpus", [1, 2, 6, 16, 64])
@pytest.mark.parametrize("share", [0.3, 0.9, 1 - 1e-6, 1.0, 1 + 1e-6, 1.1, 3.0])
def test_whether_training_loses_is_what_its_best_strategy_says(gpus: int, share: float) -> None:
    """Asked of bounds first, so on a fresh tree, and of fewer strategies than the best one takes."""
    exact, asked = tree("Qwen3-30B-A3B"), tree("Qwen3-30B-A3B")
    found = exact.best(gpus)
    limit = share * found[1] if found else 1.0
    assert asked.loses(gpus, lambda seconds: seconds > limit) == (None if found is None else found[1] > limit)
    assert asked.evaluated <= exact.evaluated


def test_every_node_has_a_reason_and_leaves_use_all_devices() -> None:
    nodes = tree().expand(16)
    assert all(node.reason for node in nodes)
    assert {node.level for node in nodes} == {"TP", "EP", "PP", "DP", "MB", "RC"}
    for node in nodes:
        if node.level == "DP" and node.kept:
            assert node.strategy is not None
            assert node.strategy.gpus == 16
    pruned = " ".join(node.reason for node in nodes if not node.kept)
    assert "GiB a device" in pruned
    assert "devices are not divisible" in pruned or "pipeline bubble" in pruned


def test_only_what_the_trainer_can_launch_is_offered() -> None:
    small = TrainTree(
        TrainingCosts(load_model("SmolLM2-135M"), A800, LENGTHS), limits_of("torch", launches_of("torch"))
    )
    found = small.best(8)
    assert found is not None
    assert found[0].gpus == 1
    reasons = {node.reason for node in small.expand(8) if not node.kept}
    assert "the torch trainer launches at most TP 1" in reasons
    assert "the torch trainer launches at most 1 data-parallel rank(s)" in reasons


def test_experts_stay_inside_a_node() -> None:
    nodes = tree("Qwen3-30B-A3B").expand(32)
    kept = [node.strategy for node in nodes if node.strategy]
    assert any(s.ep > 1 for s in kept)
    assert all(s.tp * s.ep <= A800.gpus_per_node for s in kept)
    assert any("all-to-all out of a node" in node.reason for node in nodes if not node.kept)


def test_a_threshold_on_communication_cuts_tensor_parallelism() -> None:
    strict = tree(limits=replace(limits_of("megatron"), communication=0.05))
    reasons = [node.reason for node in strict.expand(8) if node.level == "TP" and not node.kept]
    assert any("communication/compute" in reason for reason in reasons)


def test_slow_links_make_communication_a_larger_share() -> None:
    slow = A800.model_copy(update={"nvlink_gb_per_s_per_direction": 20.0})
    nodes = TrainTree(TrainingCosts(load_model("Qwen3-14B"), slow, LENGTHS), limits_of("megatron")).expand(8)
    assert any(node.degrees[0] == 8 and "communication/compute" in node.reason for node in nodes)


@pytest.mark.parametrize(("model", "gpus"), [("Qwen3-14B", 16), ("Qwen3-14B", 12), ("Qwen3-30B-A3B", 8)])
def test_the_trace_is_complete(model: str, gpus: int) -> None:
    """Every combination of degrees is a leaf of the trace or below a node that is pruned in it."""
    traced = tree(model)
    nodes = traced.expand(gpus)
    kept = {(n.degrees, n.recompute) for n in nodes if n.level == "RC" and n.kept}
    pruned = {(n.degrees, n.recompute) for n in nodes if not n.kept}
    spec = load_model(model)
    seen = 0
    for tp, ep, pp, micro, policy in product(
        (1, 2, 4, 8), divisors(max(1, spec.experts)), divisors(spec.layers), (1, 2, 4), ("none", "selective", "full")
    ):
        dp = gpus // (tp * ep * pp)
        path = (tp, ep, pp, dp, micro)
        prefixes = [((*path[:i], *(0,) * (5 - i)), None) for i in range(1, 6)] + [(path, policy)]
        cut = [prefix for prefix in prefixes if prefix in pruned]
        assert bool(cut) != ((path, policy) in kept), (path, policy)
        seen += (path, policy) in kept
    assert seen == len(kept) > 0
    assert len({(n.level, n.degrees, n.recompute) for n in nodes}) == len(nodes)


def divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def test_experts_are_divided_by_any_divisor_that_packs_a_node() -> None:
    sixty = load_model("Qwen3-30B-A3B").model_copy(update={"experts": 60})
    six = A800.model_copy(update={"gpus_per_node": 6})
    nodes = TrainTree(TrainingCosts(sixty, six, LENGTHS), limits_of("megatron")).expand(12)
    degrees = {n.degrees[1]: n for n in nodes if n.level == "EP" and n.degrees[0] == 1}
    assert list(degrees) == divisors(60)
    assert degrees[3].kept
    assert degrees[6].kept
    assert "straddle" in degrees[4].reason
    assert "out of a node" in degrees[60].reason
