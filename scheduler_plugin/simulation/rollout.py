"""Trajectories on engines in virtual time, bound by a bucket policy at every segment.

    submit ─> place ─> (move or load) ─> engine ─> segment ends ─> tool ─> place ─> … ─> ended

The policy is the object that the plugin drives: it is asked for every segment and told of every end. Invariants: what
is submitted ends exactly once; events of a time are handled in the order in which they were made; a cancelled or
restarted life's events are void.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.policy.base import BucketPolicy, FinishedTrajectory, Placement, PlacementRequest
from libra.scheduler_plugin.simulation.engine import Engine
from libra.scheduler_plugin.simulation.engine import Sequence as Job
from libra.scheduler_plugin.simulation.states import Ended, Life, Moves, Totals
from libra.scheduler_plugin.simulation.traces import Trace

_ENGINE, _RETURN, _ARRIVE, _READY, _ALARM, _BEGIN, _CLOSE = range(7)


class RolloutSimulation:
    """Engines, a policy and the trajectories in flight.

    ``failure``: probability that a tool call fails the environment (the trajectory starts over, at most ``retries``
    times, then it has failed).
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
    ) -> None:
        self.now = 0.0
        self.totals = Totals()
        self.engines: dict[str, Engine] = {engine.address: engine for engine in engines}
        self.buckets = tuple(buckets)
        self.policy, self.moves = policy, moves
        self.failure, self.retries = failure, retries
        self.version = 0
        self._random = np.random.default_rng(seed)
        self._events: list[tuple[float, int, int, object, int]] = []
        self._count = self._submitted = 0
        self._lives: dict[int, Life] = {}
        self._by_name: dict[str, int] = {}
        self._positions: dict[str, int] = {}
        self._stale: list[Engine] = []
        self._shown: list[RolloutInstance] | None = None
        for engine in self.engines.values():
            self._await_ready(engine)

    @property
    def in_flight(self) -> int:
        """Trajectories that have not ended."""
        return len(self._lives)

    def submit(self, trace: Trace) -> None:
        """Begin a trajectory now."""
        index = self._submitted
        self._submitted += 1
        life = Life(trace, Job(index), self.version, self.now, context=float(trace.prompt_tokens))
        self._lives[index] = life
        self._by_name[trace.name] = index
        if trace.lead > 0:
            self._push(self.now + trace.lead, _BEGIN, index, life.epoch)
        else:
            self._place(index, life)

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

    def publish(self, seconds: float) -> None:
        """New weights: engines stand still for ``seconds``, KV caches are dropped and prefilled again lazily."""
        self.version += 1
        for engine in self.engines.values():
            engine.pause(self.now, seconds)
            for _, _, job in engine.running:
                again = job.context + job.left - (job.end - engine.steps)
                taken = engine.cost.prefill_seconds(again)
                engine.busy_until += taken
                engine.prefilled += again
                self.totals.reprefilled += again
            self._schedule(engine)

    def reconfigure(self, keep: Iterable[str], new: Iterable[Engine], buckets: Sequence[Bucket]) -> None:
        """Other engines from now on: those not in ``keep`` (addresses) are drained, what they ran is placed again (its
        tokens are kept); ``new`` ones serve from their ``ready_at``."""
        kept = set(keep)
        self.buckets = tuple(buckets)
        gone = [engine for address, engine in self.engines.items() if address not in kept]
        for engine in gone:
            engine.retired = True
            engine.version += 1
            del self.engines[engine.address]
        for engine in new:
            self.engines[engine.address] = engine
            self._await_ready(engine)
        self._shown = None
        for engine in gone:
            for job in engine.drain(self.now):
                self._place(job.index, self._lives[job.index], resumed=True)

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
            if kind == _READY:
                self._admit(what)  # type: ignore[arg-type]
                continue
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
                self._place(life.job.index, life)
            else:
                self._arrive(life)
        return None

    def _engine_event(self, engine: Engine) -> Ended | None:
        engine.advance(self.now)
        done = engine.finished()
        if not done and engine.full:
            if len(engine.running) == 1:
                # One sequence alone that outgrows the KV: it cannot finish here or anywhere smaller.
                job = engine.drain(self.now)[0]
                self.totals.failed += 1
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
            life.epoch += 1
            self._discharge(life)
            life.turn, life.context, life.at = 0, float(life.trace.prompt_tokens), None
            life.history.clear()
        else:
            life.turn += 1
            life.context += turn.payload
            life.history.append(turn.state)
        self._place(index, life)
        return None

    def _place(self, index: int, life: Life, resumed: bool = False) -> None:
        """Ask the policy and send the segment on its way."""
        job, source = life.job, life.at
        if resumed:
            life.context = job.context
        alive = source is not None and not source.retired
        request = PlacementRequest(
            life.trace.name,
            life.trace.prompt,
            int(life.context),
            life.history,
            source.address if alive and source else None,
        )
        engine = self._choose(self.policy.place(request, self._instances(), self.buckets), source if alive else None)
        if life.history and not resumed:
            self.totals.decisions += 1
            right = self._bucket_of(life.trace.final)
            self.totals.right += self.buckets[right].tp == engine.cost.tp
        if not resumed:
            job.left = float(life.trace.turns[life.turn].generated)
            payload = life.trace.turns[life.turn - 1].payload if life.turn else 0
            job.prefill = float(payload)
        job.context = life.context
        delay = self._bring(life, job, source, engine)
        self._discharge(life)
        life.at, life.charged = engine, life.context
        engine.load_sequences += 1
        engine.load_tokens += life.charged
        self._stale.append(engine)
        if delay > 0:
            life.epoch += 1
            self._push(self.now + delay, _ARRIVE, index, life.epoch)
        else:
            self._arrive(life)

    def _bring(self, life: Life, job: Job, source: Engine | None, engine: Engine) -> float:
        """Seconds until the KV is there; sets what must be prefilled."""
        if source is None:
            # Members of a group share their prompt: the first on an engine prefills it for all.
            group = life.trace.group
            job.prefill = 1.0 if self.moves.shared and group in engine.prompts else life.context
            engine.prompts.add(group)
            return 0.0
        had = life.context - job.prefill
        if source is engine:
            if self.moves.offload or engine.resident <= self.moves.pressure * engine.cost.capacity:
                return self.moves.seconds(had, True) / engine.cost.tp if self.moves.offload else 0.0
            job.prefill = life.context
            self.totals.reprefilled += had
            return 0.0
        self.totals.moves += 1
        self.totals.moved += life.context
        moving = self.moves.seconds(had, source.node == engine.node)
        if self.moves.offload and moving <= engine.cost.prefill_seconds(had):
            return moving
        job.prefill = life.context
        self.totals.reprefilled += had
        return 0.0

    def _arrive(self, life: Life) -> None:
        engine = life.at
        assert engine is not None
        if engine.retired:
            self._place(life.job.index, life, resumed=True)
            return
        life.running = True
        engine.advance(self.now)
        if engine.add(life.job, self.now):
            self._schedule(engine)

    def _choose(self, placement: Placement, current: Engine | None) -> Engine:
        """The instance named; for a tag alone the one that has the KV, else the least loaded, as the routing table
        does. (Where no instance of the tag is left, during a change of plans, any.)"""
        if placement.address is not None:
            return self.engines[placement.address]
        tp = int(placement.tag.rpartition("tp")[2])
        if current is not None and current.cost.tp == tp:
            return current
        able = [engine for engine in self.engines.values() if engine.cost.tp == tp] or list(self.engines.values())
        return min(able, key=lambda engine: (engine.load_tokens, engine.name))

    def _bucket_of(self, length: float) -> int:
        for i, bucket in enumerate(self.buckets):
            if bucket.max_context is None or length <= bucket.max_context:
                return i
        return len(self.buckets) - 1

    def _instances(self) -> list[RolloutInstance]:
        """The engines as policies see them; only those whose load changed are made anew."""
        shown = self._shown
        if shown is None:
            self._positions = {address: i for i, address in enumerate(self.engines)}
            shown = self._shown = [_view(engine) for engine in self.engines.values()]
        else:
            for engine in self._stale:
                position = self._positions.get(engine.address)
                if position is not None:
                    shown[position] = _view(engine)
        self._stale.clear()
        return shown

    def _discharge(self, life: Life) -> None:
        engine = life.at
        if engine is not None and life.charged:
            engine.load_sequences -= 1
            engine.load_tokens -= life.charged
            life.charged = 0.0
            self._stale.append(engine)

    def _end(self, index: int, life: Life, how: Literal["finished", "failed", "cancelled"]) -> Ended:
        self._discharge(life)
        del self._lives[index]
        del self._by_name[life.trace.name]
        final = int(life.context) if how == "finished" else None
        self.policy.observe(FinishedTrajectory(life.trace.name, life.trace.prompt, final, tuple(life.history)))
        return Ended(life.trace, how, life.version, life.began, self.now, life.job.queued, life.retries)

    def _admit(self, engine: Engine) -> None:
        if not engine.retired:
            engine.advance(self.now)
            engine.admit(self.now)
            self._schedule(engine)

    def _await_ready(self, engine: Engine) -> None:
        if engine.ready_at > self.now:
            self._push(engine.ready_at, _READY, engine, 0)

    def _schedule(self, engine: Engine) -> None:
        engine.version += 1
        time = engine.next_event()
        if time is not None:
            self._push(time, _ENGINE, engine, engine.version)

    def _push(self, time: float, kind: int, what: object, version: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, kind, what, version))


def _view(engine: Engine) -> RolloutInstance:
    cost = engine.cost
    tokens = int(engine.load_tokens)
    return RolloutInstance(
        engine.address, engine.name, cost.tp, cost.slots, engine.load_sequences, tokens, engine.facts
    )
