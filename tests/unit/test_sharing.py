"""Several runs on one cluster: quotas, many dimensions, and demand beside equal shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.pipeline.simulate.jobs import Job, share
from libra.pipeline.simulate.workload import WorkloadConfig
from libra.resources.errors import ConfigError
from libra.scheduler_plugin.planner.sharing import Demand, Feedback, demand_driven, equal_shares

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


def test_demand_driven_shares_make_more_progress_than_equal_ones() -> None:
    jobs = [
        Job("small", "Qwen3-0.6B", WorkloadConfig(mean_from=2000, mean_to=2000)),
        Job("large", "Qwen3-14B", WorkloadConfig(mean_from=4000, mean_to=14_000), hidden=1.5),
    ]
    equal = share(jobs, 8, 4000.0, 1000.0, demand=False)
    driven = share(jobs, 8, 4000.0, 1000.0, demand=True)
    assert driven.progress > equal.progress
    assert all(sum(units.values()) <= 8 for units in driven.shares)
