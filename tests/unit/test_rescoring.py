"""Plans simulated in a child process: what it finds, and that it never outstays its deadline or its claim."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from child_parts import awaited
from workloads import records

from libra.pipeline.simulate.scenario import Scenario
from libra.pipeline.simulate.variants import planner_of
from libra.pipeline.simulate.workload import Workload
from libra.resources.cost_model.rollout import QueueModel
from libra.resources.cost_model.training import TrainingFactors
from libra.resources.errors import ClusterError, ConfigError
from libra.resources.inventory import from_cluster
from libra.resources.specs import load_model
from libra.resources.types import Bucket
from libra.scheduler_plugin.alarms import Alarms
from libra.scheduler_plugin.planner import Planner
from libra.scheduler_plugin.planner.online import Online, OnlineConfig, WorkerDevice
from libra.scheduler_plugin.planner.planner import Profiles
from libra.scheduler_plugin.planner.rescore import Job, grouped, simulated_seconds
from libra.scheduler_plugin.planner.rescoring import Rescoring
from libra.scheduler_plugin.policy import load_policy
from libra.scheduler_plugin.replanning import Replanning
from libra.scheduler_plugin.roles import Duty
from libra.scheduler_plugin.routing import RoutingTable

SCENARIO = Scenario(
    name="t", model="Qwen3-4B", cluster="one_node_h200", steps=4, groups=3, members=4, uniform_tp=2, rescore=0
)
LONG_SECONDS = 600.0


def child(code: str) -> list[str]:
    """A child that does something else."""
    return [
        sys.executable,
        "-c",
        f"import os, pickle, sys, time; sys.stdin.buffer.read(); out = sys.stdout.buffer\n{code}",
    ]


HANGS = "time.sleep(600)"


def job(**changes: Any) -> Job:
    planner = planner_of(SCENARIO)
    return Job(planner, records(16, mean=4000.0), **changes)


def test_the_child_plans_with_the_profile() -> None:
    plain = planner_of(SCENARIO)
    hardware = plain.inventory.hardware[0]
    costs = plain.rollout_costs(hardware)
    steps = tuple(replace(step, step=3 * step.step) for step in costs.steps)
    measured = replace(costs, steps=steps, queue=QueueModel(1.0, 1.0, 0.5, 0.5))
    factors = TrainingFactors(linear=6.0, quadratic=4.0, fixed_seconds=2.0, logprob_pass=False)
    profiles = Profiles({hardware.name: measured}, {hardware.name: factors}, {hardware.name: "measured"})
    planner = Planner(plain.model, plain.inventory, plain.config, profiles)
    traces = Workload(SCENARIO.workload, 0, 1, SCENARIO.groups, SCENARIO.members).batch(0)
    batch = [trace.record() for trace in traces]
    found = Rescoring(120.0).run(Job(planner, batch, traces, most=3))
    assert found is not None
    first = planner.candidates(batch, 1)[0]
    assert found.count == found.offered == 3
    assert found.seconds <= found.predicted
    assert found.predicted == pytest.approx(simulated_seconds(planner, first, grouped(traces), "cmlfq", 1))


def test_the_plan_in_force_is_simulated_beside_the_candidates() -> None:
    asked = job(most=2)
    current = asked.planner.fixed(asked.records, 4, 2)
    found = Rescoring(120.0).run(replace(asked, current=current))
    assert found is not None
    assert found.count == 2
    assert found.current is not None
    assert found.current > 0


def test_what_was_found_before_a_child_hangs_stands() -> None:
    said = f"for each in (['plan a', 'plan b', 'plan c'], 9.0, 7.0): pickle.dump(each, out)\nout.flush(); {HANGS}"
    found = Rescoring(5.0, child(said)).run(job())
    assert found is not None
    assert (found.plan, found.seconds, found.predicted) == ("plan b", 7.0, 9.0)
    assert (found.count, found.offered) == (2, 3)


def test_a_child_that_hangs_from_the_start_found_nothing() -> None:
    assert Rescoring(0.5, child(HANGS)).run(job()) is None


def test_a_child_that_does_not_even_listen_is_ended() -> None:
    big = job(options={"padding": "x" * 1_000_000})
    assert Rescoring(0.5, [sys.executable, "-c", "import time; time.sleep(600)"]).run(big) is None


def test_a_child_that_dies_before_it_has_read_all_is_told() -> None:
    big = job(options={"padding": "x" * 1_000_000})
    with pytest.raises(ClusterError, match="gone before"):
        Rescoring(60.0, [sys.executable, "-c", "import sys; sys.exit('gone before')"]).run(big)


@pytest.mark.parametrize("before", ["", "pickle.dump(['plan a'], out); pickle.dump(9.0, out); "])
def test_a_child_that_dies_is_told_with_its_own_words(before: str) -> None:
    with pytest.raises(ClusterError, match=r"failed in its child process.*out of luck.*rescore_seconds"):
        Rescoring(LONG_SECONDS, child(before + "sys.exit('out of luck')")).run(job())


def test_a_policy_that_does_not_exist_is_named() -> None:
    with pytest.raises(ClusterError, match=r"policy.kind 'nobody' is no bucket policy"):
        Rescoring(LONG_SECONDS).run(job(router="nobody", most=1))


def test_several_kinds_of_hardware_are_refused() -> None:
    planner = Planner(load_model("Qwen3-8B"), from_cluster("h800_h20"))
    with pytest.raises(ConfigError, match="simulated on one kind of hardware, the inventory has h800, h20"):
        Job(planner, records(16))


def marked(tmp_path: Path) -> tuple[list[str], Callable[[], int | None]]:
    """A child that leaves its process id and hangs; and a look for it."""
    file = tmp_path / "pid"
    made = (
        f"open({str(file) + '.new'!r}, 'w').write(str(os.getpid())); os.rename({str(file) + '.new'!r}, {str(file)!r})"
    )
    return child(f"{made}; {HANGS}"), lambda: int(file.read_text()) if file.exists() else None


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_cancelled_child_is_gone_and_no_other_is_started(tmp_path: Path) -> None:
    command, pid = marked(tmp_path)
    made, found = Rescoring(LONG_SECONDS, command), ["not yet"]
    thread = Thread(target=lambda: found.append(made.run(job())))  # type: ignore[arg-type]
    thread.start()
    while pid() is None:
        time.sleep(0.01)
    made.cancel()
    thread.join(30)
    assert found[1:] == [None]
    assert gone(pid() or 0)
    assert made.run(job()) is None


@awaited
async def test_the_child_ends_with_the_claim(tmp_path: Path) -> None:
    command, pid = marked(tmp_path)
    duties = [Duty("rollout", 1)] * 3 + [Duty("train")]
    config = OnlineConfig.model_validate(
        {"enabled": True, "model": "Qwen3-4B", "hardware": "a800_80g", "seconds": LONG_SECONDS,
         "replan": {"interval": 1, "cool_down": 0}}
    )  # fmt: skip
    online = Online(config, [WorkerDevice(f"w{i}", "host", False, duty) for i, duty in enumerate(duties)])
    pool: Any = SimpleNamespace(states={})
    table = RoutingTable(load_policy({"kind": "context_bounds"}), [Bucket(1, None)])
    alarms = Alarms(lambda where, error: None)
    made = Replanning(online, pool, table, alarms, lambda *_, **__: None, Rescoring(LONG_SECONDS, command))
    made.report(1, 10.0, records(16), 5.0)
    while pid() is None:
        await asyncio.sleep(0.01)
    made.end()
    while not gone(pid() or 0):
        await asyncio.sleep(0.01)
    assert not alarms.counts


@awaited
async def test_where_plans_cannot_be_simulated_the_closed_form_stands_and_the_alarm_tells() -> None:
    duties = [Duty("rollout", 1)] * 3 + [Duty("train")]
    config = OnlineConfig.model_validate(
        {"enabled": True, "model": "Qwen3-4B", "hardware": "a800_80g", "seconds": LONG_SECONDS,
         "replan": {"interval": 1, "cool_down": 0}}
    )  # fmt: skip
    online = Online(config, [WorkerDevice(f"w{i}", "host", False, duty) for i, duty in enumerate(duties)])
    pool: Any = SimpleNamespace(states={}, assign=lambda *_: None)
    table = RoutingTable(load_policy({"kind": "context_bounds"}), [Bucket(1, None)])
    alarms = Alarms(lambda where, error: None)
    dies = Rescoring(LONG_SECONDS, child("sys.exit('out of luck')"))
    made = Replanning(online, pool, table, alarms, lambda *_, **__: None, dies)
    made.report(1, 10.0, records(16), 5.0)
    while not any(name.startswith("replan:") for name in alarms.counts):
        await asyncio.sleep(0.01)
    made.end()
    assert alarms.counts["alarm:rescoring"] == 1
    assert alarms.counts["alarm:replanning"] == 0
