"""One rollout instance: continuous batching in virtual time, without a loop over tokens.

Between events every running sequence gains one token a step, so k steps of B sequences with S resident tokens take
k(a + bB + cS) + cBk²/2 seconds; the inverse (how many steps by time t) solves the quadratic. A prefill stops decoding
for its time. A sequence is admitted while a slot and room for its context are free; when the KV is full the sequence
admitted last gives way and is prefilled again later (recompute). Invariants: ``resident`` ≤ capacity; ``resident`` is
the sum of the running sequences' contexts; sequences finish in the order of their remaining tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
from math import isfinite, sqrt

from libra.resources.cost_model import StepCost
from libra.resources.types import InstanceFacts, KVRoom

_DONE = 1e-4
"""Tokens: a sequence this near its end has ended."""
_FULL = 1e-3
"""Tokens a sequence that may be missing when the KV counts as full."""
_WATERMARK = 0.01
"""Share of the KV kept free at an admission (as vLLM does), so that what was just admitted can grow."""


class Sequence:
    """What an engine knows of a trajectory: ``context`` resident when admitted, of which ``prefill`` tokens must be
    computed; ``left`` tokens to generate."""

    __slots__ = ("admitted", "context", "end", "index", "left", "prefill", "queued", "since")

    def __init__(self, index: int) -> None:
        self.index = index
        self.context = 0.0
        self.prefill = 0.0
        self.left = 0.0
        self.end = 0.0
        self.admitted = 0
        self.since = 0.0
        self.queued = 0.0


class Engine:
    """``address``, ``node``: where it is; ``cost``: of its TP degree; ``weights``: the version it has loaded;
    ``retired``: takes nothing any more; ``facts``: what it tells policies."""

    __slots__ = (
        "address", "admissions", "busy_seconds", "busy_until", "clock", "cost", "facts", "name", "node", "preemptions",
        "prefilled", "prompts", "recomputed", "resident", "retired", "running", "steps", "version", "waiting",
        "weights",
    )  # fmt: skip

    def __init__(self, name: str, node: str, cost: StepCost, kv_bytes: int = 0) -> None:
        """``kv_bytes``: of one token's KV."""
        self.name, self.node, self.cost = name, node, cost
        self.facts = InstanceFacts(node, KVRoom(int(cost.capacity), kv_bytes) if isfinite(cost.capacity) else None)
        self.address = f"tcp://{node}:{name}"
        self.steps = 0.0
        self.clock = self.busy_until = 0.0
        self.resident = 0.0
        self.running: list[tuple[float, int, Sequence]] = []
        self.waiting: deque[Sequence] = deque()
        self.version = self.weights = 0
        self.admissions = 0
        self.prompts: set[str] = set()
        self.retired = False
        self.preemptions = 0
        self.recomputed = self.prefilled = self.busy_seconds = 0.0

    def advance(self, now: float) -> None:
        """Decode up to ``now``."""
        begin = self.clock if self.clock > self.busy_until else self.busy_until
        passed = now - begin
        if passed > 0:
            count = len(self.running)
            if count:
                cost = self.cost
                rate = cost.step + cost.sequence * count + cost.token * self.resident
                growth = cost.token * count
                # The root of rate·k + growth·k²/2 = passed, in the form that does not cancel.
                done = 2 * passed / (sqrt(rate * rate + 2 * growth * passed) + rate)
                self.steps += done
                self.resident += done * count
                self.busy_seconds += passed
            self.clock = now

    def next_event(self) -> float | None:
        """When the next sequence ends or the KV is full; None when nothing runs."""
        count = len(self.running)
        if not count:
            return None
        left = self.running[0][0] - self.steps
        room = (self.cost.capacity - self.resident) / count
        steps = max(0.0, left if left < room else room)
        begin = self.clock if self.clock > self.busy_until else self.busy_until
        cost = self.cost
        rate = cost.step + cost.sequence * count + cost.token * self.resident
        return begin + steps * rate + cost.token * count * steps * steps / 2

    def finished(self) -> list[Sequence]:
        """Sequences that have ended by now; empty when the KV is full instead (`preempt` then)."""
        ended = []
        running = self.running
        while running and running[0][0] - self.steps < _DONE:
            _, _, sequence = heapq.heappop(running)
            sequence.context += sequence.left
            sequence.left = 0.0
            self.resident -= sequence.context
            ended.append(sequence)
        if not running:
            self.resident = 0.0
        return ended

    @property
    def full(self) -> bool:
        """Whether the next step does not fit the KV."""
        return bool(self.running) and self.resident > self.cost.capacity - _FULL * len(self.running)

    def add(self, sequence: Sequence, now: float) -> bool:
        """Queue a sequence; whether something was admitted."""
        sequence.since = now
        self.waiting.append(sequence)
        return self.admit(now)

    def admit(self, now: float) -> bool:
        """Admit what fits; whether something was."""
        before = self.admissions
        waiting, cost = self.waiting, self.cost
        while waiting and len(self.running) < cost.slots:
            sequence = waiting[0]
            if self.running and self.resident + sequence.context + _WATERMARK * cost.capacity > cost.capacity:
                break
            waiting.popleft()
            sequence.queued += now - sequence.since
            if sequence.prefill > 0:
                taken = cost.prefill_seconds(sequence.prefill, sequence.context - sequence.prefill)
                self.busy_until = max(self.busy_until, now) + taken
                self.busy_seconds += taken
                self.prefilled += sequence.prefill
                sequence.prefill = 0.0
            self.admissions += 1
            sequence.admitted = self.admissions
            sequence.end = self.steps + sequence.left
            self.resident += sequence.context
            heapq.heappush(self.running, (sequence.end, self.admissions, sequence))
        return self.admissions > before

    def preempt(self) -> Sequence:
        """The sequence admitted last gives its KV back and waits, first in line."""
        victim = max(self.running, key=lambda entry: entry[2].admitted)
        self._drop(victim)
        sequence = victim[2]
        sequence.prefill = sequence.context
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        self.recomputed += sequence.context
        return sequence

    def remove(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out (cancelled, or drained); its tokens so far are kept in it."""
        self.advance(now)
        for entry in self.running:
            if entry[2] is sequence:
                self._drop(entry)
                return
        self.waiting = deque(each for each in self.waiting if each is not sequence)

    def drain(self, now: float) -> list[Sequence]:
        """Take everything out."""
        self.advance(now)
        out = []
        while self.running:
            entry = self.running[0]
            self._drop(entry)
            out.append(entry[2])
        out += self.waiting
        self.waiting.clear()
        return out

    def pause(self, now: float, seconds: float) -> None:
        """Nothing runs for ``seconds`` (a publish); reusable prompts are forgotten."""
        self.advance(now)
        self.busy_until = max(self.busy_until, now) + seconds
        self.prompts.clear()

    def _drop(self, entry: tuple[float, int, Sequence]) -> None:
        end, _, sequence = entry
        self.running.remove(entry)
        heapq.heapify(self.running)
        left = max(0.0, end - self.steps)
        sequence.context += sequence.left - left
        sequence.left = left
        self.resident = max(0.0, self.resident - sequence.context) if self.running else 0.0
