"""When plans change: gain against cost, hysteresis, cool-down, roll-back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra.resources.types import BucketPlan, InstancePlan, KindLayout, Plan, RolloutLayout, TrainStrategy
from libra.scheduler_plugin.planner.replan import Outlook, ReplanConfig, Replanner

CONFIG = ReplanConfig(
    interval=1, horizon=10, confirm=2, cool_down=4, settle=1, judge=1, switch_seconds=20.0, safety=1.5
)


def plan(train: int, instances: int) -> Plan:
    layout = RolloutLayout("homogeneous", 100.0, (InstancePlan(1, 1, 10, 1, 100.0),) * instances, ())
    strategy = TrainStrategy(1, 1, 1, train)
    return Plan(strategy, "cpu", (KindLayout("cpu", ("all",), layout),), 90.0, 100.0, (), (), (), "test")


A, B = plan(2, 6), plan(4, 4)


def test_a_gain_that_pays_is_applied_after_it_was_confirmed() -> None:
    replanner = Replanner(CONFIG, A)
    assert replanner.consider(1, B, Outlook(100.0, 80.0)).action == "keep"
    decision = replanner.consider(2, B, Outlook(100.0, 80.0))
    assert decision.action == "apply"
    assert decision.gain_seconds == pytest.approx(20.0)
    assert decision.cost_seconds == pytest.approx(30.0)
    assert replanner.current is B


@pytest.mark.parametrize(("last", "action"), [(None, "apply"), (30, "apply"), (5, "apply"), (4, "keep"), (3, "keep")])
def test_a_change_must_pay_before_the_run_ends(last: int | None, action: str) -> None:
    """20 s a step against 30 s, from the second step after the change on: the first one's batch is in flight."""
    replanner = Replanner(CONFIG, A, last)
    replanner.consider(1, B, Outlook(100.0, 80.0))
    assert replanner.consider(2, B, Outlook(100.0, 80.0)).action == action


@pytest.mark.parametrize(
    ("outlook", "says"),
    [
        (Outlook(100.0, 97.0), "is under 8%"),
        (Outlook(100.0, 110.0), "is under 8%"),
        (Outlook(30.0, 27.1), "do not pay"),
    ],
)
def test_what_does_not_pay_is_not_applied(outlook: Outlook, says: str) -> None:
    replanner = Replanner(CONFIG, A)
    for step in range(1, 6):
        decision = replanner.consider(step, B, outlook)
        assert decision.action == "keep"
        assert says in decision.reason


def test_a_lone_favourable_look_is_noise() -> None:
    replanner = Replanner(CONFIG, A)
    for step in range(1, 20, 2):
        replanner.consider(step, B, Outlook(100.0, 80.0))
        assert replanner.consider(step + 1, B, Outlook(100.0, 99.0)).action == "keep"
    assert replanner.current is A


def test_a_favourable_look_is_confirmed_at_the_next_step() -> None:
    replanner = Replanner(CONFIG.model_copy(update={"interval": 5}), A)
    replanner.consider(5, B, Outlook(100.0, 99.0))
    assert not replanner.due(6)
    replanner.consider(10, B, Outlook(100.0, 80.0))
    assert replanner.due(11)
    assert replanner.consider(11, B, Outlook(100.0, 80.0)).action == "apply"


def adopt(replanner: Replanner, candidate: Plan, step: int) -> None:
    replanner.consider(step - 1, candidate, Outlook(100.0, 80.0))
    assert replanner.consider(step, candidate, Outlook(100.0, 80.0)).action == "apply"


def test_changes_are_a_cool_down_apart() -> None:
    replanner = Replanner(CONFIG.model_copy(update={"window": 1}), A)
    adopt(replanner, B, 2)
    for step in range(3, 6):
        replanner.observe(step, 80.0, 80.0)
        assert replanner.consider(step, A, Outlook(100.0, 50.0)).action == "keep"
        assert not replanner.due(step)


def test_twice_worse_than_predicted_is_rolled_back_and_barred() -> None:
    replanner = Replanner(CONFIG, A)
    adopt(replanner, B, 2)
    assert replanner.observe(3, 500.0, 80.0).action == "keep"  # settling: not judged
    assert replanner.observe(4, 95.0, 80.0).action == "keep"
    decision = replanner.observe(5, 96.0, 80.0)
    assert decision.action == "roll_back"
    assert decision.plan is A
    assert [o.measured for o in replanner.outcomes] == [95.0, 96.0]
    for step in range(10, 30):
        assert replanner.consider(step, B, Outlook(100.0, 70.0)).action == "keep"
    other = replace(B, strategy=TrainStrategy(1, 1, 1, 3))
    adopt(replanner, other, 31)


def test_a_bad_step_among_good_ones_is_forgiven() -> None:
    replanner = Replanner(CONFIG.model_copy(update={"judge": 3}), A)
    adopt(replanner, B, 2)
    for step, seconds in enumerate((80.0, 150.0, 80.0, 80.0, 80.0, 80.0, 80.0), start=3):
        assert replanner.observe(step, seconds, 80.0).action == "keep"
    assert replanner.current is B


def test_a_drift_that_the_model_sees_is_not_held_against_the_plan() -> None:
    replanner = Replanner(CONFIG, A)
    adopt(replanner, B, 2)
    for step in range(3, 20):
        assert replanner.observe(step, 80.0 * step, 80.0 * step).action == "keep"


def test_a_biased_model_cancels_out() -> None:
    replanner = Replanner(CONFIG, A)
    for step in range(1, 4):
        replanner.observe(step, 200.0, 100.0)  # everything takes twice what is predicted
    replanner.consider(4, B, Outlook(100.0, 80.0))
    decision = replanner.consider(5, B, Outlook(100.0, 80.0))
    assert decision.gain_seconds == pytest.approx(40.0)
    assert replanner.observe(7, 160.0, 80.0).reason == "as predicted"


def test_requests_that_should_not_fit_tell_nothing_of_the_model() -> None:
    replanner = Replanner(CONFIG, A)
    replanner.observe(1, 200.0, float("inf"))
    replanner.consider(2, B, Outlook(100.0, 80.0))
    assert replanner.consider(3, B, Outlook(100.0, 80.0)).gain_seconds == pytest.approx(20.0)


def test_a_plan_under_which_requests_fit_at_all_pays() -> None:
    replanner = Replanner(CONFIG, A)
    replanner.consider(1, B, Outlook(float("inf"), 80.0))
    assert replanner.consider(2, B, Outlook(float("inf"), 80.0)).action == "apply"


def test_a_measured_switching_cost_replaces_the_assumed_one() -> None:
    replanner = Replanner(CONFIG, A)
    replanner.switched(400.0)
    for step in range(1, 6):
        assert replanner.consider(step, B, Outlook(100.0, 80.0)).action == "keep"


def bounded(bound: int | None) -> Plan:
    """Four instances of TP 1 and two of TP 2; contexts up to ``bound`` go to the former (None: all go anywhere)."""
    instances = (InstancePlan(1, 1, 10, 1, 100.0),) * 4 + (InstancePlan(2, 1, 10, 1, 100.0),) * 2
    buckets = (BucketPlan(None, None, 6),) if bound is None else (BucketPlan(1, bound, 4), BucketPlan(2, None, 2))
    layout = RolloutLayout("mixing" if bound is None else "partition", 100.0, instances, buckets)
    return replace(A, rollout=(KindLayout("cpu", ("all",), layout),))


def test_bounds_that_moved_far_change_at_once_and_cost_nothing() -> None:
    replanner = Replanner(CONFIG, bounded(1000))
    decision = replanner.consider(1, bounded(2000), Outlook(100.0, 99.0))
    assert decision.action == "rebound"
    assert decision.cost_seconds == 0.0
    assert decision.reason == "the same instances, other bounds: TP 1 up to 2000, TP 2 up to any"
    assert replanner.current.layout.buckets[0].max_context == 2000
    assert not replanner.judging
    assert replanner.due(2)


def test_bounds_do_not_jitter() -> None:
    replanner = Replanner(CONFIG, bounded(1000))
    for step, bound in enumerate((1100, 950, 1190, 850), start=1):
        assert replanner.consider(step, bounded(bound), Outlook(100.0, 90.0)).action == "keep"
    assert replanner.consider(9, bounded(2000), Outlook(100.0, 101.0)).action == "keep"


def test_a_mixed_bucket_is_divided_only_where_that_saves_something() -> None:
    replanner = Replanner(CONFIG, bounded(None))
    assert replanner.consider(1, bounded(1000), Outlook(100.0, 97.0)).action == "keep"
    assert replanner.consider(2, bounded(1000), Outlook(100.0, 80.0)).action == "rebound"


def test_ratios_to_an_older_cost_model_are_forgotten() -> None:
    replanner = Replanner(CONFIG, A)
    for step in range(1, 4):
        replanner.observe(step, 200.0, 100.0)
    replanner.recalibrated()
    replanner.consider(4, B, Outlook(100.0, 80.0))
    assert replanner.consider(5, B, Outlook(100.0, 80.0)).gain_seconds == pytest.approx(20.0)
