"""Trajectories on engines in virtual time, bound by a run's routing table at every segment.

    submit ─> place ─> (move or load) ─> engine ─> segment ends ─> tool ─> place ─> … ─> ended

The routing table and its policy are the objects that the plugin drives: asked for every segment, told of every return,
move and end; what they leave unplaced waits for the next instance. Invariants: what is submitted ends exactly once;
events of a time are handled in the order in which they were made; a cancelled or restarted life's events are void.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from libra.resources.types import Bucket, InstanceFacts
from libra.resources.types.cluster import NO_FACTS
from libra.scheduler_plugin.policy.balance import bucket_of
from libra.scheduler_plugin.policy.base import BucketPolicy
from libra.scheduler_plugin.policy.moves import MoveOutcome
from libra.scheduler_plugin.routing import RoutingTable
from libra.scheduler_plugin.simulation.engine import Engine
from libra.scheduler_plugin.simulation.engine import Sequence as Job
from libra.scheduler_plugin.simulation.states import Ended, Life, Moves, Totals
from libra.scheduler_plugin.simulation.traces import Trace

_ENGINE, _RETURN, _ARRIVE, _ALARM, _BEGIN, _CLOSE = range(6)


class RolloutSimulation:
    """Engines, a routing table and the trajectories in flight.

    ``failure``: probability that a tool call fails the environment (the trajectory starts over, at most ``retries``
    times, then it has failed). ``make``: the engine of an instance that is offered by address, name and TP degree.
    ``version``: the weights that every engine has loaded.
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        buckets: Sequence[Bucket],
        policy: BucketPolicy,
        moves: Moves,
        failure: float = 0.0,
        retries: int = 3,
        seed: int = 0,
        make: Callable[[str, str, int], Engine] | None = None,
    ) -> None:
        self.now = 0.0
        self.totals = Totals()
        self.engines: dict[str, Engine] = {}
        self.table = RoutingTable(policy, buckets, staging=moves.offload)
        self.moves = moves
        self.failure, self.retries = failure, retries
        self.version = 0
        self._make = make
        self._random = np.random.default_rng(seed)
        self._events: list[tuple[float, int, int, object, int]] = []
        self._count = self._submitted = 0
        self._lives: dict[int, Life] = {}
        self._by_name: dict[str, int] = {}
        self._unplaced: dict[int, bool] = {}
        self._leaving: dict[str, Engine] = {}
        for engine in engines:
            self.join(engine)

    @property
    def in_flight(self) -> int:
        """Trajectories that have not ended."""
        return len(self._lives)

    @property
    def waiting(self) -> int:
        """Trajectories that no instance takes now."""
        return len(self._unplaced)

    # Trajectories.

    def submit(self, trace: Trace) -> Life:
        """Begin a trajectory now; its life, to be read only."""
        index = self._submitted
        self._submitted += 1
        life = Life(trace, Job(index), self.version, self.now, context=float(trace.prompt_tokens))
        self._lives[index] = life
        self._by_name[trace.name] = index
        if trace.lead > 0:
            self._push(self.now + trace.lead, _BEGIN, index, life.epoch)
        else:
            self._begin(index, life)
        return life

    def cancel(self, name: str) -> Ended:
        """End a trajectory now, as a redundant one."""
        index = self._by_name[name]
        life = self._lives[index]
        if life.at is not None and life.running:
            life.at.remove(life.job, self.now)
            self._admit(life.at)
        self.totals.cancelled += 1
        return self._end(index, life, "cancelled")

    def alarm(self, time: float, what: object) -> None:
        """`step` returns ``what`` at ``time``."""
        self._push(time, _ALARM, what, 0)

    # Instances, as a pool lists them (`libra.scheduler_plugin.listing.Table`).

    def join(self, engine: Engine) -> None:
        """An engine takes segments from now on; those that wait are placed."""
        engine.clock = engine.busy_until = max(engine.clock, self.now)
        self._leaving.pop(engine.address, None)
        self.engines[engine.address] = engine
        self.table.offer(engine.address, engine.name, engine.cost.tp, engine.cost.slots, engine.facts)
        unplaced, self._unplaced = self._unplaced, {}
        for index, resumed in unplaced.items():
            self._place(index, self._lives[index], resumed)

    def offer(self, address: str, name: str, tp: int, slots: int, facts: InstanceFacts = NO_FACTS) -> None:
        """`join` with a new engine of degree ``tp``; one that is there goes on. ``slots`` and
        ``facts``: its own."""
        there = self.engines.get(address)
        if there is None or there.cost.tp != tp:
            assert self._make is not None, "a simulation whose instances come and go needs `make`"
            self.join(self._make(address, name, tp))

    def offer_tool(self, address: str) -> None:
        """Tools are not simulated as workers: a call takes its seconds."""

    def retire(self, address: str) -> None:
        """An instance takes nothing any more: what it ran is cut short and placed again, its tokens kept. Where KV is
        staged, others may still fetch it."""
        engine = self.engines.pop(address, None)
        if engine is None:
            return
        engine.retired = True
        engine.version += 1
        self._leaving[address] = engine
        self.table.retire(address)
        for job in engine.drain(self.now):
            self._place(job.index, self._lives[job.index], resumed=True)

    def load(self, address: str, seconds: float, version: int) -> None:
        """New weights for one instance: it stands still for ``seconds``, its KV is dropped and prefilled again
        lazily."""
        engine = self.engines.get(address)
        if engine is None:
            return
        engine.pause(self.now, seconds)
        engine.weights = version
        for _, _, job in engine.running:
            again = job.context + job.left - (job.end - engine.steps)
            taken = engine.cost.prefill_seconds(again)
            engine.busy_until += taken
            engine.prefilled += again
            self.totals.reprefilled += again
        self._schedule(engine)

    def step(self) -> Ended | object | None:
        """Handle events until a trajectory ends or an alarm rings; None when there is no event left."""
        events = self._events
        while events:
            time, _, kind, what, version = heapq.heappop(events)
            if kind == _ENGINE:
                engine: Engine = what  # type: ignore[assignment]
                if version != engine.version:
                    continue
                self.now = time
                self.totals.events += 1
                ended = self._engine_event(engine)
                if ended is not None:
                    return ended
                continue
            self.now = max(self.now, time)
            if kind == _ALARM:
                return what
            self.totals.events += 1
            life = self._lives.get(what)  # type: ignore[call-overload]
            if life is None or life.epoch != version:
                continue
            if kind == _RETURN:
                ended = self._tool_return(life.job.index, life)
                if ended is not None:
                    return ended
            elif kind == _CLOSE:
                return self._finish(life.job.index, life)
            elif kind == _BEGIN:
                self._begin(life.job.index, life)
            else:
                self._arrive(life)
        return None

    def _engine_event(self, engine: Engine) -> Ended | None:
        engine.advance(self.now)
        done = engine.finished()
        if not done and engine.full:
            if len(engine.running) == 1:
                # One sequence alone that outgrows the KV: it cannot finish here or anywhere smaller.
                job = engine.running[0][2]
                engine.remove(job, self.now)
                self.totals.failed += 1
                engine.admit(self.now)
                self._schedule(engine)
                return self._end(job.index, self._lives[job.index], "failed")
            engine.preempt()
        last: Ended | None = None
        for job in done:
            ended = self._segment_end(job.index, self._lives[job.index])
            if ended is not None:
                if last is not None:
                    self._push(self.now, _ALARM, last, 0)
                last = ended
        engine.admit(self.now)
        self._schedule(engine)
        return last

    def _segment_end(self, index: int, life: Life) -> Ended | None:
        turn = life.trace.turns[life.turn]
        life.running = False
        life.context = life.job.context
        life.sample()
        if self.moves.offload:
            self.table.arrived(life.trace.name)
        self.totals.generated += turn.generated
        if turn.state is None and life.trace.trail > 0:
            self._push(self.now + life.trace.trail, _CLOSE, index, life.epoch)
            return None
        if turn.state is None:
            return self._finish(index, life)
        self._push(self.now + turn.seconds, _RETURN, index, life.epoch)
        return None

    def _finish(self, index: int, life: Life) -> Ended:
        self.totals.finished += 1
        self.totals.context += life.context
        return self._end(index, life, "finished")

    def _tool_return(self, index: int, life: Life) -> Ended | None:
        turn = life.trace.turns[life.turn]
        assert turn.state is not None
        if self.failure and self._random.random() < self.failure:
            if life.retries >= self.retries:
                self.totals.failed += 1
                return self._end(index, life, "failed")
            life.retries += 1
            self.totals.restarts += 1
            life.epoch += 1
            life.turn, life.context, life.at = 0, float(life.trace.prompt_tokens), None
            life.version, life.sampled = self.version, False
            self._begin(index, life)
        else:
            life.turn += 1
            life.context += turn.payload
            self.table.returned(life.trace.name, life.turn - 1, turn.state, int(life.context))
            self._place(index, life)
        return None

    def _begin(self, index: int, life: Life) -> None:
        self.table.open(life.trace.name, life.trace.prompt, life.trace.prompt_tokens, 0)
        self._place(index, life)

    def _place(self, index: int, life: Life, resumed: bool = False) -> None:
        """Ask the routing table and send the segment on its way. ``resumed``: the segment was cut short and goes on."""
        job, trace = life.job, life.trace
        if resumed:
            if job.context > life.context:
                life.sample()
            life.context, life.running = job.context, False
            self.table.open(trace.name, trace.prompt, int(life.context), life.turn)
        placement, _ = self.table.place(trace.name)
        if placement.address is None:
            self._unplaced[index] = resumed
            return
        engine = self.engines[placement.address]
        if life.turn and not resumed:
            self.totals.decisions += 1
            right = bucket_of(trace.final, self.table.buckets)
            self.totals.right += self.table.buckets[right].tp == engine.cost.tp
        if not resumed:
            job.left = float(trace.turns[life.turn].generated)
            job.prefill = float(trace.turns[life.turn - 1].payload if life.turn else 0)
        job.context = life.context
        delay = self._bring(life, engine)
        life.at = engine
        if delay > 0:
            life.epoch += 1
            self._push(self.now + delay, _ARRIVE, index, life.epoch)
        else:
            self._arrive(life)

    def _bring(self, life: Life, engine: Engine) -> float:
        """Seconds until the KV is there; sets what must be prefilled."""
        job, at = life.job, life.at
        had = life.context - job.prefill
        if at is engine:
            if self.moves.offload or engine.resident <= self.moves.pressure * engine.cost.capacity:
                return self.moves.seconds(had, True) / engine.cost.tp if self.moves.offload else 0.0
        elif at is not None:
            self.totals.moves += 1
            self.totals.moved += life.context
            source = self._staged(life.trace.name)
            if source is not None:
                near = source.node == engine.node
                moving = self.moves.seconds(had, near)
                if moving <= engine.cost.prefill_seconds(had):
                    way: Literal["load", "fetch"] = "load" if near else "fetch"
                    self.table.policy.moved(MoveOutcome(way, int(had), engine.cost.tp, moving))
                    return moving
        # Members of a group share their prompt: the first on an engine prefills it for all.
        group = life.trace.group
        shared = self.moves.shared and at is not engine and group in engine.prompts
        known = life.trace.prompt_tokens - 1.0 if shared else 0.0
        engine.prompts.add(group)
        job.prefill = max(1.0, life.context - known)
        if at is not None:
            self.totals.reprefilled += had
        return 0.0

    def _staged(self, trajectory: str) -> Engine | None:
        """The instance that has staged KV of a trajectory that moves."""
        for instance in self.table.sources(trajectory)[0]:
            found = self.engines.get(instance.address) or self._leaving.get(instance.address)
            if found is not None:
                return found
        return None

    def _arrive(self, life: Life) -> None:
        engine = life.at
        assert engine is not None
        if engine.retired:
            self._place(life.job.index, life, resumed=True)
            return
        life.running = True
        life.tried = engine.weights
        engine.advance(self.now)
        if engine.add(life.job, self.now):
            self._schedule(engine)

    def _end(self, index: int, life: Life, how: Literal["finished", "failed", "cancelled"]) -> Ended:
        del self._lives[index]
        del self._by_name[life.trace.name]
        self._unplaced.pop(index, None)
        self.table.end([(life.trace.name, int(life.context) if how == "finished" else None)])
        return Ended(life.trace, how, life.version, life.began, self.now, life.job.queued, life.retries)

    def _admit(self, engine: Engine) -> None:
        if not engine.retired:
            engine.advance(self.now)
            engine.admit(self.now)
            self._schedule(engine)

    def _schedule(self, engine: Engine) -> None:
        engine.version += 1
        time = engine.next_event()
        if time is not None:
            self._push(time, _ENGINE, engine, engine.version)

    def _push(self, time: float, kind: int, what: object, version: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, kind, what, version))
