"""Costs that follow the machine while a run runs: a side at a time, through change points, never while a plan is
judged."""

from __future__ import annotations

from typing import Any

import pytest
from workloads import records

from libra.scheduler_plugin.planner.following import Following
from libra.scheduler_plugin.planner.online import Online, OnlineConfig, WorkerDevice
from libra.scheduler_plugin.planner.replan import Seen
from libra.scheduler_plugin.roles import Duty


def test_training_is_measured_by_the_trainer_and_rollout_by_what_it_waited_for() -> None:
    following = Following()
    for _ in range(10):
        following.observe(10.0 * following.training.factor, 20.0 * following.rollout.factor, 12.0, 60.0)
    assert following.training.factor == pytest.approx(1.2, rel=0.02)
    assert following.rollout.factor == pytest.approx(3.0, rel=0.02)


def test_rollout_behind_a_busy_trainer_tells_only_that_it_was_not_slower() -> None:
    following = Following()
    for _ in range(10):
        following.observe(10.0, 4.0, 10.0, 10.5)
    assert following.rollout.factor == 1.0
    for _ in range(10):
        following.observe(10.0, 40.0 * following.rollout.factor, 10.0, 10.5)
    assert following.rollout.factor == pytest.approx(10.5 / 40.0, rel=0.05)


def test_long_and_short_steps_of_two_batches_in_flight_are_read_together() -> None:
    following = Following(overlap=2)
    for number in range(20):
        seconds = 90.0 if number % 2 else 30.0
        following.observe(20.0 * following.training.factor, 50.0 * following.rollout.factor, 20.0, seconds)
    assert following.rollout.factor == pytest.approx(60.0 / 50.0, rel=0.01)
    assert following.resets == 0  # the alternation is no change of the machine


def test_a_machine_that_becomes_slower_is_noticed_within_a_few_steps() -> None:
    following = Following()
    for _ in range(20):
        following.observe(5.0 * following.training.factor, 20.0 * following.rollout.factor, 5.0, 20.0)
    assert following.resets == 0
    steps = 0
    while not following.observe(5.0 * following.training.factor, 20.0 * following.rollout.factor, 5.0, 40.0):
        steps += 1
    assert steps < 5
    assert following.rollout.factor == pytest.approx(2.0)
    assert following.training.factor == pytest.approx(1.0)


CONFIG: dict[str, Any] = {
    "enabled": True, "model": "Qwen3-4B", "hardware": "a800_80g",
    "replan": {"interval": 1, "confirm": 1, "cool_down": 2, "switch_seconds": 0.1, "window": 2},
}  # fmt: skip


def online() -> Online:
    duties = [Duty("rollout", 1)] * 7 + [Duty("train")]
    return Online(
        OnlineConfig.model_validate(CONFIG), [WorkerDevice(f"w{i}", "host", False, d) for i, d in enumerate(duties)]
    )


def step(made: Online, number: int, slower: float) -> tuple[float, float]:
    """A step on a machine whose engines take ``slower`` times what the specs say; seconds predicted and measured."""
    batch = tuple(records(64, seed=number, mean=3_000.0))
    train, rollout = made.planner.evaluate(made.replanner.current, batch)
    seconds = max(train, slower * rollout)
    seen = Seen(number, seconds, batch, train)
    made.saw(seen)
    figures = made.figures(seen, made.window())
    made.decide(seen, figures)
    return figures.predicted, seconds


def test_predictions_of_a_run_follow_a_change_of_its_machine() -> None:
    made = online()
    for number in range(1, 12):
        predicted, seconds = step(made, number, 1.5)
    assert predicted == pytest.approx(seconds, rel=0.05)
    assert made.following.rollout.factor == pytest.approx(1.5, rel=0.05)
    for number in range(12, 24):
        predicted, seconds = step(made, number, 3.0)
    assert predicted == pytest.approx(seconds, rel=0.05)
    assert made.following.resets >= 1
    assert made.following.training.factor == pytest.approx(1.0, rel=0.02)


def test_costs_stand_still_while_a_plan_is_judged() -> None:
    made = online()
    number = 1
    while not made.replanner.judging:
        step(made, number, 1.0)
        number += 1
        assert number < 10
    before = made.following.rollout.factor
    step(made, number, 5.0)
    assert made.replanner.judging
    assert made.following.rollout.factor == before
