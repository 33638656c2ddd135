"""An append-only journal of small records in segment files, made durable by a thread of its own.

Invariants: a record is with the kernel when `Journal.append` returns (it survives the process), and on disk at most
``sync_seconds`` and one fsync later (it survives the machine); `Journal.append` never waits for the disk. What is read
back is a prefix of what was appended: a half-written tail is cut off and reported, damage before intact records is a
`StoreError`. One process appends to a journal at a time (the run folder's lock sees to that); any process may read it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from libra.pipeline.store.segments import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    header,
    read_segment,
    record,
    segment_numbers,
    segment_path,
)
from libra.resources.codec import pack, unpack
from libra.resources.durable import sync_path
from libra.resources.errors import StoreError


@dataclass(frozen=True, slots=True)
class JournalContents:
    """``records`` in the order in which they were appended; ``tail`` says what was cut off at the end, if anything."""

    records: list[Any]
    tail: str | None


def read_journal(folder: Path, first: int | None = None) -> JournalContents:
    """The records of the segments from number ``first`` on (None: from the oldest there is); changes nothing on disk.

    `StoreError` names a missing segment or the place of damage before intact records.
    """
    numbers = segment_numbers(folder)
    if first is not None and first not in numbers:
        has = f"segments {numbers[0]} to {numbers[-1]}" if numbers else "no segment"
        raise StoreError(
            f"journal {folder} has {has}, but segment {first} is needed; restore {segment_path(folder, first)}"
        )
    records: list[Any] = []
    tail: str | None = None
    for number in numbers:
        if first is not None and number < first:
            continue
        if tail is not None:
            raise StoreError(f"{tail}, but {segment_path(folder, number)} follows: restore it, or remove what follows")
        contents = read_segment(folder, number)
        records.extend(_unpacked(payload, folder, number) for payload in contents.payloads)
        tail = contents.tail
    return JournalContents(records, tail)


def _unpacked(payload: bytes, folder: Path, number: int) -> Any:
    try:
        return unpack(payload)
    except ValueError as error:
        path = segment_path(folder, number)
        raise StoreError(f"{path} holds an intact record that this version cannot read: {error}") from error


class Journal:
    """The writing end. Thread-safe; meant for one event loop and its helpers.

    ``position`` counts the records appended through this object, from 1; ``durable_position`` those known to be on
    disk. ``dropped`` says what a crash had left half-written at the end and is now cut off (None: nothing).
    """

    def __init__(self, folder: Path, sync_seconds: float = 0.5) -> None:
        """Open ``folder`` for appending after its last intact record; it is made if missing.

        ``sync_seconds``: at most one background fsync in this time (group commit)."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.sync_seconds = folder, sync_seconds
        self.dropped: str | None = None
        self.position = self.durable_position = 0
        self._lock, self._sync_lock = threading.Lock(), threading.Lock()
        self._dirty, self._urgent, self._closed = threading.Event(), threading.Event(), False
        self._error: StoreError | None = None
        self._waiters: list[tuple[int, Future[None]]] = []
        self._retired: list[int] = []
        self.segment, self._offset = self._find_end()
        self._file = self._open(self.segment, new=self._offset == 0)
        self._offset = max(self._offset, HEADER_BYTES)
        self._dirty.set()
        self._thread = threading.Thread(target=self._sync_loop, name="journal-sync", daemon=True)
        self._thread.start()

    def append(self, value: Any) -> int:
        """Append a record (what `libra.resources.codec.pack` takes) and return its position. Does not wait for the
        disk. `StoreError` if the file cannot be written or an earlier fsync failed."""
        payload = pack(value)
        if len(payload) > MAX_PAYLOAD:
            raise StoreError(f"a journal record has {len(payload)} bytes; at most {MAX_PAYLOAD} fit, split it")
        with self._lock:
            self._check()
            self._write(record(payload, self._offset))
            self.position += 1
            position = self.position
        if not self._dirty.is_set():
            self._dirty.set()
        return position

    async def durable(self, position: int | None = None) -> None:
        """Wait until the record at ``position`` (None: all so far) is on disk; asks for an fsync at once, which serves
        every record appended by then. `StoreError` if the fsync fails."""
        future: Future[None] = Future()
        with self._lock:
            self._check()
            target = self.position if position is None else position
            if target > self.position:
                raise StoreError(
                    f"journal {self.folder} has {self.position} records; nobody can wait for number {target}"
                )
            if target <= self.durable_position:
                return
            self._waiters.append((target, future))
        self._urgent.set()
        self._dirty.set()
        await asyncio.wrap_future(future)

    def flush(self, sync: bool = True) -> None:
        """Return once everything appended is on disk; ``sync=False`` only asks the background thread to hurry."""
        if sync:
            self._sync()
            self._check()
        else:
            self._urgent.set()
            self._dirty.set()

    def rotate(self) -> int:
        """Begin a new segment and return its number: every record appended before stands in a lower one, every later
        record in this or a higher one. Does not wait for the disk."""
        with self._lock:
            self._check()
            file = self._open(self.segment + 1, new=True)
            self._retired.append(self._file)
            self._file, self.segment, self._offset = file, self.segment + 1, HEADER_BYTES
        self._dirty.set()
        return self.segment

    def prune(self, before: int) -> list[int]:
        """Remove the segments with numbers below ``before`` (never the one being written); returns their numbers."""
        old = [number for number in segment_numbers(self.folder) if number < min(before, self.segment)]
        for number in old:
            segment_path(self.folder, number).unlink()
        return old

    def close(self) -> None:
        """Put everything on disk and end the thread; a second call does nothing. `StoreError` if the fsync fails."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._urgent.set()
        self._dirty.set()
        self._thread.join()
        self._sync()
        os.close(self._file)
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- files ------------------------------------------------------------------------------------

    def _find_end(self) -> tuple[int, int]:
        """The segment to go on with and the offset after its last intact record; cuts off a half-written tail."""
        numbers = segment_numbers(self.folder)
        if not numbers:
            return 0, 0
        contents = read_segment(self.folder, numbers[-1])
        if contents.tail is not None:
            self.dropped = f"{contents.tail}; cut off"
            os.truncate(segment_path(self.folder, numbers[-1]), contents.end)
        return numbers[-1], contents.end

    def _open(self, number: int, new: bool) -> int:
        """Open a segment, with its header if it is new; the folder is fsynced with the next records."""
        path = segment_path(self.folder, number)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if new:
                os.pwrite(file, header(number), 0)
        except OSError as error:
            raise StoreError(
                f"cannot open {path}: {error.strerror}; check the folder's permissions and space"
            ) from error
        return file

    def _write(self, data: bytes) -> None:
        """Write at the end; a failed write leaves the end where it was."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._offset + done)
        except OSError as error:
            path = segment_path(self.folder, self.segment)
            raise StoreError(f"cannot write to {path}: {error.strerror}; make room and resume the run") from error
        self._offset += len(data)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StoreError(f"journal {self.folder} is closed; nothing can be appended")

    # -- durability -------------------------------------------------------------------------------

    def _sync_loop(self) -> None:
        """Waits for the first record after an fsync, then for ``sync_seconds`` since that fsync or an urgent call."""
        last = -self.sync_seconds
        while not self._closed:
            self._dirty.wait()
            self._urgent.wait(max(0.0, last + self.sync_seconds - time.monotonic()))
            self._urgent.clear()
            self._dirty.clear()
            last = time.monotonic()
            self._sync()

    def _sync(self) -> None:
        """fsync what has been appended so far and wake those who wait for it. After a failed fsync the kernel may have
        dropped the pages, so the journal takes nothing more (it is never tried again)."""
        with self._sync_lock:
            with self._lock:
                target, file, retired = self.position, self._file, self._retired
                self._retired = []
            try:
                for old in retired:
                    os.fdatasync(old)
                    os.close(old)
                os.fdatasync(file)
                sync_path(self.folder)
            except OSError as error:
                self._error = StoreError(
                    f"fsync of journal {self.folder} failed: {error.strerror}; check the disk, then resume the run"
                )
            with self._lock:
                if self._error is None:
                    self.durable_position = max(self.durable_position, target)
                reached = [future for position, future in self._waiters if self._error or position <= target]
                self._waiters = [(p, f) for p, f in self._waiters if not self._error and p > target]
            for future in reached:
                if not future.set_running_or_notify_cancel():
                    continue
                if self._error is None:
                    future.set_result(None)
                else:
                    future.set_exception(self._error)
