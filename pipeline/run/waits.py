"""Waits that say what they wait for and who unblocks them.

Invariant: every wait of the run loop goes through here; it has a deadline, it is shown while it lasts, it is accounted
as idle time of the resource that waits, and its expiry names what was waited for and who should have come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

from libra.pipeline.view.events import Cause, Event, Resource, WaitEnded, WaitStarted
from libra.resources.errors import DeadlineError

T = TypeVar("T")
Emit = Callable[[Event], None]

_ids = count()


@contextmanager
def waiting(
    emit: Emit, who: Resource, cause: Cause, detail: str, unblocked_by: str, deadline: float | None
) -> Iterator[None]:
    """Tell the view that ``who`` waits, for as long as the body lasts."""
    ident = f"{who}:{cause}:{next(_ids)}"
    emit(WaitStarted(time.time(), ident, who, cause, detail, unblocked_by, deadline))
    try:
        yield
    finally:
        emit(WaitEnded(time.time(), ident))


async def bounded(awaitable: Awaitable[T], seconds: float, waits_for: str, unblocked_by: str, hint: str = "") -> T:
    """``awaitable`` within ``seconds``, else `DeadlineError`. A timeout raised inside it is passed on unchanged."""
    try:
        async with asyncio.timeout(seconds) as scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            raise DeadlineError(waits_for, unblocked_by, seconds, hint) from None
        raise


class Changes:
    """Wakes those who wait for the books to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        """Until the next change."""
        await self._event.wait()
