"""Several runs on one cluster: quotas, many dimensions, and demand beside equal shares."""

from __future__ import annotations

from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.pipeline.simulate.jobs import SharedScenario, Truth, compare_shares, share
from libra.pipeline.simulate.workload import WorkloadConfig
from libra.resources.errors import ConfigError
from libra.scheduler_plugin.planner.sharing import Demand, Feedback, demand_driven, equal_shares, pays

CAPACITY = {"gpu": 64.0, "cpu": 512.0}


def job(name: str, work: float, floor: float = 0.0, least: int = 1, most: int = 64, **unit: float) -> Demand:
    return Demand(name, {"gpu": 8.0, "cpu": 16.0} | unit, least, most, lambda n: floor + work / n)


def test_a_saturated_run_leaves_devices_to_one_that_is_not() -> None:
    demands = [job("short", 10.0, floor=100.0), job("long", 1000.0)]
    assert equal_shares(CAPACITY, demands) == {"short": 4, "long": 4}
    found = demand_driven(CAPACITY, demands)
    assert found["long"] > found["short"]
    assert sum(found.values()) == 8


def test_equal_runs_get_equal_shares() -> None:
    assert demand_driven(CAPACITY, [job("a", 100.0), job("b", 100.0)]) == {"a": 4, "b": 4}


def test_quotas_hold() -> None:
    found = demand_driven(CAPACITY, [job("a", 100.0, most=2), job("b", 1.0, least=3)])
    assert found["a"] == 2
    assert found["b"] >= 3


def test_the_scarcest_dimension_limits() -> None:
    demands = [job("a", 100.0, cpu=200.0), job("b", 100.0)]
    found = demand_driven(CAPACITY, demands)
    assert found["a"] * 200 + found["b"] * 16 <= 512
    assert found["a"] == 2


def test_quotas_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceed the cluster in gpu"):
        demand_driven(CAPACITY, [job("a", 1.0, least=5), job("b", 1.0, least=5)])
    with pytest.raises(ConfigError, match="run a needs at least 5 units, its equal share holds 4"):
        equal_shares(CAPACITY, [job("a", 1.0, least=5), job("b", 1.0)])


@given(
    st.lists(
        st.tuples(st.floats(1, 1e3), st.floats(0, 50), st.floats(1, 60), st.integers(1, 3)), min_size=1, max_size=5
    )
)
@settings(max_examples=100, deadline=None)
def test_no_dimension_is_ever_exceeded(runs: list[tuple[float, float, float, int]]) -> None:
    capacity = {"gpu": 160.0, "cpu": 1000.0}
    demands = [job(f"r{i}", work, floor, most=most * 4, cpu=cpu) for i, (work, floor, cpu, most) in enumerate(runs)]
    for allocate in (demand_driven, equal_shares):
        found = allocate(capacity, demands)
        for dimension, amount in capacity.items():
            assert sum(found[d.name] * d.unit[dimension] for d in demands) <= amount + 1e-6


def test_feedback_finds_a_hidden_factor_within_its_bound() -> None:
    feedback = Feedback()
    for _ in range(30):
        feedback.observe("a", 10.0, 25.0)
        feedback.observe("b", 10.0, 1e6)
    assert feedback.predicted("a", 10.0) == pytest.approx(25.0)
    assert feedback.predicted("b", 10.0) <= 40.0


def test_a_change_pays_only_where_its_gain_beats_standing_still() -> None:
    demands = [job("short", 10.0, floor=100.0), job("long", 1000.0)]
    old, new = {"short": 4, "long": 4}, {"short": 1, "long": 7}
    assert pays(old, new, demands, seconds=1000.0, switch_seconds=0.0)
    assert pays(old, new, demands, seconds=1000.0, switch_seconds=100.0)
    assert not pays(old, new, demands, seconds=1000.0, switch_seconds=300.0)
    assert not pays(old, new, demands, seconds=1000.0, switch_seconds=1000.0)
    assert not pays(new, old, demands, seconds=1000.0, switch_seconds=0.0)
    assert not pays(old, old, demands, seconds=1000.0, switch_seconds=0.0)


SMALL = SharedScenario.model_validate(
    {
        "name": "small", "nodes": 8, "seconds": 3600, "every": 1200,
        "jobs": [
            {
                "name": "short", "model": "Qwen3-0.6B", "workload": {"mean_from": 2000, "mean_to": 2000}, "groups": 8,
                "needs": {"gpus": 8, "gpu_memory_gb": 100, "cpu": 16, "host_memory_gb": 64, "network_gb_per_s": 1},
            },
            {
                "name": "long", "model": "Qwen3-14B", "groups": 24,
                "workload": {"mean_from": 2000, "mean_to": 14_000, "jump_at": 1},
                "needs": {"gpus": 8, "gpu_memory_gb": 640, "cpu": 150, "host_memory_gb": 500, "network_gb_per_s": 4},
            },
        ],
    }
)  # fmt: skip


@pytest.mark.parametrize("seed", SMALL.seeds)
def test_demand_driven_shares_make_more_progress_than_equal_ones(seed: int) -> None:
    truth = Truth(SMALL, seed)
    equal, driven = (share(SMALL, demand, truth) for demand in (False, True))
    assert driven.progress > equal.progress
    assert equal.stood == 0.0
    assert all(factor != 1.0 for factor in driven.factors.values())  # the workload moved on
    capacity = SMALL.capacity()
    for units in (*equal.shares, *driven.shares):
        for dimension, amount in capacity.items():
            assert sum(units[j.name] * j.needs.amounts()[dimension] for j in SMALL.jobs) <= amount
        assert all(j.least <= units[j.name] <= j.most for j in SMALL.jobs)


def test_reallocation_costs_what_runs_stand_still() -> None:
    short, long = SMALL.jobs
    grown = WorkloadConfig(mean_from=2000, mean_to=30_000, jump_at=1)
    shrunk = WorkloadConfig(mean_from=30_000, mean_to=2000, jump_at=1)
    jobs = (
        short.model_copy(update={"model": "Qwen3-14B", "groups": 24, "workload": grown}),
        long.model_copy(update={"workload": shrunk}),
    )
    truth = Truth(SMALL.model_copy(update={"jobs": jobs}), 0)
    free, paid, dear = (
        share(SMALL.model_copy(update={"jobs": jobs, "switch_seconds": seconds}), True, truth)
        for seconds in (0.0, 10.0, 1200.0)
    )
    changes = sum(a[name] != b[name] for a, b in zip(paid.shares, paid.shares[1:], strict=False) for name in a)
    assert changes > 0
    assert paid.stood == 10.0 * changes
    assert free.stood == 0.0
    assert free.progress > paid.progress
    assert all(units == dear.shares[0] for units in dear.shares)  # a whole period is never paid


def test_quotas_hold_against_demand() -> None:
    short, long = SMALL.jobs
    bounded = SMALL.model_copy(
        update={"jobs": (short.model_copy(update={"least": 3}), long.model_copy(update={"most": 2}))}
    )
    for units in share(bounded, True, Truth(bounded, 0)).shares:
        assert units["short"] >= 3
        assert units["long"] == 2


def test_seeds_are_told_with_their_spread() -> None:
    for each in compare_shares(SMALL):
        assert len(each.values) == len(set(each.values)) == 3
        assert each.progress == pytest.approx(mean(each.values))
        assert each.spread == pytest.approx(stdev(each.values))
