"""A worker's line to the scheduler plugin: finished segments and questions out, answers in.

What comes up within one turn of the event loop travels as one message of each kind, on the ordered stream that carries
Dask's own messages. Invariants: segments leave in the order in which they were finished, before any later question of
their residence and, with `Line.flush`, before the end of its task; a question ends exactly once: answered, failed, out
of time, or abandoned by who asked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from libra.resources import wire
from libra.resources.errors import DeadlineError, InfraError
from libra.resources.types import Migration, ToolState


@dataclass(frozen=True, slots=True)
class _Question:
    """One that waits for its answer until ``deadline`` (loop time), ``seconds`` after it was asked."""

    key: str
    seconds: float
    deadline: float
    answer: asyncio.Future[bool]

    def expire(self) -> None:
        waits = DeadlineError(
            f"a decision where {self.key} goes on", "the bucket policy", self.seconds, "deadlines.bind"
        )
        self.answer.set_exception(InfraError(str(waits)))


class Line:
    """One a worker. ``send``: puts a message on the worker's stream to the scheduler."""

    def __init__(self, send: Callable[[wire.Message], object]) -> None:
        self._send = send
        self._segments: list[tuple[str, int, bytes]] = []
        self._moves: list[tuple[str, wire.Message]] = []
        self._asks: list[tuple[int, str, int, int, list[Any], int]] = []
        self._waiting: dict[int, _Question] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self._armed = False

    def finished(self, key: str, run: int, segment: bytes) -> None:
        """A residence (``key``, in Dask's run ``run`` of it) has finished a segment."""
        self._segments.append((key, run, segment))
        self._arm()

    def moved(self, key: str, migration: Migration | None) -> None:
        """How the KV of the segment of ``key`` came, if its trajectory had moved."""
        if migration is not None:
            self._moves.append((key, asdict(migration)))
            self._arm()

    async def stays(self, key: str, run: int, turn: int, state: ToolState, context: int, seconds: float) -> bool:
        """Whether the residence's trajectory goes on here, now that call number ``turn`` has returned and its context
        has grown to ``context``. `InfraError` if the policy fails, or if nobody has answered after ``seconds``."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        question = _Question(key, seconds, loop.time() + seconds, loop.create_future())
        self._waiting[number] = question
        self._asks.append((number, key, run, turn, [state.type, state.size, state.status], context))
        self._arm()
        if self._timer is None or question.deadline < self._timer.when():
            self._watch(loop, question.deadline)
        try:
            return bool(await question.answer)
        finally:
            del self._waiting[number]

    def answered(self, answers: list[Any]) -> None:
        """`wire.ANSWER`."""
        for number, stays, error in answers:
            question = self._waiting.get(number)
            if question is None or question.answer.done():
                continue  # abandoned meanwhile
            if error is None:
                question.answer.set_result(stays)
            else:
                question.answer.set_exception(InfraError(error))

    def flush(self) -> None:
        """Send what has come up."""
        self._armed = False
        if self._segments:
            segments, self._segments = self._segments, []
            self._send({"op": wire.SEGMENT, "segments": segments})
        if self._moves:
            moves, self._moves = self._moves, []
            self._send({"op": wire.MOVED, "moves": moves})
        if self._asks:
            asks, self._asks = self._asks, []
            self._send({"op": wire.ASK, "asks": asks})

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self.flush)

    def _watch(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """Look at ``when`` whether a question is out of time: one timer for all, since hardly any ever is."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now, later = None, loop.time(), []
        for question in self._waiting.values():
            if question.deadline > now:
                later.append(question.deadline)
            elif not question.answer.done():
                question.expire()
        if later:
            self._watch(loop, min(later))
