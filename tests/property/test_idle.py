"""Idle accounting: every instant of every unit is counted once, whatever the events."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.pipeline.view.events import InFlight, WaitEnded, WaitStarted, Worked
from libra.pipeline.view.idle import BUSY, RESOURCES, IdleAccount, difference, shares

UNITS = (*RESOURCES, "rollout/a", "rollout/b")
CAUSES = ("batch", "admission", "due group")

steps = st.floats(0, 100, allow_nan=False)
in_flight = st.dictionaries(st.sampled_from(UNITS), st.integers(0, 3)).map(lambda counts: ("flight", counts))
wait_starts = st.tuples(
    st.just("wait"), st.tuples(st.sampled_from("xyz"), st.sampled_from(RESOURCES), st.sampled_from(CAUSES))
)
wait_ends = st.tuples(st.just("end"), st.sampled_from("xyz"))
happenings = st.lists(st.tuples(steps, st.one_of(in_flight, wait_starts, wait_ends)), max_size=30)


def feed(account: IdleAccount, events: list[tuple[float, tuple]], extra_ticks: int = 0) -> float:
    now = 0.0
    for step, (kind, value) in events:
        for tick in range(extra_ticks):
            account.advance(now + step * (tick + 1) / (extra_ticks + 1))
        now += step
        if kind == "flight":
            account.in_flight(InFlight(now, value))
        elif kind == "wait":
            account.wait_started(WaitStarted(now, value[0], value[1], value[2]))
        else:
            account.wait_ended(WaitEnded(now, value))
    account.advance(now + 1)
    return now + 1


def units_seconds(events: list[tuple[float, tuple]]) -> dict[str, float]:
    """Unit-seconds of each resource, by the definition: a bare resource counts until its first instance is named."""
    total = dict.fromkeys(RESOURCES, 0.0)
    units, now = set(RESOURCES), 0.0
    for step, (kind, value) in [*events, (1.0, ("none", {}))]:
        for unit in units:
            total[unit.partition("/")[0]] += step
        now += step
        if kind == "flight":
            units |= {unit for unit in value if "/" in unit}
            units -= {unit.partition("/")[0] for unit in units if "/" in unit}
    return total


@given(happenings)
def test_busy_and_idle_seconds_add_up_to_all_unit_seconds(events: list[tuple[float, tuple]]) -> None:
    account = IdleAccount(0.0)
    feed(account, events)
    for resource, seconds in units_seconds(events).items():
        counted = account.seconds().get(resource, {})
        assert all(value >= 0 for value in counted.values())
        assert sum(counted.values()) == pytest.approx(seconds, abs=1e-6)


@given(happenings)
def test_splitting_intervals_changes_nothing(events: list[tuple[float, tuple]]) -> None:
    whole, split = IdleAccount(0.0), IdleAccount(0.0)
    feed(whole, events)
    feed(split, events, extra_ticks=3)
    for resource, causes in whole.seconds().items():
        assert split.seconds()[resource] == pytest.approx(causes)


@given(happenings)
def test_differences_of_readings_add_up(events: list[tuple[float, tuple]]) -> None:
    account = IdleAccount(0.0)
    readings = [account.seconds()]
    now = 0.0
    for event in events:
        now += event[0]
        account.advance(now)
        readings.append(account.seconds())
    total = {
        resource: sum(
            sum(difference(later, earlier).get(resource, {}).values()) for earlier, later in pairwise(readings)
        )
        for resource in RESOURCES
    }
    for resource, seconds in total.items():
        assert seconds == pytest.approx(sum(account.seconds().get(resource, {}).values()))


@given(happenings)
def test_shares_add_up_to_one_and_name_busy_first(events: list[tuple[float, tuple]]) -> None:
    account = IdleAccount(0.0)
    feed(account, events)
    for causes in shares(account.seconds()).values():
        assert sum(causes.values()) == pytest.approx(1.0)
        assert BUSY not in list(causes)[1:]


spans = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=12)


@given(spans, st.randoms(use_true_random=False))
def test_work_told_afterwards_counts_each_instant_once_in_any_order(
    spans: list[tuple[int, int]], order: Random
) -> None:
    account = IdleAccount(0.0)
    account.wait_started(WaitStarted(50.0, "w", "rollout", "admission"))
    account.advance(300.0)
    order.shuffle(spans)
    for begin, length in spans:
        account.worked(Worked(300.0, "rollout", float(begin), float(begin + length)))
    covered = {second for begin, length in spans for second in range(begin, begin + length)}
    seconds = account.seconds()["rollout"]
    assert seconds.get(BUSY, 0.0) == pytest.approx(len(covered))
    assert seconds.get("other", 0.0) == pytest.approx(50 - len({second for second in covered if second < 50}))
    assert sum(seconds.values()) == pytest.approx(300)


@given(happenings, spans)
def test_work_told_afterwards_changes_no_total(events: list[tuple[float, tuple]], spans: list[tuple[int, int]]) -> None:
    account = IdleAccount(0.0)
    now = feed(account, events)
    before = account.seconds()
    for begin, length in spans:
        account.worked(Worked(now, "tool", float(begin), float(begin + length)))
    for resource, causes in account.seconds().items():
        assert sum(causes.values()) == pytest.approx(sum(before[resource].values()))
        assert all(value >= -1e-6 for value in causes.values())


def test_a_clock_that_runs_backwards_counts_nothing() -> None:
    account = IdleAccount(100.0)
    account.in_flight(InFlight(90.0, {"train": 1}))
    assert account.seconds() == {}
    account.advance(110.0)
    assert account.seconds()["train"] == {BUSY: 10.0}


def test_an_example_of_a_step() -> None:
    """The trainer waits 3 s for rollouts and 1 s for a due group inside that, then trains 2 s."""
    account = IdleAccount(0.0)
    account.in_flight(InFlight(0.0, {"rollout/a": 4, "rollout/b": 0, "train": 0}))
    account.wait_started(WaitStarted(0.0, "1", "train", "batch"))
    account.wait_started(WaitStarted(1.0, "2", "train", "due group"))
    account.wait_ended(WaitEnded(2.0, "2"))
    account.wait_ended(WaitEnded(3.0, "1"))
    account.wait_started(WaitStarted(3.0, "3", "rollout", "admission"))
    account.in_flight(InFlight(3.0, {"rollout/a": 0, "train": 1}))
    account.advance(5.0)
    seconds = account.seconds()
    assert seconds["train"] == {"batch": 2.0, "due group": 1.0, BUSY: 2.0}
    assert seconds["rollout"] == {BUSY: 3.0, "other": 3.0, "admission": 4.0}, "two engines: 10 engine-seconds"
    assert seconds["tool"] == {"rollout": 5.0}, "tools wait for calls"


def test_an_example_of_work_told_afterwards() -> None:
    """A segment from 2 to 5 is told at 6; the one from 4 to 9 at 9, while the engine seemed idle."""
    account = IdleAccount(0.0)
    account.wait_started(WaitStarted(0.0, "w", "rollout", "tool"))
    account.worked(Worked(6.0, "rollout/a", 2.0, 5.0))
    assert account.seconds()["rollout"] == {"tool": 3.0, BUSY: 3.0}
    account.worked(Worked(9.0, "rollout/a", 4.0, 9.0))
    assert account.seconds()["rollout"] == {"tool": 2.0, BUSY: 7.0}
