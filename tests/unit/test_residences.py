"""The plugin's side of the fused form, without Dask: which segments and questions count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from libra.resources import wire
from libra.resources.types import Bucket
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.binding import Binder
from libra.scheduler_plugin.forwarding import Outbox
from libra.scheduler_plugin.policy import load_policy
from libra.scheduler_plugin.residences import Residences
from libra.scheduler_plugin.routing import RoutingTable

KEY, OTHER = "rollout-000000-0badcafe-g0m0-0-0", "rollout-000000-0badcafe-g9m9-0-0"


@dataclass
class Task:
    """What Dask knows of a task."""

    run_id: int = 7
    state: str = "processing"
    metadata: dict[str, Any] | None = None


@dataclass
class Scheduler:
    """Tasks, and what was sent to whom."""

    tasks: dict[str, Task]
    sent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    workers: tuple[str, ...] = ("tcp://a", "tcp://b")

    def client_send(self, client: str, message: dict[str, Any]) -> None:
        self.sent.append((client, message))

    def worker_send(self, address: str, message: dict[str, Any]) -> None:
        self.sent.append((address, message))


def make(staging: bool = False) -> tuple[Residences, Scheduler, RoutingTable, Alarms]:
    """Two instances: what follows a payload of size class 1 goes to ``tcp://b``, all else to ``tcp://a``."""
    scheduler = Scheduler({KEY: Task()})
    alarms = Alarms(lambda where, error: None)
    table = RoutingTable(load_policy({"kind": "cluster_parts:FailsOn"}), [Bucket(1, 100), Bucket(2, None)], staging)
    outbox = Outbox(scheduler, alarms)
    binder = Binder(scheduler, table, outbox, alarms)
    table.offer("tcp://a", "a", 1, 8)
    table.offer("tcp://b", "b", 2, 8)
    return Residences(scheduler, binder, outbox, alarms, "client"), scheduler, table, alarms


def state(size: int) -> list[Any]:
    return ["get", size, "ok"]


def test_only_segments_of_the_run_that_dask_has_on_a_worker_count() -> None:
    residences, scheduler, _, alarms = make()
    residences.finished([(OTHER, 7, b"gone"), (KEY, 6, b"an earlier run"), (KEY, 7, b"1")])
    assert scheduler.sent == [("client", {"op": wire.GROWN, "segments": [(KEY, b"1")]})]
    assert scheduler.tasks[KEY].metadata == {wire.SEGMENT: True}
    scheduler.tasks[KEY].state = "no-worker"
    residences.finished([(KEY, 7, b"2")])
    assert len(scheduler.sent) == 1
    assert alarms.counts == {"segments": 1, "stale:segment": 3}


def test_a_question_is_answered_by_where_the_policy_puts_the_trajectory() -> None:
    residences, scheduler, table, alarms = make()
    table.open("g0m0", "p0", 30, returns=0)
    table.place("g0m0")
    residences.asked("tcp://a", [(1, KEY, 7, 0, state(0), 40)])
    assert scheduler.sent == [("tcp://a", {"op": wire.ANSWER, "answers": [(1, True, None)]})]
    residences.asked("tcp://a", [(2, KEY, 7, 1, state(1), 50)])
    assert scheduler.sent[1:] == [
        ("tcp://a", {"op": wire.FORGET, "trajectories": ["g0m0"]}),
        ("tcp://a", {"op": wire.ANSWER, "answers": [(2, False, None)]}),
    ]
    route = table.routes["g0m0"]
    assert ([each.size for each in route.history], route.context, route.instance) == ([0, 1], 50, "tcp://b")
    assert alarms.counts == {"stayed": 1, "moved": 1}


def test_where_kv_is_staged_the_instance_that_was_left_forgets_once_a_segment_has_ended_elsewhere() -> None:
    residences, scheduler, table, _ = make(staging=True)
    table.open("g0m0", "p0", 30, returns=0)
    table.place("g0m0")
    residences.finished([(KEY, 7, b"1")])
    residences.asked("tcp://a", [(1, KEY, 7, 0, state(1), 50)])
    assert [message["op"] for _, message in scheduler.sent] == [wire.GROWN, wire.ANSWER]
    scheduler.tasks[KEY] = Task(run_id=8)
    residences.finished([(KEY, 8, b"2")])
    assert scheduler.sent[2:] == [
        ("tcp://a", {"op": wire.FORGET, "trajectories": ["g0m0"]}),
        ("client", {"op": wire.GROWN, "segments": [(KEY, b"2")]}),
    ]


def test_a_question_that_no_longer_counts_gets_no_answer() -> None:
    residences, scheduler, _, alarms = make()
    residences.asked("tcp://a", [(1, KEY, 6, 0, state(0), 40), (2, OTHER, 7, 0, state(0), 40)])
    assert scheduler.sent == []
    assert alarms.counts == {"stale:question": 2}


def test_a_question_without_a_decision_gets_the_reason() -> None:
    residences, scheduler, _, _ = make()
    residences.asked("tcp://a", [(3, KEY, 7, 0, state(3), 40)])
    [(_, message)] = scheduler.sent
    assert message["answers"] == [(3, False, "the bucket policy failed: KeyError: 'no such bucket'")]
