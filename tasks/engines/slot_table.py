"""Which sequence lies in which slot.

Slots are kept in three zones, in this order: *decoding* sequences (one token a step), *prefilling* ones (part of their
context has no KV yet), and *idle* ones (KV kept for the sequence's next request) mixed with empty slots. Example with 5
slots: ``[d d | p | i . ]``. A sequence changes zone by swapping places with the one at the zone's border, so each zone
stays a run of neighbours and attention reads it as a view. Invariants: a running sequence is never evicted; the idle
sequence used longest ago is evicted first; a sequence is in at most one slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from libra.resources.types import Tokens
from libra.tasks.engines.base import GenerateRequest


@dataclass(slots=True, eq=False)
class Running:
    """A request in work: when it was submitted, how long it queued for a slot, context tokens whose KV was reused, and
    the sampled tokens, their logprobs and versions so far."""

    request: GenerateRequest
    submitted: float = field(default_factory=perf_counter)
    queued: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence in a slot: ``tokens[:length]`` is its context, ``tokens[:cached]`` the part whose KV the slot holds.
    ``work`` is None while it is idle; ``released``: drop it when its request ends."""

    sequence: str
    slot: int
    tokens: NDArray[np.int32]
    length: int = 0
    cached: int = 0
    used: int = 0
    released: bool = False
    work: Running | None = None

    @property
    def pending(self) -> int:
        """Context tokens without KV; 1 while decoding (the token sampled last)."""
        return self.length - self.cached

    def keep_prefix(self, context: Tokens) -> int:
        """Take ``context`` over, keep the KV of the longest common prefix (but for the last token, whose logits are
        needed), and return how many tokens that is."""
        limit = min(self.cached, len(context) - 1)
        differ = np.flatnonzero(self.tokens[:limit] != context[:limit])
        self.cached = int(differ[0]) if len(differ) else limit
        self.length = len(context)
        self.tokens[: self.length] = context
        return self.cached


class SlotTable:
    """Sequences by slot and by name."""

    def __init__(self, slots: int, max_context: int, swap: Callable[[int, int, int], None]) -> None:
        """``swap(a, b, length)`` exchanges the first ``length`` cached positions of two slots."""
        self._by_slot: list[Resident | None] = [None] * slots
        self._by_name: dict[str, Resident] = {}
        self._max_context = max_context
        self._swap = swap
        self._clock = 0
        self.decoding = 0
        """Slots of the first zone."""
        self.running = 0
        """Slots of the first two zones."""

    def decoders(self) -> list[Resident]:
        """The sequences of the first zone, by slot."""
        return [r for r in self._by_slot[: self.decoding] if r is not None]

    def prefillers(self) -> list[Resident]:
        """The sequences of the second zone, by slot."""
        return [r for r in self._by_slot[self.decoding : self.running] if r is not None]

    def residents(self) -> list[Resident]:
        """All sequences with a slot."""
        return list(self._by_name.values())

    def find(self, sequence: str) -> Resident | None:
        """The resident of that name, if any."""
        return self._by_name.get(sequence)

    def admit(self, work: Running, reuse: bool) -> Resident | None:
        """Give the request's sequence a slot in the prefilling zone, its own if it is idle in one, else an empty one,
        else that of the idle sequence used longest ago. None when every slot is running, or the sequence itself is."""
        name = work.request.sequence
        resident = self._by_name.get(name)
        if resident is None:
            slot = self._free_slot()
            if slot is None:
                return None
            resident = Resident(name, slot, np.empty(self._max_context, np.int32))
            self._by_slot[slot] = self._by_name[name] = resident
        elif resident.work is not None:
            return None
        if not reuse:
            resident.cached = 0
        work.cached = resident.keep_prefix(work.request.tokens)
        resident.work = work
        resident.released = False
        self._move(resident, self.running)
        self.running += 1
        return resident

    def start_decoding(self, resident: Resident) -> None:
        """Move a prefilling sequence to the decoding zone."""
        self._move(resident, self.decoding)
        self.decoding += 1

    def finish(self, resident: Resident, keep: bool) -> None:
        """The sequence's request has ended: it becomes idle, or leaves when it is not to be kept or was released."""
        resident.work = None
        if resident.slot < self.decoding:
            self.decoding -= 1
            self._move(resident, self.decoding)
        self.running -= 1
        self._move(resident, self.running)
        self._clock += 1
        resident.used = self._clock
        if resident.released or not keep:
            self.drop(resident)

    def drop(self, resident: Resident) -> None:
        """Empty the slot of an idle sequence."""
        assert resident.work is None, f"{resident.sequence} is running"
        self._by_slot[resident.slot] = None
        del self._by_name[resident.sequence]

    def forget_all(self) -> None:
        """All KV is void: idle sequences leave, running ones are prefilled from their first token."""
        for resident in self.residents():
            if resident.work is None:
                self.drop(resident)
            else:
                resident.cached = 0
        self.decoding = 0

    def _free_slot(self) -> int | None:
        idle = [(r.used if r else 0, slot) for slot, r in enumerate(self._by_slot) if slot >= self.running]
        if not idle:
            return None
        slot = min(idle)[1]
        if (oldest := self._by_slot[slot]) is not None:
            self.drop(oldest)
        return slot

    def _move(self, resident: Resident, slot: int) -> None:
        """Swap a sequence into ``slot``, with its KV."""
        if slot == resident.slot:
            return
        other = self._by_slot[slot]
        self._swap(resident.slot, slot, max(resident.cached, other.cached if other else 0))
        self._by_slot[resident.slot], self._by_slot[slot] = other, resident
        if other is not None:
            other.slot = resident.slot
        resident.slot = slot
