"""An arena of staged KV in shared memory: entries by (trajectory, weight version), written by engines, read by any.

An entry holds the token ids of a trajectory and, for each block of them and each KV head, one extent with that page of
all layers; a last block that is not full is staged whole, and its token count says what of it means anything. A
trajectory staged again extends its entry: full blocks whose tokens agree stay where they are and only the rest is
written.

Invariants:
* One writer a key. What a writer has not published no reader finds; it ends as published, freed by its writer, or — the
  writer dead — reaped. Extents are never taken from a writer that lives.
* Readers take no lock. They copy, then ask `Arena.valid`: an entry evicted or changed meanwhile is a failed load, never
  wrong KV. What they copied was computed under the version and for the tokens that they asked for.
* `begin` evicts the entries least recently staged or touched, until the new one fits in the budget; one that cannot fit
  evicts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from libra.resources.errors import KVError
from libra.resources.kv.entries import ArenaStats, Entry, Reason, Refused, Ticket, Writing, common_prefix
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.pinned import Pin, pin
from libra.resources.kv.records import DOOMED, FREE, MOST_WRITERS, READY, TRAJECTORY_BYTES, WRITING
from libra.resources.kv.segment import Segment
from libra.resources.types.kv import KVHandle


class Arena:
    """One process's view of an arena. Writers and the owner attach ``writable``; others read only."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.segment = Segment(path, writable)
        self.path, self.layout = path, self.segment.layout
        self._pin: Pin | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def extents(self) -> NDArray[np.uint8]:
        """The extents, (count, layout.extent_bytes)."""
        return self.segment.extents

    @property
    def weight_version(self) -> int:
        """The version of the weights of the engine that stages here."""
        return int(self.segment.head["weight_version"][0])

    @property
    def removed(self) -> bool:
        """Whether its owner has removed it; another may lie at its path by now."""
        return self.segment.removed

    # -- writing ----------------------------------------------------------------------------------

    def begin(self, trajectory: str, version: int, tokens: NDArray[np.int32]) -> Writing | Refused:
        """Reserve an entry for the KV of ``tokens`` (n ≥ 1), computed under ``version``: its blocks before
        `Writing.first_block` hold their KV already, the others are the caller's to write and publish."""
        if not trajectory or len(trajectory.encode()) > TRAJECTORY_BYTES or not len(tokens):
            raise KVError(
                f"cannot stage {len(tokens)} tokens of {trajectory!r}: a name has 1 to {TRAJECTORY_BYTES} bytes"
            )
        segment, layout = self.segment, self.layout
        blocks, tokens = layout.blocks(len(tokens)), np.ascontiguousarray(tokens, np.int32)
        metas = -(-(len(tokens) + blocks * layout.kv_heads) // segment.words_per_meta)
        with segment.changing():
            if version != self.weight_version:
                return self._refuse(
                    "version", f"{trajectory} has KV of version {version}, weights are {self.weight_version}"
                )
            if blocks * layout.kv_heads + metas > segment.geometry.extents:
                return self._refuse("too_large", f"{len(tokens)} tokens of {trajectory} exceed {segment.path}")
            for slot in self._slots(trajectory, version, WRITING, DOOMED):
                segment.drop_dead_writers(slot)
            if self._slots(trajectory, version, WRITING, DOOMED):
                return self._refuse("being_written", f"{trajectory} of version {version} is being staged already")
            old = next(iter(self._slots(trajectory, version, READY)), None)
            kept = self._common_blocks(old, tokens)
            needed = (blocks - len(kept)) * layout.kv_heads + metas
            room = self._make_room(needed, old, len(kept) * layout.kv_heads)
            if room is None and self._reap():
                room = self._make_room(needed, old, len(kept) * layout.kv_heads)
            if room is None:
                return self._refuse(
                    "no_room", f"{needed} extents for {trajectory}: the rest of the arena is being written"
                )
            self._fill(room, trajectory, version, tokens, kept, needed, metas)
            return Writing(self, self._written(room), len(kept), 0)

    def join(self, ticket: Ticket) -> Writing | Refused:
        """Take part, from another process, in writing the entry that `Writing.ticket` names."""
        segment = self.segment
        with segment.changing():
            if not segment.is_entry(ticket.slot, ticket.seq, (WRITING,)):
                return Refused("gone", f"entry {ticket} was abandoned")
            writers = segment.slots["writers"][ticket.slot]
            free = np.flatnonzero(writers["pid"] == 0)
            if not len(free):
                raise KVError(f"entry {ticket} has {MOST_WRITERS} writers already: an engine has fewer ranks")
            writers[int(free[0])] = segment.me
            first = int(segment.slots["first_block"][ticket.slot])
            return Writing(self, self._written(ticket.slot), first, int(free[0]))

    def leave(self, writing: Writing, publish: bool, whole: bool) -> bool:
        """End one writer's part; see `Writing`. Returns whether the entry was published."""
        segment, slot = self.segment, writing.entry.slot
        with segment.changing():
            if not segment.is_entry(slot, writing.entry.seq, (WRITING, DOOMED)):
                return False
            writers, states = segment.slots["writers"][slot], segment.slots["state"]
            others = np.count_nonzero(writers["pid"]) > 1
            current = int(segment.slots["version"][slot]) == self.weight_version
            # The state before the writer: one killed in between must not leave an entry that another would publish.
            if publish and not others and current and int(states[slot]) == WRITING:
                segment.slots["last_used"][slot] = segment.tick()
                states[slot] = READY
            elif publish or not whole:
                states[slot] = DOOMED
            writers[writing.number] = 0
            if not others and int(states[slot]) == DOOMED:
                segment.free_slot(slot)
            return int(states[slot]) == READY

    # -- reading (no lock) ------------------------------------------------------------------------

    def find(
        self, trajectory: str, version: int, tokens: NDArray[np.int32], layout: KVLayout, beyond: int = 0
    ) -> Entry | Refused:
        """The KV of ``trajectory`` under ``version`` for the longest common prefix of its tokens and ``tokens``, if
        that is longer than ``beyond`` tokens and ``layout`` can take it."""
        difference = self.layout.differs(layout)
        if difference is not None:
            return Refused("layout", f"the arena's {difference}, the engine's")
        for slot in self._slots(trajectory, version, READY):
            entry = self._entry(slot, (READY,), tokens)
            if entry is None or (entry.trajectory, entry.version) != (trajectory, version):
                continue
            if entry.matched > beyond:
                return entry
            return Refused("tokens", f"{entry.matched} of {len(entry.tokens)} staged tokens agree, {beyond} are there")
        staged = self.segment.slots["version"][self._slots(trajectory, None, READY)].tolist()
        others = sorted(set(staged) - {version})
        reason: Reason = "version" if others else "absent"
        return Refused(reason, f"{trajectory} of version {version} is not in {self.path}; of it there are {others}")

    def being_written(self, trajectory: str, version: int) -> bool:
        """Whether an entry is about to be published (unless its writer dies): looking again soon may find it."""
        return bool(self._slots(trajectory, version, WRITING))

    def valid(self, entry: Entry) -> bool:
        """Whether ``entry`` is still what it was: asked after its pages were copied."""
        return self.segment.is_entry(entry.slot, entry.seq, (READY,))

    def handle(self, entry: Entry, worker: str, node: str) -> KVHandle:
        """What to tell others of an entry."""
        nbytes = entry.table.size * self.layout.extent_bytes
        return KVHandle(entry.trajectory, entry.version, len(entry.tokens), nbytes, str(self.path), worker, node)

    # -- keeping ----------------------------------------------------------------------------------

    def touch(self, entry: Entry) -> None:
        """Count a use, so that it is evicted later. Needs no call for an entry read by another engine: that one stages
        the continuation in an arena of its own, and the copy here is worth less."""
        with self.segment.changing():
            if self.valid(entry):
                self.segment.slots["last_used"][entry.slot] = self.segment.tick()

    def release(self, trajectory: str) -> int:
        """Free all of a trajectory that ended, failed or was cancelled; what is being written is freed at its end.
        Returns the entries freed or doomed."""
        with self.segment.changing():
            return self._discard(self._slots(trajectory, None, READY, WRITING))

    def set_weight_version(self, version: int) -> int:
        """The engine's weights are of ``version`` from now on (it is paused): entries of any other are freed, or
        doomed; returns how many."""
        with self.segment.changing():
            self.segment.head["weight_version"] = version
            versions = self.segment.slots["version"]
            return self._discard([s for s in self.segment.in_state(READY, WRITING) if int(versions[s]) != version])

    def clear(self) -> int:
        """Free everything; returns the entries freed or doomed."""
        with self.segment.changing():
            return self._discard(self.segment.in_state(READY, WRITING))

    def reap(self) -> int:
        """Free the entries whose writers died before they published (an engine's death); returns how many. What is
        published stays: it outlives its engine."""
        with self.segment.changing():
            return self._reap()

    def stats(self) -> ArenaStats:
        """Counts as they are now."""
        segment = self.segment
        size, used = segment.geometry.extent_bytes, int(np.count_nonzero(segment.owner))
        return ArenaStats(
            entries=len(segment.in_state(READY)),
            writing=len(segment.in_state(WRITING, DOOMED)),
            used_bytes=used * size,
            capacity_bytes=segment.geometry.extents * size,
            **{name: int(segment.head[name][0]) for name in ("evicted", "refused", "reaped", "repaired")},
        )

    def audit(self) -> list[str]:
        """Contradictions in the metadata, in words: none in a sound arena."""
        with self.segment.changing():
            return self.segment.audit()

    def pin(self) -> Pin:
        """Register the extents for copies by this process's GPU, or lock them in memory; idempotent. For each rank,
        once it has chosen its device."""
        if self._pin is None:
            self._pin = pin(self.extents, writable=self.segment.writable)
        return self._pin

    def prefault(self) -> None:
        """See `Segment.prefault`: for every process that copies."""
        self.segment.prefault()

    def close(self) -> None:
        """Unmap; the arena stays."""
        if self._pin is not None:
            self._pin.release()
            self._pin = None
        self.segment.close()

    # -- helpers, under the lock unless said ------------------------------------------------------

    def _slots(self, trajectory: str, version: int | None, *states: int) -> list[int]:
        """The slots that match now (without the lock: that may match)."""
        slots = self.segment.slots
        named = np.flatnonzero(slots["trajectory"] == trajectory.encode())
        return [
            int(slot)
            for slot in named
            if int(slots["state"][slot]) in states and version in (None, int(slots["version"][slot]))
        ]

    def _entry(self, slot: int, states: tuple[int, ...], tokens: NDArray[np.int32] | None = None) -> Entry | None:
        """A consistent copy; without the lock too."""
        found = self.segment.read(slot, states)
        if found is None:
            return None
        record, words, table = found
        staged = words.view(np.int32)
        matched = len(staged) if tokens is None else common_prefix(staged, tokens)
        name, version = bytes(record["trajectory"]).decode(), int(record["version"])
        return Entry(slot, int(record["seq"]), name, version, staged, table, matched)

    def _written(self, slot: int) -> Entry:
        """The entry being written in ``slot``."""
        entry = self._entry(slot, (WRITING,))
        assert entry is not None, "metadata holds still under the lock"
        return entry

    def _common_blocks(self, old: int | None, tokens: NDArray[np.int32]) -> NDArray[np.uint32]:
        """The rows of an entry's table that stay in the one that extends it."""
        entry = None if old is None else self._entry(old, (READY,), tokens)
        if entry is None:
            return np.zeros((0, self.layout.kv_heads), np.uint32)
        return entry.table[: entry.matched // self.layout.block_size]

    def _make_room(self, needed: int, old: int | None, kept: int) -> int | None:
        """A slot, with at least ``needed`` extents free besides those that ``old`` keeps; None if that cannot be."""
        segment = self.segment
        last_used = segment.slots["last_used"]
        free = int((segment.owner == 0).sum())
        free += 0 if old is None else int((segment.owner == old + 1).sum()) - kept
        slot = old if old is not None else next(iter(segment.in_state(FREE)), None)
        victims: list[int] = []
        enough = free >= needed and slot is not None
        for victim in [] if enough else sorted(segment.in_state(READY), key=lambda s: int(last_used[s])):
            if free >= needed and slot is not None:
                break
            if victim != old:
                victims.append(victim)
                free += int((segment.owner == victim + 1).sum())
                slot = victim if slot is None else slot
        if free < needed or slot is None:
            return None
        for victim in victims:
            segment.count("evicted")
            segment.free_slot(victim)
        return slot

    def _fill(
        self,
        slot: int,
        trajectory: str,
        version: int,
        tokens: NDArray[np.int32],
        kept: NDArray[np.uint32],
        needed: int,
        metas: int,
    ) -> None:
        """Make ``slot`` an entry being written by this process."""
        segment, slots = self.segment, self.segment.slots
        segment.open_slot(slot)
        segment.owner[segment.owner == slot + 1] = 0
        segment.owner[kept.reshape(-1)] = slot + 1
        taken = np.flatnonzero(segment.owner == 0)[:needed].astype(np.uint32)
        segment.owner[taken] = slot + 1
        table = np.concatenate([kept, taken[metas:].reshape(-1, self.layout.kv_heads)])
        segment.write_meta(slot, taken[:metas], np.concatenate([tokens.view(np.uint32), table.reshape(-1)]))
        slots["trajectory"][slot], slots["version"][slot] = trajectory.encode(), version
        slots["tokens"][slot], slots["blocks"][slot], slots["first_block"][slot] = len(tokens), len(table), len(kept)
        slots["last_used"][slot] = segment.tick()
        slots["writers"][slot] = 0
        slots["writers"][slot, 0] = segment.me
        slots["state"][slot] = WRITING
        segment.close_slot(slot)

    def _discard(self, slots: list[int]) -> int:
        for slot in slots:
            if int(self.segment.slots["state"][slot]) == WRITING:
                self.segment.slots["state"][slot] = DOOMED
            else:
                self.segment.free_slot(slot)
        return len(slots)

    def _reap(self) -> int:
        before = int(self.segment.head["reaped"][0])
        for slot in self.segment.in_state(WRITING, DOOMED):
            self.segment.drop_dead_writers(slot)
        return int(self.segment.head["reaped"][0]) - before

    def _refuse(self, reason: Reason, detail: str) -> Refused:
        self.segment.count("refused")
        return Refused(reason, detail)
