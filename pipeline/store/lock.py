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
            holder = Holder.read(path)
            raise StoreError(
                f"run folder {folder} is in use by {holder or 'a process that is just starting'}; wait for it to end, "
                "end it, or give this run a folder of its own"
            )
        return cls(held)

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
