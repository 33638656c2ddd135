"""The lock of a run folder: one process drives a run at a time.

Invariant: the lock ends with its process, however that ends (the kernel holds it), so a lock file that lies around
locks nothing and nobody has to remove one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from libra.resources.durable import HeldLock, Holder
from libra.resources.errors import StoreError

LOCK_FILE = "lock"
STARTING = "a process that is just starting"


class RunLock:
    """The held lock of a run folder; `release` it, or use it as a context manager."""

    def __init__(self, held: HeldLock) -> None:
        self._held = held

    @classmethod
    def acquire(cls, folder: Path, purpose: str) -> Self:
        """Lock the run folder; ``purpose`` is what others are told (``training``). `StoreError` names the holder."""
        path = folder / LOCK_FILE
        try:
            held = HeldLock.take(path, purpose)
        except OSError as error:
            raise StoreError(
                f"cannot lock {path}: {error.strerror}; check that the run folder is there and writable"
            ) from error
        if held is None:
            raise _in_use(folder, str(Holder.read(path) or STARTING))
        return cls(held)

    @staticmethod
    def holder(folder: Path) -> str | None:
        """Who drives the run in ``folder`` now; None if nobody does. Writes nothing."""
        path = folder / LOCK_FILE
        return str(Holder.read(path) or STARTING) if HeldLock.taken(path) else None

    @classmethod
    def check_free(cls, folder: Path) -> None:
        """`StoreError` names the process that drives the run in ``folder``, if one does."""
        if (holder := cls.holder(folder)) is not None:
            raise _in_use(folder, holder)

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def _in_use(folder: Path, holder: str) -> StoreError:
    return StoreError(
        f"run folder {folder} is in use by {holder}; wait for it to end, end it, or give this run a folder of its own"
    )
