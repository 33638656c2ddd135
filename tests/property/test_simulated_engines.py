"""Simulated instances: KV is never over capacity, tokens are conserved, whatever arrives, leaves or is preempted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.resources.cost_model import RolloutCosts, StepCost
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import Bucket, ToolState
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.simulation import Engine, Moves, RolloutSimulation, Trace
from libra.scheduler_plugin.simulation.traces import Turn

BASE = RolloutCosts.from_specs(load_model("Qwen3-14B"), load_hardware("a800_80g"))
OK = ToolState("bash", 1, "ok")


class Watched(Engine):
    """An engine that checks its KV whenever it has decoded."""

    __slots__ = ()

    def advance(self, now: float) -> None:
        super().advance(now)
        assert self.resident <= self.cost.capacity * (1 + 1e-9), (self.resident, self.cost.capacity)
        held = sum(job.context + job.left - max(0.0, end - self.steps) for end, _, job in self.running)
        assert self.resident == pytest.approx(held, rel=1e-6, abs=1e-3)
        assert len(self.running) <= self.cost.slots


@st.composite
def traces(draw: st.DrawFn) -> list[Trace]:
    """Up to 40 trajectories of up to three turns, each within 3,000 tokens."""
    found = []
    for number in range(draw(st.integers(1, 40))):
        turns = [
            Turn(draw(st.integers(1, 400)), OK, draw(st.integers(0, 400)), draw(st.floats(0, 20)))
            for _ in range(draw(st.integers(0, 2)))
        ]
        found.append(Trace(f"p{number % 3}e0m{number}", draw(st.integers(1, 900)), (*turns, Turn(400))))
    return found


@given(
    traces(), st.integers(3_000, 12_000), st.integers(1, 32), st.integers(1, 3), st.booleans(), st.booleans(),
    st.lists(st.floats(0.1, 200), max_size=3),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_kv_is_never_over_capacity_and_every_trajectory_ends_once(
    work: list[Trace], capacity: int, slots: int, count: int, offload: bool, shared: bool, publishes: list[float]
) -> None:
    cost: StepCost = replace(BASE.of(1), capacity=float(capacity), slots=slots)
    engines = [Watched(f"e{i}", f"n{i}", cost) for i in range(count)]
    moves = Moves(163_840.0, 20e9, 20e9, offload=offload, shared=shared)
    simulation = RolloutSimulation(engines, [Bucket(1, None)], LeastLoaded({}), moves)
    for trace in work:
        simulation.submit(trace)
    for at in publishes:
        simulation.alarm(at, "publish")
    ended = []
    while (what := simulation.step()) is not None:
        if what == "publish":
            for address in simulation.engines:
                simulation.load(address, 1.0, 1)
        else:
            ended.append(what.trace.name)  # type: ignore[attr-defined]
    assert sorted(ended) == sorted(trace.name for trace in work)
    assert simulation.totals.finished == len(work)
    assert simulation.totals.context == pytest.approx(sum(trace.final for trace in work))
    assert simulation.totals.generated == sum(turn.generated for trace in work for turn in trace.turns)
    assert all(engine.resident == 0 for engine in engines)
