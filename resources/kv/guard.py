"""The guard of an arena: a small process that removes it once its owner has ended, in whatever way.

Invariants: it does nothing while the owner lives (it waits on a pipe that only the owner holds); what the owner has
removed itself, or a new owner has taken, is left alone; it runs in a session of its own, so that a kill of the owner's
process group passes it by. A guard that was killed itself leaves the arena to `libra.resources.kv.ownership`.

``python -m libra.resources.kv.guard FD DIRECTORY`` is the guard.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from libra.resources.durable import HeldLock

ARENA_FILE = "arena"
OWNER_FILE = "owner.lock"
_END_SECONDS = 10.0


class Guard:
    """Of the arena in ``directory``, which this process owns."""

    def __init__(self, directory: Path) -> None:
        read, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(read), str(directory)],
                stdin=subprocess.DEVNULL,
                pass_fds=(read,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read)

    def dismiss(self) -> None:
        """The arena has been removed: the guard ends."""
        os.close(self._pipe)
        self._process.wait(_END_SECONDS)


def remove(directory: Path, lock: HeldLock) -> None:
    """Remove an arena's directory, its lock file last: while that is locked nobody else takes or reaps it."""
    (directory / ARENA_FILE).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()


def _watch(read: int, directory: Path) -> None:
    os.read(read, 1)  # comes to an end with the owner
    try:
        lock = HeldLock.take(directory / OWNER_FILE, "guard")
    except FileNotFoundError:
        return
    if lock is not None:
        remove(directory, lock)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), Path(sys.argv[2]))
