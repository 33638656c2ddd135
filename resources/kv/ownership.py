"""An arena belongs to one Dask worker and ends with it.

Invariants: an arena lies in a 0700 directory named by run and worker; its owner holds the lock in it, so one run's
worker has one arena, a living owner's is never taken, and a dead one's is removed by its guard, else by the next worker
of that name or by `reap_arenas`. Engines attach by path and outlive neither the file nor its owner's decision to end
it.
"""

from __future__ import annotations

import atexit
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

from libra.resources.durable import HeldLock, Holder
from libra.resources.errors import KVError
from libra.resources.kv.arena import Arena
from libra.resources.kv.guard import ARENA_FILE, OWNER_FILE, Guard, remove
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.segment import format_segment

SHARED_MEMORY = Path("/dev/shm")
DEFAULT_SLOTS = 1024
_YOUNG_SECONDS = 60.0
_TAKE_SECONDS = 2.0
"""How long the guard of a dead owner may take to remove what that one had."""
_LOOK_SECONDS = 0.02
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def arena_name(worker: str) -> str:
    """What the arena of a Dask worker is called: the worker's name, without what no file name has."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", worker)


def arena_path(run: str, worker: str, shared: Path = SHARED_MEMORY) -> Path:
    """Where the arena of ``run``'s Dask worker lies, if it has one."""
    return shared / f"libra-{run}-kv-{arena_name(worker)}" / ARENA_FILE


class OwnedArena:
    """A new, empty arena of ``run``'s worker ``name``, removed at `release` or at the end of this process.

    ``budget`` is the most bytes of shared memory it takes, all of them at once and touched before this returns (seconds
    per 10 GB: not for an event loop); ``slots`` the most entries. `KVError` if a living process owns it or it does not
    fit.
    """

    def __init__(
        self,
        run: str,
        name: str,
        layout: KVLayout,
        budget: int,
        slots: int = DEFAULT_SLOTS,
        shared: Path = SHARED_MEMORY,
    ) -> None:
        if not _NAME.fullmatch(run) or not _NAME.fullmatch(name):
            raise KVError(
                f"a KV arena cannot be named by run {run!r} and worker {name!r}: use letters, digits, '_', '.', '-'"
            )
        self.directory = arena_path(run, name, shared).parent
        lock = self._take(f"KV arena of {name} in run {run}")
        self._lock, self._pid = lock, os.getpid()
        self.path = self.directory / ARENA_FILE
        self.arena: Arena | None = None
        self._guard: Guard | None = None
        atexit.register(self.release)
        try:
            self._guard = Guard(self.directory)
            self.path.unlink(
                missing_ok=True
            )  # a dead owner's: engines that still map it keep their pages until they end
            format_segment(self.path, layout, budget, slots)
            self.arena = Arena(self.path, writable=True)
            self.arena.prefault()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Remove the arena; a second call, or one in a forked child, does nothing."""
        if self._pid != os.getpid():
            return
        self._pid = -1
        atexit.unregister(self.release)
        if self.arena is not None:
            self.arena.close()
        remove(self.directory, self._lock)
        if self._guard is not None:
            self._guard.dismiss()

    def _take(self, purpose: str) -> HeldLock:
        """The lock of the directory, which is made if it is not there."""
        until = time.monotonic() + _TAKE_SECONDS
        while True:
            with suppress(FileExistsError):  # no directory: `_ours` says so
                self.directory.mkdir(mode=0o700, exist_ok=True)
            try:
                if not _ours(self.directory):
                    raise KVError(
                        f"{self.directory} belongs to another user or is no directory; remove it or rename the run"
                    )
                lock = HeldLock.take(self.directory / OWNER_FILE, purpose)
            except FileNotFoundError:
                continue  # a guard has just removed it
            if lock is not None:
                return lock
            if time.monotonic() > until:
                holder = Holder.read(self.directory / OWNER_FILE)
                raise KVError(f"{self.directory} is in use by {holder}; end that run, or name this one otherwise")
            time.sleep(_LOOK_SECONDS)


def reap_arenas(shared: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's arenas in ``shared`` whose owner is dead; returns their directories."""
    reaped = []
    for directory in sorted(shared.glob("libra-*-kv-*")):
        try:
            # A young directory without a lock file is one whose owner is just making it.
            young = not (directory / OWNER_FILE).exists() and time.time() - directory.lstat().st_mtime < _YOUNG_SECONDS
            lock = None if young or not _ours(directory) else HeldLock.take(directory / OWNER_FILE, "reaper")
        except FileNotFoundError:
            continue  # its owner, or another reaper, has just removed it
        if lock is not None:
            remove(directory, lock)
            reaped.append(directory)
    return reaped


def _ours(directory: Path) -> bool:
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
