"""The shared memory under an arena: its mapping, its lock, and what is done to slots under it.

Invariants: metadata changes only between `Segment.changing`'s lock and unlock. A slot's sequence number is odd while it
changes and never returns to a value it had, so (slot, sequence) names one entry for good. A process killed in
mid-change leaves ``changing`` set; whoever locks next frees the slots that stand at an odd number and every extent
that no live slot owns, so nothing half-written is ever readable and nothing leaks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libra.native.pages import fence
from libra.resources.errors import DeadlineError, KVError
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.records import (
    DOOMED,
    FREE,
    MAGIC,
    SLOT,
    SUPERBLOCK,
    SUPERBLOCK_BYTES,
    WRITING,
    Geometry,
    process_started,
)

LOCK_SECONDS = 10.0
"""How long a change waits for the others': each takes well under a millisecond."""
_LOCK_POLL_SECONDS = 20e-6
_READ_ATTEMPTS = 8
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_*: in Python's mmap from 3.14 on


def format_segment(path: Path, layout: KVLayout, budget: int, slots: int) -> None:
    """Make an arena file of at most ``budget`` bytes for ``slots`` entries: new, 0600, its memory taken at once.

    `KVError` if the file exists, the budget holds no entry, or the memory is not there (now, not as a later SIGBUS)."""
    size = layout.extent_bytes
    most = Geometry(slots, max(0, budget) // size, size)  # its tables leave a little less for extents
    geometry = Geometry(slots, max(0, budget - most.data) // size, size)
    if geometry.extents < layout.kv_heads + 1 or slots < 1:
        raise KVError(
            f"a KV arena of {budget} B with {slots} slots holds {geometry.extents} extents of {layout.extent_bytes} B, "
            f"and one block of {layout.kv_heads} heads needs {layout.kv_heads + 1}; raise the budget"
        )
    disk = os.statvfs(path.parent)
    there = disk.f_bavail * disk.f_frsize
    if geometry.total > there:
        raise KVError(
            f"a KV arena of {geometry.total} B does not fit in {path.parent}, which has {there} B free; lower the "
            "budget or free shared memory"
        )
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise KVError(f"{path} exists already: another arena, or what one left; end that run or remove it") from error
    try:
        os.posix_fallocate(descriptor, 0, geometry.total)
        head = np.zeros(1, SUPERBLOCK)
        head["layout"] = json.dumps(layout.to_json()).encode()
        head["slots"], head["extents"], head["extent_bytes"] = slots, geometry.extents, geometry.extent_bytes
        head["data"], head["total"] = geometry.data, geometry.total
        head["magic"] = MAGIC
        os.pwrite(descriptor, head.tobytes(), 0)
    except OSError as error:
        path.unlink()
        raise KVError(f"cannot make a KV arena of {geometry.total} B at {path}: {error}; lower the budget") from error
    finally:
        os.close(descriptor)


class Segment:
    """One process's mapping of an arena file, read-only unless ``writable``. `KVError` if there is no whole arena."""

    def __init__(self, path: Path, writable: bool) -> None:
        self.path, self.writable = path, writable
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags)
        except OSError as error:
            raise KVError(f"cannot open the KV arena {path}: {error.strerror}; has its worker ended?") from error
        size = os.fstat(self._descriptor).st_size
        if size < SUPERBLOCK_BYTES:
            os.close(self._descriptor)
            raise KVError(f"{path} holds {size} B and is no KV arena")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(self._descriptor, size, prot=protection, flags=mmap.MAP_SHARED)
        self.head = np.frombuffer(self._map, SUPERBLOCK, 1)
        if self.head["magic"][0] != MAGIC or int(self.head["total"][0]) != size:
            found = (self.head["magic"][0], int(self.head["total"][0]), size)
            self.close()
            raise KVError(f"{path} is no whole KV arena: mark, size and size on disk are {found}, not {MAGIC!r}")
        self.layout = KVLayout(**json.loads(bytes(self.head["layout"][0])))
        geometry = Geometry(*(int(self.head[name][0]) for name in ("slots", "extents", "extent_bytes")))
        self.geometry = geometry
        self.slots = np.frombuffer(self._map, SLOT, geometry.slots, SUPERBLOCK_BYTES)
        self.owner = np.frombuffer(self._map, np.uint32, geometry.extents, geometry.owner)
        data = np.frombuffer(self._map, np.uint8, geometry.extents * geometry.extent_bytes, geometry.data)
        self.extents = data.reshape(geometry.extents, geometry.extent_bytes)
        self._links = self.extents.view(np.uint32)
        self._seq = self.slots["seq"]
        self._threads = threading.Lock()
        self._pid = os.getpid()
        self.me = (self._pid, process_started(self._pid))

    def prefault(self) -> None:
        """Map every page into this process now; else each first touch in a copy costs a fault. Blocks for seconds per
        10 GB: not for an event loop."""
        try:
            self._map.madvise(_POPULATE_WRITE if self.writable else _POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            int(self.extents[:, :: mmap.PAGESIZE].max())  # kernels before 5.14: touch them

    @property
    def removed(self) -> bool:
        """Whether the file has been removed."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Unmap; the file stays."""
        if self._descriptor < 0:
            return
        for name in ("head", "slots", "owner", "extents", "_links", "_seq"):
            self.__dict__.pop(name, None)
        os.close(self._descriptor)
        self._descriptor = -1
        try:
            self._map.close()
        except BufferError:
            self.__dict__.pop("_map")  # a caller still holds a view of an extent: unmapped when that goes

    # -- under the lock ---------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The exclusive right to change metadata, over all processes and threads; the kernel frees it at a death.
        `DeadlineError` names the process that keeps it for more than `LOCK_SECONDS`."""
        if not self.writable or self._pid != os.getpid():
            why = "read-only" if not self.writable else f"process {self._pid}'s, which forked this one"
            raise KVError(f"this mapping of {self.path} is {why}; attach to the arena anew, writable")
        with self._threads:
            self._lock()
            try:
                if self.head["changing"][0]:
                    self._repair()
                self.head["changing"] = self._pid
                fence()
                yield
                fence()
                self.head["changing"] = 0
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _lock(self) -> None:
        # Polled, so that a holder that was stopped shows as an error with its name and not as a hang of this process.
        until, pause = time.monotonic() + LOCK_SECONDS, _LOCK_POLL_SECONDS
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    holder = f"process {int(self.head['changing'][0])}"
                    hint = "Is it stopped or starved? A dead process holds no lock"
                    raise DeadlineError(f"the lock of the KV arena {self.path}", holder, LOCK_SECONDS, hint) from None
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)

    def tick(self) -> int:
        """The next instant of the arena's clock, which orders uses."""
        self.head["clock"] += 1
        return int(self.head["clock"][0])

    def count(self, name: str) -> None:
        """Add one to a counter of the superblock."""
        self.head[name] += 1

    def open_slot(self, slot: int) -> None:
        """Begin to change what a slot names: from here on no reader takes it for whole."""
        self._seq[slot] |= np.uint64(1)
        fence()

    def close_slot(self, slot: int) -> None:
        """The slot is consistent again, under a new sequence number."""
        fence()
        self._seq[slot] += np.uint64(1)

    def free_slot(self, slot: int) -> None:
        """Free a slot and every extent it owns."""
        self.open_slot(slot)
        self.slots["state"][slot] = FREE
        self.owner[self.owner == slot + 1] = 0
        self.slots["trajectory"][slot] = b""
        self.slots["writers"][slot] = 0
        self.close_slot(slot)

    def write_meta(self, slot: int, extents: NDArray[np.uint32], blob: NDArray[np.uint32]) -> None:
        """Put the words of ``blob`` into the chain of ``extents`` and name it in the slot."""
        room = self.words_per_meta
        for index, extent in enumerate(extents):
            part = blob[index * room : (index + 1) * room]
            self._links[extent, : len(part)] = part
            self._links[extent, room] = extents[index + 1] if index + 1 < len(extents) else 0
        self.slots["meta"][slot], self.slots["metas"][slot] = extents[0], len(extents)

    @property
    def words_per_meta(self) -> int:
        """Words of 4 bytes that one extent of a chain holds beside the link."""
        return self.geometry.extent_bytes // 4 - 1

    def drop_dead_writers(self, slot: int) -> None:
        """Forget a slot's writers that died; an entry whose creator died is doomed, one that nobody writes is freed."""
        writers = self.slots["writers"][slot]
        dead = [i for i, (pid, started) in enumerate(writers.tolist()) if pid and process_started(pid) != started]
        if not dead:
            return
        self.slots["state"][slot] = DOOMED
        for index in dead:
            writers[index] = 0
        if not writers["pid"].any():
            self.free_slot(slot)
            self.count("reaped")

    def _repair(self) -> None:
        odd = np.flatnonzero(self._seq & np.uint64(1))
        self.slots["state"][odd] = FREE
        live = np.append(np.flatnonzero(self.slots["state"] != FREE) + 1, 0)
        self.owner[~np.isin(self.owner, live)] = 0
        self._seq[odd] += np.uint64(1)
        for slot in self.in_state(WRITING, DOOMED):  # the last writer died as it left
            if not self.slots["writers"][slot]["pid"].any():
                self.free_slot(slot)
        self.count("repaired")

    # -- without the lock -------------------------------------------------------------------------

    def in_state(self, *states: int) -> list[int]:
        """The slots in one of ``states``, now."""
        now = self.slots["state"]
        found = now == states[0]
        for state in states[1:]:
            found |= now == state
        slots: list[int] = np.flatnonzero(found).tolist()
        return slots

    def is_entry(self, slot: int, seq: int, states: tuple[int, ...]) -> bool:
        """Whether the slot still holds the entry ``seq``, in one of ``states``."""
        fence()
        return int(self._seq[slot]) == seq and int(self.slots["state"][slot]) in states

    def read(self, slot: int, states: tuple[int, ...]) -> tuple[np.void, NDArray[np.uint32], NDArray[np.uint32]] | None:
        """A consistent copy of a slot in one of ``states``: its record, token ids and extent table; None if it is in no
        such state or does not hold still."""
        for _ in range(_READ_ATTEMPTS):
            seq = int(self._seq[slot])
            fence()
            record = self.slots[slot].copy()
            if not seq & 1 and int(record["state"]) not in states:
                return None
            words = None if seq & 1 else self._read_meta(record)
            fence()
            if words is not None and int(self._seq[slot]) == seq:
                tokens, blocks = int(record["tokens"]), int(record["blocks"])
                return record, words[:tokens], words[tokens:].reshape(blocks, self.layout.kv_heads)
            time.sleep(50e-6)
        return None

    def _read_meta(self, record: np.void) -> NDArray[np.uint32] | None:
        """The words of a chain, or None where it leads nowhere: another process is changing it."""
        wanted = int(record["tokens"]) + int(record["blocks"]) * self.layout.kv_heads
        room, extent, parts = self.words_per_meta, int(record["meta"]), []
        if -(-wanted // room) != int(record["metas"]):
            return None
        for index in range(int(record["metas"])):
            if extent >= self.geometry.extents:
                return None
            parts.append(self._links[extent, : min(room, wanted - index * room)].copy())
            extent = int(self._links[extent, room])
        return np.concatenate(parts) if parts else None

    def audit(self) -> list[str]:
        """What contradicts the invariants, in words; for tests and diagnosis. Needs the lock."""
        faults = [f"slot {slot} is left in change" for slot in np.flatnonzero(self._seq & np.uint64(1))]
        claimed = np.zeros(self.geometry.extents, np.int64)
        for slot in self.in_state(*range(FREE + 1, 4)):
            found = self.read(slot, tuple(range(FREE + 1, 4)))
            if found is None:
                faults.append(f"slot {slot} in state {self.slots['state'][slot]} cannot be read")
                continue
            record, _, table = found
            chain, extent = [], int(record["meta"])
            for _ in range(int(record["metas"])):
                chain.append(extent)
                extent = int(self._links[extent, self.words_per_meta])
            extents = np.append(table.reshape(-1), chain).astype(np.int64)
            np.add.at(claimed, extents, 1)
            if (self.owner[extents] != slot + 1).any():
                faults.append(f"slot {slot} names extents that it does not own")
            if int(record["state"]) == WRITING and not record["writers"]["pid"].any():
                faults.append(f"slot {slot} is being written by nobody")
        faults += [f"extent {e} is named {claimed[e]} times" for e in np.flatnonzero(claimed > 1)]
        faults += [
            f"extent {e} leaks to slot {self.owner[e] - 1}" for e in np.flatnonzero((claimed == 0) & (self.owner != 0))
        ]
        return faults
