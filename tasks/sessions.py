"""The tool sessions of one worker (a tool worker, or a rollout worker where tools are inline): one a trajectory, each
call of which happens once.

Invariants: calls of a trajectory run one after another, those of different trajectories side by side; call k of a
session that has made it is answered from its record; a session whose record does not agree with what the trajectory
saw (its history) is never used: it is rebuilt by replaying the history, payload digests compared, or is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libra.resources.errors import InfraError, LibraError, SessionLostError, TaskError
from libra.resources.types import ToolReturn, TrajectoryId
from libra.resources.types.run import RunSpec
from libra.tasks.child.host import error_text
from libra.tasks.envs.base import Environment, EnvironmentConfig, Session
from libra.tasks.names import session_name, session_seed

logger = logging.getLogger("distributed.libra.sessions")


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that the trajectory has made, and the digest of the payload that it got."""

    call: dict[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A trajectory as its session must know it: its task and its calls so far."""

    trajectory: TrajectoryId
    task: dict[str, Any]
    history: tuple[PastCall, ...]


@dataclass(slots=True)
class _Slot:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: Session | None = None
    returns: list[ToolReturn] = field(default_factory=list)
    forgotten: bool = False

    def drop(self) -> None:
        """Close the session; its record goes with it."""
        session, self.session, self.returns = self.session, None, []
        if session is not None:
            try:
                session.close()
            except Exception:
                # The trajectory no longer needs it: that it cannot be closed is only worth a line in the log.
                logger.exception("a tool session could not be closed")


class Sessions:
    """Opens, finds, replays and closes sessions."""

    def __init__(self, environment: Environment, spec: RunSpec) -> None:
        self._environment, self._spec = environment, spec
        self._timeout = EnvironmentConfig(**spec.environment).tool_timeout
        self._slots: dict[str, _Slot] = {}
        self.calls = self.replayed = 0

    def __len__(self) -> int:
        return len(self._slots)

    async def call(self, conversation: Conversation, call: dict[str, Any]) -> ToolReturn:
        """Make the call that follows the history, once.

        Raises `InfraError` (a time-out, or the tool's own), `SessionLostError`, or `TaskError`: the tool's own, or any
        other exception of it.
        """
        slot = self._slot(conversation)
        async with slot.lock:
            try:
                await self._agree(slot, conversation, call)
                turn = len(conversation.history)
                if turn == len(slot.returns):
                    await self._make(slot, conversation, call)
                return slot.returns[turn]
            finally:
                self._end_if_forgotten(slot)

    async def artifact(self, conversation: Conversation) -> dict[str, Any]:
        """What the session hands over at its end. Raises as `call` does."""
        slot = self._slot(conversation)
        async with slot.lock:
            try:
                await self._agree(slot, conversation, None)
                assert slot.session is not None
                return slot.session.artifact()
            except LibraError:
                raise
            except Exception as error:
                raise TaskError(
                    f"the session of {conversation.trajectory} has no artifact: {error_text(error)}"
                ) from error
            finally:
                self._end_if_forgotten(slot)

    def forget(self, trajectories: Iterable[str]) -> None:
        """Close the sessions of trajectories that have ended."""
        for trajectory in trajectories:
            slot = self._slots.pop(trajectory, None)
            if slot is not None:
                slot.forgotten = True
                if not slot.lock.locked():
                    slot.drop()

    def stats(self) -> dict[str, int]:
        """Open sessions, and totals of calls made and of those among them that rebuilt a session."""
        return {"sessions": len(self), "calls": self.calls, "replayed": self.replayed}

    def close(self) -> None:
        """Close all sessions."""
        self.forget(list(self._slots))

    def _slot(self, conversation: Conversation) -> _Slot:
        return self._slots.setdefault(str(conversation.trajectory), _Slot())

    def _end_if_forgotten(self, slot: _Slot) -> None:
        if slot.forgotten:
            slot.drop()

    async def _agree(self, slot: _Slot, conversation: Conversation, call: dict[str, Any] | None) -> None:
        """Make the session's record agree with the history, and with ``call`` where it has made that one."""
        if slot.session is not None and _agrees(slot.returns, conversation.history, call):
            return
        slot.drop()
        trajectory, history = conversation.trajectory, conversation.history
        if history and not self._environment.replayable:
            raise SessionLostError(
                f"the session of {trajectory} is not on this worker, and {type(self._environment).__name__} cannot "
                f"replay its {len(history)} calls"
            )
        slot.session = self._open(conversation)
        for turn, past in enumerate(history):
            result = await self._make(slot, conversation, past.call)
            self.replayed += 1
            if result.digest != past.digest:
                slot.drop()
                raise SessionLostError(
                    f"replaying call {turn} of {trajectory} gave a payload with digest {result.digest}, which was "
                    f"{past.digest} before: the environment's tools depend on more than (seed, trajectory, turn)"
                )

    def _open(self, conversation: Conversation) -> Session:
        trajectory = conversation.trajectory
        name, seed = session_name(trajectory), session_seed(self._spec, trajectory)
        try:
            return self._environment.open(conversation.task, name, seed)
        except LibraError:
            raise
        except Exception as error:
            raise TaskError(f"the environment cannot open a session for {trajectory}: {error_text(error)}") from error

    async def _make(self, slot: _Slot, conversation: Conversation, call: dict[str, Any]) -> ToolReturn:
        """Make the session's next call. Whatever ends it early leaves a session in an unknown state, which is
        dropped: the next try replays."""
        assert slot.session is not None
        turn, session, trajectory = len(slot.returns), slot.session, conversation.trajectory
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                result = await session.tool(turn, call)
        except LibraError:
            slot.drop()
            raise
        except Exception as error:
            slot.drop()
            if limit.expired():
                raise InfraError(
                    f"tool call {turn} of {trajectory} took longer than environment.tool_timeout = {self._timeout:g} s"
                ) from error
            raise TaskError(f"tool call {turn} of {trajectory} failed: {error_text(error)}") from error
        except BaseException:
            slot.drop()
            raise
        self.calls += 1
        problem = self._problem(result)
        if problem is not None:
            slot.drop()
            raise TaskError(f"tool call {turn} of {trajectory} returned {problem}")
        slot.returns.append(result)
        return result

    def _problem(self, result: object) -> str | None:
        """What is wrong with a tool's return, if anything is: nothing wrong may come into a context."""
        if not isinstance(result, ToolReturn):
            return f"{type(result).__name__}, not a ToolReturn"
        payload = result.payload
        if not (isinstance(payload, np.ndarray) and payload.ndim == 1 and payload.dtype.kind in "iu"):
            return "a payload that is no one-dimensional array of token ids"
        if len(payload) > self._spec.max_context:
            return f"a payload of {len(payload)} tokens; engine.max_context is {self._spec.max_context}"
        return f"token id {payload.min()}; ids are at least 0" if (payload < 0).any() else None


def _agrees(returns: list[ToolReturn], history: tuple[PastCall, ...], call: dict[str, Any] | None) -> bool:
    """Whether a record begins with the history and, where it goes on, goes on with ``call``."""
    if len(returns) < len(history):
        return False
    same = all(r.call == past.call and r.digest == past.digest for r, past in zip(returns, history, strict=False))
    return same and (call is None or len(returns) == len(history) or returns[len(history)].call == call)
