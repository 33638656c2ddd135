"""The simulator: engines against stepping token by token, conservation, staleness, failures, redundancy, replanning."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from libra.pipeline.config import PolicyConfig
from libra.pipeline.simulate.scenario import Scenario
from libra.pipeline.simulate.variants import moves_of, planner_of, simulate
from libra.pipeline.simulate.workload import Workload, WorkloadConfig
from libra.resources.cost_model import Requests, RolloutCosts, StepCost
from libra.resources.cost_model.rollout import QueueModel, set_seconds
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import Bucket, ToolReturn, ToolState, Trajectory, TrajectoryId
from libra.scheduler_plugin.planner.replan import ReplanConfig
from libra.scheduler_plugin.planner.rescore import best_simulated, cmlfq_for, grouped
from libra.scheduler_plugin.planner.routing import PlanRouting
from libra.scheduler_plugin.planner.steering import InProcess, Steering
from libra.scheduler_plugin.policy import load_policy
from libra.scheduler_plugin.policy.context_bounds import ContextBounds
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
from libra.scheduler_plugin.simulation.engine import Sequence
from libra.scheduler_plugin.simulation.traces import trace_of

STEP = StepCost(1, 0.02, 1e-4, 1e-6, 0.0, 0.0, 0.0, capacity=1e9, slots=64)
MOVES = Moves(1.0, 1e9, 1e9)


def run(engines: list[Engine], traces: list[Trace], **options: object) -> tuple[RolloutSimulation, list[Ended]]:
    buckets = [Bucket(tp, None) for tp in sorted({e.cost.tp for e in engines})]
    simulation = RolloutSimulation(engines, buckets, LeastLoaded({}), MOVES, **options)  # type: ignore[arg-type]
    for trace in traces:
        simulation.submit(trace)
    ended = []
    while (event := simulation.step()) is not None:
        assert isinstance(event, Ended)
        ended.append(event)
    return simulation, ended


def simple(name: str, prompt: int, generated: int) -> Trace:
    return Trace(name, prompt, (Turn(generated),))


def test_an_engine_equals_stepping_token_by_token() -> None:
    lengths = [(100, 50), (400, 20), (10, 90)]
    engine = Engine("e", "n", STEP)
    for i, (context, left) in enumerate(lengths):
        job = Sequence(i)
        job.context, job.left = float(context), float(left)
        engine.add(job, 0.0)
    ends = []
    now = 0.0
    while (time := engine.next_event()) is not None:
        engine.advance(time)
        now = time
        ends += [(job.index, now) for job in engine.finished()]
    # The same, one token at a time, with growth within a step taken at its middle.
    running = {i: [float(c), g] for i, (c, g) in enumerate(lengths)}
    clock, expected = 0.0, []
    while running:
        resident = sum(c for c, _ in running.values())
        clock += STEP.decode_seconds(len(running), resident)
        for i in list(running):
            running[i][0] += 1
            running[i][1] -= 1
            if running[i][1] == 0:
                expected.append((i, clock))
                del running[i]
    assert [i for i, _ in ends] == [i for i, _ in expected]
    for (_, a), (_, b) in zip(ends, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def test_one_request_takes_its_closed_form() -> None:
    costs = RolloutCosts.from_specs(load_model("Qwen3-14B"), load_hardware("a800_80g"))
    trace = Trace("p0e0m0", 300, (Turn(500, None),))
    simulation, _ = run([Engine("e", "n", costs.of(2))], [trace])
    alone = set_seconds(Requests.from_records([trace.record()]), costs.of(2), QueueModel(1, 1, 0, 0))
    assert simulation.now == pytest.approx(alone, rel=1e-3)


def test_the_kv_is_never_over_capacity_and_preemption_recomputes() -> None:
    tight = replace(STEP, capacity=1000.0, prefill_token=1e-4)
    engine = Engine("e", "n", tight)
    traces = [simple(f"p{i}e0m0", 100, 300) for i in range(8)]
    simulation = RolloutSimulation([engine], [Bucket(1, None)], ContextBounds({}), MOVES)
    for trace in traces:
        simulation.submit(trace)
    ended = 0
    while (event := simulation.step()) is not None:
        assert engine.resident <= 1000.0 + 1e-6
        ended += isinstance(event, Ended)
    assert ended == 8
    assert engine.preemptions > 0
    assert engine.recomputed > 0


def test_a_sequence_that_outgrows_the_kv_alone_fails_and_the_rest_go_on() -> None:
    tight = replace(STEP, capacity=500.0)
    _, ended = run([Engine("e", "n", tight)], [simple("p0e0m0", 100, 900), simple("p1e0m0", 100, 100)])
    assert {e.trace.name: e.how for e in ended} == {"p0e0m0": "failed", "p1e0m0": "finished"}


def test_everything_ends_once_and_tokens_are_conserved() -> None:
    workload = Workload(WorkloadConfig(), 1, 1, 16, 8)
    traces = workload.batch(0)
    costs = RolloutCosts.from_specs(load_model("Qwen3-4B"), load_hardware("h200"))
    simulation, ended = run([Engine(f"e{i}", f"n{i % 2}", costs.of(1 + i % 2)) for i in range(4)], traces)
    assert Counter(e.trace.name for e in ended) == Counter(t.name for t in traces)
    assert simulation.totals.generated == sum(t.generated for trace in traces for t in trace.turns)
    assert simulation.totals.context == pytest.approx(sum(t.final for t in traces), rel=1e-6)
    assert simulation.in_flight == 0
    assert all((i.sequences, i.tokens) == (0, 0) for i in simulation.table.instances.values())
    assert simulation.table.routes == {}


def test_equal_seeds_give_equal_runs() -> None:
    scenario = Scenario(name="t", model="Qwen3-4B", cluster="one_node_h200", steps=3, groups=4, members=4, rescore=0)
    assert simulate(scenario, "cmlfq", 3) == simulate(scenario, "cmlfq", 3)
    assert simulate(scenario, "cmlfq", 3) != simulate(scenario, "cmlfq", 4)


def test_failing_tools_are_tried_again_and_then_given_up() -> None:
    workload = Workload(WorkloadConfig(), 1, 1, 16, 8)
    engines = [Engine("e", "n", STEP)]
    simulation, ended = run(engines, workload.batch(0), failure=0.2, retries=1, seed=5)
    how = Counter(e.how for e in ended)
    assert how["failed"] > 0
    assert how["finished"] > 0
    assert sum(how.values()) == 128
    assert simulation.totals.failed == how["failed"]
    assert all(e.retries <= 1 for e in ended)


def test_draining_engines_keeps_tokens() -> None:
    first = Engine("a", "n", STEP)
    simulation = RolloutSimulation([first], [Bucket(1, None)], LeastLoaded({}), MOVES)
    for i in range(4):
        simulation.submit(simple(f"p{i}e0m0", 100, 1000 if i else 10))
    event = simulation.step()  # the short one ends
    assert isinstance(event, Ended)
    done = first.steps
    simulation.retire(first.address)
    assert simulation.waiting == 3  # nobody takes them until another instance is there
    began = simulation.now
    simulation.alarm(began + 5.0, "another")
    assert simulation.step() == "another"
    simulation.join(Engine("b", "n", STEP))
    assert simulation.waiting == 0
    while simulation.step() is not None:
        pass
    assert simulation.totals.finished == 4
    # 990 steps are left, not 1,000, and the new engine serves from its activation on.
    per_step = STEP.decode_seconds(3, 3 * 600)
    assert simulation.now - began - 5.0 == pytest.approx((1000 - done) * per_step, rel=0.02)


def scenario(**changes: object) -> Scenario:
    base = {
        "name": "t", "model": "Qwen3-4B", "cluster": "one_node_h200", "steps": 6, "groups": 6, "members": 8,
        "uniform_tp": 2, "rescore": 0,
    }  # fmt: skip
    return Scenario.model_validate(base | changes)


@pytest.mark.parametrize("alpha", [0, 1, 3])
def test_staleness_never_exceeds_the_bound(alpha: int) -> None:
    result = simulate(scenario(alpha=alpha, steps=8), "static_uniform", 0)
    assert len(result.steps) == 8
    assert max(step.staleness for step in result.steps) <= alpha
    if alpha:
        assert max(step.staleness for step in result.steps) > 0


def test_running_ahead_is_faster_than_taking_turns() -> None:
    ahead, turns = simulate(scenario(), "static_uniform", 0), simulate(scenario(alpha=0), "static_uniform", 0)
    assert ahead.throughput > turns.throughput


def test_redundant_members_are_cancelled_and_cut_the_tail() -> None:
    plain, more = (
        simulate(scenario(alpha=0), "homogeneous", 0),
        simulate(scenario(alpha=0, redundant=2), "homogeneous", 0),
    )
    assert more.cancelled > 0
    assert plain.cancelled == 0
    waited = [sum(s.idle_seconds for s in r.steps) for r in (plain, more)]
    assert waited[1] < waited[0]


JUMP = 6


def drifted_run(
    router: str, config: ReplanConfig | None, seed: int, steps: int = 16, groups: int = 32, simulated: int = 0
) -> LoopResult:
    """Contexts grow tenfold from step `JUMP` on; the planner's own plan for the first batch is in force. ``config``:
    None for no replanning; ``simulated``: plans simulated a look."""
    s = scenario(
        model="Qwen3-14B", steps=steps, groups=groups, workload={"mean_from": 2000, "mean_to": 20_000, "jump_at": JUMP}
    )
    planner = planner_of(s)
    workload = Workload(s.workload, seed, s.steps, s.groups, s.members)
    plan = planner.plan([t.record() for t in workload.batch(0)])
    policy = cmlfq_for(planner) if router == "cmlfq" else PlanRouting(load_policy({"kind": router}))
    steers = None
    if config is not None:
        steering = Steering(planner, config, plan, {"kind": router}, most=max(1, simulated), last=steps)
        steers = InProcess(steering, simulated > 0)
    loop = RunLoop(
        LoopConfig(s.steps, s.groups, s.members), planner, plan, workload.group, policy, moves_of(planner, True), steers
    )
    return loop.run()


@pytest.mark.parametrize("router", [PolicyConfig().kind, "cmlfq"])
@pytest.mark.parametrize("seed", range(3))
def test_a_drift_is_replanned_once_and_that_pays(router: str, seed: int) -> None:
    config = ReplanConfig(interval=1, cool_down=5, confirm=3, minimum_gain=0.15)
    kept, replanned = (drifted_run(router, each, seed) for each in (None, config))
    changes = [(step.step, step.change) for step in replanned.steps if step.change != "keep"]
    moved = [(step, change) for step, change in changes if change != "rebound"]
    assert [change for _, change in moved] == ["apply"]  # once, and not back
    assert len(changes) <= 3  # buckets follow the lengths, but do not jitter
    first, changed = changes[0][0], moved[0][0]
    assert changed > JUMP
    assert replanned.steps[-1].train_gpus != kept.steps[-1].train_gpus  # roles moved between the sides
    # The runs are the same until the first change; what follows takes less time, the change itself included.
    assert [s.seconds for s in kept.steps[:first]] == [s.seconds for s in replanned.steps[:first]]
    later = slice(changed + 1, None)
    assert sum(s.seconds for s in replanned.steps[later]) < sum(s.seconds for s in kept.steps[later])
    assert replanned.seconds < kept.seconds


@pytest.mark.parametrize("seed", range(2))
def test_a_drift_is_replanned_once_with_the_defaults_and_plans_simulated(seed: int) -> None:
    """As the plugin replans: the candidate is the best of those simulated, and the change is judged as predicted."""
    kept, replanned = (
        drifted_run("cmlfq", config, seed, steps=24, groups=16, simulated=4) for config in (None, ReplanConfig())
    )
    moved = [step for step in replanned.steps if step.change in ("apply", "roll_back")]
    assert [step.change for step in moved] == ["apply"]
    assert moved[0].step > JUMP
    assert replanned.seconds < 0.97 * kept.seconds


def test_steady_work_is_not_replanned() -> None:
    s = scenario(steps=15, workload={"mean_from": 5000, "mean_to": 5000})
    planner = planner_of(s)
    workload = Workload(s.workload, 0, s.steps, s.groups, s.members)
    plan = planner.plan([t.record() for t in workload.batch(0)])
    loop = RunLoop(
        LoopConfig(s.steps, s.groups, s.members), planner, plan, workload.group, LeastLoaded({}),
        moves_of(planner, True),
        InProcess(Steering(planner, ReplanConfig(), plan, {"kind": "least_loaded"}), simulated=False),
    )  # fmt: skip
    assert loop.run().changes <= 1


def test_a_recorded_trajectory_is_replayed_as_it_was() -> None:
    state = ToolState("lookup", 0, "ok")
    mask = np.array([0] * 5 + [1] * 4 + [0] * 3 + [1] * 2, np.int8)
    returned = ToolReturn(0, {}, np.zeros(3, np.int32), state, 1.5, "")
    zeros = np.zeros(14, np.int32)
    trajectory = Trajectory(
        TrajectoryId("train", 7, 2), 3, 1, {}, 5, zeros, mask, zeros.astype(np.float32), zeros, (returned,), 2,
        "answer", 1.0,
    )  # fmt: skip
    trace = trace_of(trajectory)
    assert trace == Trace("p3e1m2", 5, (Turn(4, state, 3, 1.5), Turn(2)))
    assert trace.final == 14


def test_plans_are_rescored_by_simulation_within_a_time_limit() -> None:
    s = scenario()
    planner = planner_of(s)
    traces = Workload(s.workload, 0, 1, s.groups, s.members).batch(0)
    plans = planner.candidates([t.record() for t in traces], 20)
    assert len({(p.strategy.gpus, p.layout.kind, p.layout.degrees) for p in plans}) == len(plans)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    ticks = iter(range(1000))
    found = best_simulated(planner, plans, grouped(traces), seconds=3.0, clock=lambda: float(next(ticks)))
    assert found.count == 4  # the clock ticks a second a look; the fifth look is past the limit
    assert found.seconds <= found.predicted
    assert best_simulated(planner, plans, grouped(traces), seconds=0.0).count == 1
