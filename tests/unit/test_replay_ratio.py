"""How much a recorded run was slower than simulated: the median step tells."""

from __future__ import annotations

from libra.pipeline.simulate.replay import _ratio


def test_a_step_that_something_else_slowed_down_counts_once() -> None:
    simulated = dict.fromkeys(range(5), 1.0)
    assert _ratio({0: 1.5, 1: 1.4, 2: 30.0, 3: 1.6, 4: 1.5}, simulated) == 1.5


def test_steps_without_any_time_tell_nothing() -> None:
    assert _ratio({0: 0.0, 1: 2.0}, {0: 1.0, 1: 0.0}) == 1.0
