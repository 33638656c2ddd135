"""What replays need of the simulator: hand-overs, groups that come back, installation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra.pipeline.simulate.scenario import Scenario
from libra.pipeline.simulate.variants import moves_of, planner_of
from libra.pipeline.simulate.workload import Workload
from libra.resources.cost_model import StepCost
from libra.resources.types import Bucket, ToolState
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.simulation import (
    Ended,
    Engine,
    LoopConfig,
    LoopResult,
    Moves,
    RolloutSimulation,
    RunLoop,
    Trace,
    Turn,
)

STEP = StepCost(1, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0, capacity=1e6, slots=8)
CALL = ToolState("tool", 0, "ok")
TURNS = (Turn(100, CALL, 10, 2.0), Turn(50))


def ends(*traces: Trace, cancel: str | None = None, **moves: bool) -> list[Ended]:
    """The ends of traces on one engine, in order."""
    simulation = RolloutSimulation(
        [Engine("e", "n", STEP)], [Bucket(1, None)], LeastLoaded({}), Moves(0.0, 1.0, 1.0, **moves)
    )
    for trace in traces:
        simulation.submit(trace)
    found = [simulation.cancel(cancel)] if cancel else []
    while (event := simulation.step()) is not None:
        assert isinstance(event, Ended)
        found.append(event)
    assert simulation.in_flight == 0
    return found


def test_hand_overs_come_before_the_first_segment_and_after_the_last() -> None:
    (plain,) = ends(Trace("p0e0m0", 20, TURNS))
    (handed,) = ends(Trace("p0e0m0", 20, TURNS, lead=3.0, trail=5.0))
    assert plain.time == pytest.approx(1.5 + 2.0, abs=1e-3)
    assert handed.time - plain.time == pytest.approx(8.0)
    assert plain.engine_seconds == pytest.approx(handed.engine_seconds) == pytest.approx(1.5, abs=1e-3)
    assert (handed.how, handed.began) == ("finished", 0.0)


@pytest.mark.parametrize("lead", [0.0, 3.0])
def test_what_waits_for_its_first_segment_can_be_cancelled(lead: float) -> None:
    found = ends(Trace("p0e0m0", 20, TURNS, lead=lead), Trace("p1e0m0", 20, TURNS), cancel="p0e0m0")
    assert [(e.trace.name, e.how) for e in found] == [("p0e0m0", "cancelled"), ("p1e0m0", "finished")]


def test_prompts_are_prefilled_once_a_group_or_by_every_member() -> None:
    slow = replace(STEP, prefill_token=0.01)

    def seconds(shared: bool) -> float:
        engine = Engine("e", "n", slow)
        simulation = RolloutSimulation(
            [engine], [Bucket(1, None)], LeastLoaded({}), Moves(0.0, 1.0, 1.0, shared=shared)
        )
        for member in range(4):
            simulation.submit(Trace(f"p0e0m{member}", 100, (Turn(10),)))
        while simulation.step() is not None:
            pass
        return engine.prefilled

    assert seconds(True) == pytest.approx(103)
    assert seconds(False) == pytest.approx(400)


SCENARIO = Scenario(
    name="t", model="Qwen3-4B", cluster="one_node_h200", steps=4, groups=3, members=4, uniform_tp=2, rescore=0
)


def loop(returned: frozenset[str] = frozenset(), install: float = 0.0) -> tuple[LoopResult, list[int]]:
    """A run of four steps at α = 1, and the groups that it admitted."""
    planner = planner_of(SCENARIO)
    workload = Workload(SCENARIO.workload, 0, 40, SCENARIO.groups, SCENARIO.members)
    admitted: list[int] = []

    def group(number: int) -> list[Trace]:
        admitted.append(number)
        return [replace(trace, name=f"p{number}e0m{i}") for i, trace in enumerate(workload.group(number % 12))]

    plan = planner.fixed([t.record() for t in workload.batch(0)], 4, 2)
    config = LoopConfig(4, SCENARIO.groups, SCENARIO.members, 1, install_seconds=install)
    made = RunLoop(
        config, planner, plan, group, LeastLoaded({}), moves_of(planner, True), returned=returned.__contains__
    )
    return made.run(), admitted


def test_a_group_that_taught_nothing_gives_its_place_to_another() -> None:
    base, admitted = loop()
    assert len(admitted) == 12
    result, more = loop(frozenset({"p1e0", "p2e0", "p7e0"}))
    assert len(more) == 15
    assert len(result.steps) == len(base.steps) == 4
    assert max(step.staleness for step in result.steps) <= 1


def test_groups_wait_for_their_weights_to_be_installed() -> None:
    base, _ = loop()
    late, admitted = loop(install=500.0)
    # Less than the whole wait may be added: engines load while nothing runs on them.
    assert late.seconds > base.seconds + 490
    assert len(admitted) == 12
