"""Planning for a run that runs, without Dask: workers as devices, what is fixed stays, plans become duties."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from workloads import records

from libra.resources.errors import ConfigError
from libra.resources.types import RequestRecord
from libra.scheduler_plugin.planner.online import Online, OnlineConfig, WorkerDevice
from libra.scheduler_plugin.planner.replan import Seen
from libra.scheduler_plugin.roles import Duty

REPLICAS = {"trainer": "scripted", "launches": {"dp": None}}
"""A trainer that takes more ranks as data-parallel replicas."""
BASE: dict[str, Any] = {
    "enabled": True, "model": "Qwen3-4B", "hardware": "a800_80g",
    "replan": {"interval": 1, "confirm": 1, "cool_down": 2, "switch_seconds": 0.1, "window": 2},
}  # fmt: skip


def workers(rollout: int, train: int, able: bool = True) -> list[WorkerDevice]:
    duties = [Duty("rollout", 1)] * rollout + [Duty("train")] * train
    return [WorkerDevice(f"w{i}", "host", able, duty) for i, duty in enumerate(duties)]


def online(rollout: int = 5, ranks: int = 1, able: bool = True, **changes: Any) -> Online:
    return Online(OnlineConfig.model_validate({**BASE, **changes}), workers(rollout, ranks, able))


def steps(made: Online, mean: float, count: int, first: int = 1) -> list[str]:
    """Feed steps that take what is predicted; the actions decided."""
    actions = []
    for step in range(first, first + count):
        seen = Seen(step, 1.0, tuple(records(64, seed=step, mean=mean)))
        made.saw(seen)
        figures = made.figures(seen, made.window())
        actions.append(made.decide(Seen(step, figures.predicted, seen.records), figures).action)
    return actions


def test_the_window_keeps_the_mix_although_members_come_shortest_first() -> None:
    made = online(replan={"window": 4})
    batch = sorted(records(8, seed=1, mean=3_000.0), key=lambda record: record.context) * 16
    for number in range(1, 5):
        made.saw(Seen(number, 1.0, tuple(batch)))
    assert Counter(record.context for record in made.window()) == Counter(record.context for record in batch)


def test_the_plan_in_force_is_what_workers_do() -> None:
    made = online(4, 2, train="move", planner=REPLICAS)
    assert made.duties(made.replanner.current) == {w.name: w.duty for w in workers(4, 2)}


def test_a_fixed_training_side_is_never_touched() -> None:
    made = online(7, 1, able=False)
    assert "apply" in steps(made, 3_000.0, 6)
    duties = made.duties(made.replanner.current)
    assert duties["w7"] == Duty("train")
    assert Counter(str(duty) for duty in duties.values())["train"] == 1
    degrees = [duty.tp or 0 for duty in duties.values() if duty and duty.role == "rollout"]
    assert 0 < sum(degrees) <= 7
    assert max(degrees) > 1


def test_an_instance_takes_the_workers_beside_it() -> None:
    made = online(7, 1, able=False)
    steps(made, 3_000.0, 6)
    duties = made.duties(made.replanner.current)
    assert set(duties) == {f"w{i}" for i in range(8)}
    assert sum(duty is None for duty in duties.values()) >= max(d.tp or 1 for d in duties.values() if d) - 1


def test_steady_work_is_left_alone_after_one_change() -> None:
    made = online(7, 1, able=False)
    actions = steps(made, 3_000.0, 20)
    assert actions.count("apply") == 1
    assert "roll_back" not in actions


def test_the_window_has_the_size_of_a_step() -> None:
    made = online()
    for step, mean in ((1, 1000.0), (2, 9000.0)):
        made.saw(Seen(step, 1.0, tuple(records(50, seed=step, mean=mean))))
    window = made.window()
    assert len(window) == 50
    longest = max(r.context for r in records(50, seed=1, mean=1000.0))
    assert any(r.context > longest for r in window)


def test_workers_that_cannot_change_sides_are_named() -> None:
    with pytest.raises(ConfigError, match="w0, w1, w2, w3, w4, w5 may not both roll out and train"):
        online(able=False, train="move")


def test_planning_begins_from_whole_workers() -> None:
    devices = [WorkerDevice("a", "host", True, Duty("rollout", 2)), WorkerDevice("b", "host", True, Duty("train"))]
    with pytest.raises(ConfigError, match="a has TP 2"):
        Online(OnlineConfig.model_validate(BASE), devices)


def test_a_profile_of_other_hardware_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a800_published is of a800_80g, planner.hardware is h20"):
        online(profile="a800_published", hardware="h20")


@pytest.mark.parametrize("record", records(5))
def test_records_travel_whole(record: RequestRecord) -> None:
    assert RequestRecord.from_plain(record.to_plain()) == record
