"""Replaying traces through a bucket policy in virtual time: who is right, what moves, and how long it takes.

An instance decodes all it runs in steps of ``a + b·B + c·S`` seconds (B sequences, S resident tokens), so it slows down
as it fills; a prefill stops it for its time; what does not fit waits. A move delays its trajectory by the time of the
transfer, or costs a prefill of the whole context. A helper of tests and benchmarks, not a model to plan with: no
preemption, KV of trajectories in a tool call is in host memory, arrival order is service order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from traces import Trace

from libra.resources.tags import rollout_tag
from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.cmlfq.cost import CostConfig, CostModel
from libra.scheduler_plugin.policy.balance import bucket_of
from libra.scheduler_plugin.policy.base import BucketPolicy, FinishedTrajectory, PlacementRequest

COSTS = CostConfig(
    kv_bytes_per_token=163_840,
    host_bandwidth=19_850_000_000,
    network_bandwidth=16_250_000_000,
    kv_tokens={1: 270_900, 2: 722_000, 4: 1_620_000, 8: 3_430_000},
)
"""*Derived* for a 14B model with 40 KV-carrying layers on A800-class devices."""


@dataclass(frozen=True)
class Cluster:
    """``buckets`` ascending, with ``counts`` instances each of ``slots`` sequences; two devices' worth of instances or
    more share a node of ``devices``."""

    buckets: tuple[Bucket, ...]
    counts: tuple[int, ...]
    slots: int = 256
    devices: int = 8

    def instances(self) -> list[RolloutInstance]:
        """Empty instances, placed on nodes in order."""
        found, used = [], 0
        for bucket, count in zip(self.buckets, self.counts, strict=True):
            for n in range(count):
                address = f"tcp://node{used // self.devices}:{1000 + len(found)}"
                found.append(RolloutInstance(address, f"tp{bucket.tp}-{n}", bucket.tp, self.slots, 0, 0))
                used += bucket.tp
        return found


@dataclass
class Outcome:
    """Of one replay. ``makespan`` in seconds; ``moved``: tokens of context at every change of instance; ``tokens``:
    final contexts summed up; ``decisions`` at tool returns, ``right`` those that bound to the bucket of the final
    context; ``trajectories`` with a tool return, ``faultless`` those whose every decision was right; ``moves``: bucket
    changes."""

    makespan: float = 0.0
    tokens: int = 0
    moved: int = 0
    moves: int = 0
    decisions: int = 0
    right: int = 0
    trajectories: int = 0
    faultless: int = 0

    def add(self, other: Outcome) -> None:
        """Another replay after this one."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def decision_accuracy(self) -> float:
        """Share of decisions that were right."""
        return self.right / max(1, self.decisions)

    @property
    def trajectory_accuracy(self) -> float:
        """Share of trajectories whose every decision was right."""
        return self.faultless / max(1, self.trajectories)

    @property
    def moved_share(self) -> float:
        """Moved tokens over all tokens."""
        return self.moved / max(1, self.tokens)


class _Run:
    """A trace on its way."""

    __slots__ = ("context", "faults", "held", "instance", "level", "prefill", "trace", "turn")

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.turn = 0
        self.context = trace.prompt_tokens
        self.held = 0
        self.prefill = 0
        self.faults = 0
        self.level = -1
        self.instance: _Engine | None = None


class _Engine:
    """One instance. ``steps`` counts decode steps since its start; a run ends when it reaches its mark."""

    def __init__(self, shown: RolloutInstance, costs: CostConfig) -> None:
        self.shown = shown
        self.a, self.b, self.c = costs.decode[shown.tp]
        self.rate = costs.prefill_rate[shown.tp]
        self.room = costs.kv_tokens[shown.tp]
        self.now = self.steps = self.stall = self.resident = 0.0
        self.running: list[tuple[float, int, _Run]] = []
        self.waiting: deque[_Run] = deque()
        self.version = 0

    def advance(self, now: float) -> None:
        """Decode up to ``now``."""
        spare = now - self.now
        self.now = now
        stalled = min(self.stall, spare)
        self.stall -= stalled
        spare -= stalled
        count = len(self.running)
        if count and spare > 0.0:
            step, growth = self.a + self.b * count + self.c * self.resident, self.c * count
            made = (math.sqrt(step * step + 2 * growth * spare) - step) / growth
            self.steps += made
            self.resident += count * made

    def next_end(self) -> float:
        """When the next run ends, if nothing comes between."""
        count = len(self.running)
        left = max(0.0, self.running[0][0] - self.steps)
        step = self.a + self.b * count + self.c * self.resident
        return self.now + self.stall + left * step + self.c * count * left * left / 2

    def admit(self, order: itertools.count[int]) -> None:
        """Start what fits of what waits."""
        while self.waiting and len(self.running) < self.shown.slots:
            run = self.waiting[0]
            generated = run.trace.turns[run.turn].generated
            if self.running and self.resident + run.context + generated > self.room:
                return
            self.waiting.popleft()
            self.stall += run.prefill / self.rate
            run.prefill = 0
            self.resident += run.context
            heapq.heappush(self.running, (self.steps + generated, next(order), run))

    def finish(self) -> list[_Run]:
        """Take out what has ended."""
        ended = []
        while self.running and self.running[0][0] - self.steps < 1e-6:
            run = heapq.heappop(self.running)[2]
            run.context += run.trace.turns[run.turn].generated
            self.resident -= run.context
            ended.append(run)
        if not self.running:
            self.resident = 0.0
        return ended


class Replay:
    """One batch of traces, all admitted at time 0, through one policy."""

    def __init__(self, policy: BucketPolicy, cluster: Cluster, costs: CostConfig = COSTS) -> None:
        self.policy, self.cluster, self.costs = policy, cluster, CostModel(costs)
        self.engines = {shown.address: _Engine(shown, costs) for shown in cluster.instances()}
        self.outcome = Outcome()
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, _Run | _Engine, int]] = []

    def run(self, traces: Sequence[Trace]) -> Outcome:
        """Play ``traces`` to their end."""
        for trace in traces:
            self._place(0.0, _Run(trace))
        while self._events:
            now, _, what, item, version = heapq.heappop(self._events)
            if isinstance(item, _Engine):
                if version == item.version:
                    self._ended(now, item)
            elif what == "returned":
                turn = item.trace.turns[item.turn]
                item.context += turn.payload
                item.prefill = turn.payload
                item.turn += 1
                self._place(now, item)
            else:
                engine = item.instance
                assert engine is not None
                engine.advance(now)
                engine.waiting.append(item)
                self._wake(engine)
        assert all(not engine.running and not engine.waiting for engine in self.engines.values())
        return self.outcome

    def _place(self, now: float, run: _Run) -> None:
        engine = run.instance
        history = run.trace.states[: run.turn]
        request = PlacementRequest(
            run.trace.name, run.trace.prompt, run.context, history, engine.shown.address if engine else None
        )
        placed = self.policy.place(request, [e.shown for e in self.engines.values()], self.cluster.buckets)
        assert placed.address is not None
        target = self.engines[placed.address]
        assert placed.tag == rollout_tag(target.shown.tp)
        level = next(n for n, bucket in enumerate(self.cluster.buckets) if bucket.tp == target.shown.tp)
        if run.turn:
            right = level == bucket_of(run.trace.final, self.cluster.buckets)
            self.outcome.decisions += 1
            self.outcome.right += right
            run.faults += not right
        delay = 0.0
        if engine is None:
            run.prefill = run.context
        elif engine is not target:
            move = self.costs.move(run.context, engine.shown.address, target.shown)
            self.outcome.moved += run.context
            self.outcome.moves += level != run.level
            if move.way == "prefill":
                run.prefill = run.context
            else:
                delay = move.seconds
        self._hold(run, target)
        run.level = level
        self._push(now + delay, "arrives", run)

    def _ended(self, now: float, engine: _Engine) -> None:
        engine.advance(now)
        for run in engine.finish():
            turn = run.trace.turns[run.turn]
            if turn.state is not None:
                self._push(now + turn.seconds, "returned", run)
                continue
            self._hold(run, None)
            outcome = self.outcome
            outcome.makespan = max(outcome.makespan, now)
            outcome.tokens += run.context
            if run.turn:
                outcome.trajectories += 1
                outcome.faultless += run.faults == 0
            self.policy.observe(FinishedTrajectory(run.trace.name, run.trace.prompt, run.context, run.trace.states))
        self._wake(engine)

    def _wake(self, engine: _Engine) -> None:
        engine.admit(self._order)
        engine.version += 1
        if engine.running:
            self._push(engine.next_end(), "ends", engine, engine.version)

    def _push(self, at: float, what: str, item: _Run | _Engine, version: int = 0) -> None:
        heapq.heappush(self._events, (at, next(self._order), what, item, version))

    def _hold(self, run: _Run, target: _Engine | None) -> None:
        """The loads as the routing table counts them: a trajectory's context at its last placement."""
        if run.instance is not None:
            self._count(run.instance, -1, -run.held)
        run.instance, run.held = target, run.context if target else 0
        if target is not None:
            self._count(target, 1, run.held)

    def _count(self, engine: _Engine, sequences: int, tokens: int) -> None:
        s = engine.shown
        engine.shown = RolloutInstance(s.address, s.name, s.tp, s.slots, s.sequences + sequences, s.tokens + tokens)


def replay(policy: BucketPolicy, cluster: Cluster, steps: Sequence[Sequence[Trace]], skip: int = 0) -> Outcome:
    """All steps one after the other; the first ``skip`` teach the policy and are not counted."""
    total = Outcome()
    for number, traces in enumerate(steps):
        outcome = Replay(policy, cluster).run(traces)
        if number >= skip:
            total.add(outcome)
    return total
