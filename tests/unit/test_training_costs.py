"""Training costs and memory: bounds, scaling and what must not happen."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import records

from libra.resources.cost_model import TrainingCosts
from libra.resources.cost_model.memory import RankMemory, rank_memory
from libra.resources.cost_model.strategies import Strategies
from libra.resources.cost_model.training import TrainingFactors
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import TrainStrategy

A800 = load_hardware("a800_80g")
LENGTHS = np.array([float(r.context) for r in records(300, seed=1)])
DENSE = TrainingCosts(load_model("Qwen3-14B"), A800, LENGTHS)
MOE = TrainingCosts(load_model("Qwen3-30B-A3B"), A800, LENGTHS)


def strategies() -> list[TrainStrategy]:
    return [
        TrainStrategy(tp, ep, pp, dp, micro)
        for tp, ep, pp, dp, micro in product((1, 2, 8), (1, 4), (1, 2, 8), (1, 3, 16), (1, 4))
        if tp * ep <= 8
    ]


@pytest.mark.parametrize("costs", [DENSE, MOE], ids=["dense", "moe"])
def test_the_lower_bound_is_one(costs: TrainingCosts) -> None:
    s = Strategies.of(strategies())
    columns = costs.columns(s)
    for i, (strategy, bound) in enumerate(zip(strategies(), costs.lower_bounds(s, columns), strict=True)):
        assert 0 < bound <= costs.seconds(strategy), strategy
        assert costs.predict_row(s, columns, i) == costs.predict(strategy)


@given(
    st.lists(st.floats(1, 40_960), min_size=1, max_size=40), st.sampled_from(["Qwen3-14B", "Qwen3-30B-A3B"]),
    st.sampled_from([1, 2, 4]), st.integers(1, 60), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.booleans(),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_the_lower_bound_is_one_for_any_lengths(
    lengths: list[float], model: str, tp: int, dp: int, pp: int, micro: int, logprobs: bool
) -> None:
    factors = TrainingFactors(logprob_pass=logprobs)
    costs = TrainingCosts(load_model(model), A800, np.array(lengths), factors)
    strategy = TrainStrategy(tp, 1, pp, dp, micro)
    s = Strategies.of([strategy])
    assert 0 < costs.lower_bounds(s, costs.columns(s))[0] <= costs.seconds(strategy)


def test_work_divides_over_ranks_but_not_below_the_longest_sequence() -> None:
    one, many = DENSE.predict(TrainStrategy(8, 1, 1, 1)), DENSE.predict(TrainStrategy(8, 1, 1, 16))
    assert 10 < one.passes / many.passes <= 16.1
    crowd = DENSE.predict(TrainStrategy(8, 1, 1, 4000))
    c = DENSE.coefficients(Strategies.of([TrainStrategy(8, 1, 1, 1)]))[0]
    powers = LENGTHS.max() ** np.arange(3)
    alone = (c[7:10] + c[10:13]) @ powers
    assert crowd.passes == pytest.approx(alone)


def test_compute_is_that_of_the_flops() -> None:
    strategy = TrainStrategy(1, 1, 1, 1, recompute="none")
    flops = 6 * DENSE.model.active_parameters * LENGTHS.sum()
    assert DENSE.predict(strategy).passes == pytest.approx(flops / (A800.flops * 0.42), rel=0.35)


def test_a_mixture_trains_on_its_active_parameters() -> None:
    strategy = TrainStrategy(1, 1, 1, 1)
    assert MOE.predict(strategy).passes < 0.4 * DENSE.predict(strategy).passes


def test_expert_parallel_adds_all_to_all_and_saves_memory() -> None:
    alone, split = TrainStrategy(2, 1, 1, 4), TrainStrategy(2, 4, 1, 1)
    both = Strategies.of([alone, split])
    weights = MOE.memory(both).weights
    assert weights[1] < 0.5 * weights[0]
    forward = MOE.coefficients(both)[:, 2]
    assert forward[1] > forward[0]


def memory(strategy: TrainStrategy) -> RankMemory:
    return rank_memory(DENSE.model, A800, Strategies.of([strategy]), np.array([8192.0]), np.array([8.0]))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_memory_falls_with_parallelism(tp: int) -> None:
    base, more = memory(TrainStrategy(tp, 1, 1, 2)), memory(TrainStrategy(2 * tp, 1, 1, 2))
    wide = memory(TrainStrategy(tp, 1, 1, 4))
    assert more.total < base.total
    assert wide.optimizer == base.optimizer / 2
    assert wide.weights == base.weights  # a distributed optimizer divides states, not weights


def test_adam_is_twelve_bytes_a_parameter() -> None:
    one = memory(TrainStrategy(1, 1, 1, 1))
    assert one.optimizer[0] == pytest.approx(12 * DENSE.model.parameters, rel=1e-6)
    assert one.total[0] > A800.memory


def test_recompute_trades_memory_for_time() -> None:
    full, selective, none = (TrainStrategy(8, 1, 1, 1, 1, r) for r in ("full", "selective", "none"))
    kept = DENSE.memory(Strategies.of([full, selective, none])).activations
    assert kept[0] < kept[1] < kept[2]
    assert DENSE.seconds(full) > DENSE.seconds(selective) > DENSE.seconds(none)


def test_crossing_nodes_is_paid_at_network_speed() -> None:
    inside = DENSE.predict(TrainStrategy(4, 1, 1, 2)).exchange
    across = DENSE.predict(TrainStrategy(8, 1, 1, 2)).exchange  # the same replicas, half the shard, two nodes
    assert across > 3 * inside
