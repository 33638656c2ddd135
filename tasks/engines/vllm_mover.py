"""What a rank saves is copied by a thread beside its steps.

Invariants: jobs are done one after the other, in the order in which they came, each once; a job's end is told once,
with what failed if something did (the thread goes on with the next); after `Mover.close` nothing is copied any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

Job = TypeVar("Job")
logger = logging.getLogger(__name__)


class Mover(Generic[Job]):
    """A thread that calls ``copy`` for every job, after ``begin`` (once, in the thread)."""

    def __init__(self, copy: Callable[[Job], None], begin: Callable[[], None] = lambda: None) -> None:
        self._copy, self._begin = copy, begin
        self._jobs: SimpleQueue[tuple[str, Job] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended: dict[str, str | None] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="libra-kv-mover", daemon=True)
        self._thread.start()

    def add(self, name: str, job: Job) -> None:
        """Copy this beside what the caller does next."""
        self._jobs.put((name, job))

    def take(self) -> dict[str, str | None]:
        """The jobs that have ended since the last call, by name, each with what went wrong."""
        with self._lock:
            ended, self._ended = self._ended, {}
        return ended

    def close(self) -> None:
        """End the thread, after the copy that it is at; what has not begun is not copied."""
        self._closing = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        broken = self._failure("the thread's beginning", self._begin)
        while (named := self._jobs.get()) is not None and not self._closing:
            name, job = named
            error = broken or self._failure(name, partial(self._copy, job))
            with self._lock:
                self._ended[name] = error

    def _failure(self, what: str, work: Callable[[], None]) -> str | None:
        """What goes wrong with ``work``, logged, to be told: a copy that failed costs a prefill later, not the engine
        now."""
        try:
            work()
        except Exception as failure:
            logger.exception("KV is not staged: %s failed", what)
            return f"{type(failure).__name__}: {failure}"
        return None
