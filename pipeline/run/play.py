"""Plays one trajectory to its terminal state, as a chain of Dask tasks.

Invariants: a finished segment is handed to ``grow`` before the next is asked for, so it is journaled and never sampled
again; a failure of the infrastructure costs a retry of the unfinished step and never becomes a reward; a trajectory
ends exactly once, with a reward or a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from libra.pipeline.driver.driver import Driver
from libra.pipeline.driver.transport import Node
from libra.pipeline.ledger.draft import Draft, Next
from libra.pipeline.run.waits import Emit
from libra.pipeline.view.events import Failed, Worked
from libra.resources.codec import pack, segment_from_wire, tool_return_from_wire, trajectory_to_wire
from libra.resources.errors import ClusterError, SessionLostError, TaskError
from libra.resources.keys import Kind, TaskKey
from libra.resources.types import Failure
from libra.tasks.reward import reward as reward_body
from libra.tasks.rollout import rollout as rollout_body
from libra.tasks.tool import tool as tool_body

Wire = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlayRules:
    """Limits of one trajectory: sampled tokens of a turn, wall seconds, retries after infrastructure failures, and
    whether the environment hands over an artifact at the end."""

    max_turn_tokens: int
    wall_seconds: float
    retries: int
    artifacts: bool


@dataclass(frozen=True, slots=True)
class Hooks:
    """How a draft changes: ``grow(draft, tool | None, segment, action)`` in wire forms, ``restart(draft, reason)``."""

    grow: Callable[[Draft, Wire | None, Wire, Wire], None]
    restart: Callable[[Draft, str], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The terminal state of a trajectory."""

    reward: float | None
    failure: Failure | None
    artifact: Wire


class TooManyFailuresError(ClusterError):
    """So many infrastructure failures in a row that trying on is pointless."""


RETRY_SECONDS = 0.2
"""Wait before the first retry of a trajectory, doubled each time: what failed may need a moment to come back."""


class Player:
    """Plays drafts through the driver.

    ``consecutive``: infrastructure failures in a row that stop the run. They are counted by what was tried (a first
    segment, a tool call, a reward), for a broken tool host does not keep engines from working; and the run stops only
    when a trajectory has used up its retries too, for one short incident fails all that are in flight.
    """

    def __init__(self, driver: Driver, run: str, rules: PlayRules, consecutive: int, emit: Emit) -> None:
        self._driver, self._run, self._rules, self._emit = driver, run, rules, emit
        self._consecutive = consecutive
        self._in_a_row: Counter[Next] = Counter()
        self._attempts = count()
        self.active = 0

    async def play(self, draft: Draft, step: int, hooks: Hooks) -> Verdict:
        """Run ``draft`` to its end; ``step`` goes into its keys. Raises `TooManyFailuresError` only."""
        self.active += 1
        try:
            async with asyncio.timeout(self._rules.wall_seconds) as limit:
                return await self._persist(draft, step, hooks)
        except TimeoutError:
            if not limit.expired():
                raise
            seconds = self._rules.wall_seconds
            reason = (
                f"not finished after {seconds:g} s of wall time (environment.wall_timeout), at {draft.length} tokens"
            )
            return Verdict(None, Failure("task", reason), {})
        finally:
            self.active -= 1
            self._driver.end(str(draft.id))

    async def _persist(self, draft: Draft, step: int, hooks: Hooks) -> Verdict:
        """Try the next thing the draft needs until it has ended or its retries are used up."""
        failures = 0
        while True:
            tried = draft.next
            try:
                if tried == "reward":
                    verdict = await self._reward(draft, step)
                    self._in_a_row[tried] = 0
                    return verdict
                await self._advance(draft, step, hooks)
                self._in_a_row[tried] = 0
            except TaskError as error:
                return Verdict(None, Failure("task", str(error)), {})
            except ClusterError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever else a task raises is the infrastructure's failure
                failures += 1
                self._in_a_row[tried] += 1
                reason = f"{type(error).__name__}: {error}"
                if failures > self._rules.retries:
                    self._check_in_a_row(draft, tried, error)
                    return Verdict(None, Failure("infra", reason), {})
                self._emit(Failed(time.time(), "infra", str(draft.id), reason, retried=True))
                if isinstance(error, SessionLostError):
                    hooks.restart(draft, str(error))
                await asyncio.sleep(RETRY_SECONDS * 2 ** (failures - 1))

    async def _advance(self, draft: Draft, step: int, hooks: Hooks) -> None:
        """One segment: ``rollout``, or the pair ``tool`` → ``rollout``, whose place is bound at the tool's return."""
        attempt, index = next(self._attempts), len(draft.steps)
        key = self._key("rollout", step, draft, index, attempt)
        context = draft.context
        blob = {
            "key": key,
            "trajectory": str(draft.id),
            "turn": index,
            "tokens": context,
            "max_new": self._rules.max_turn_tokens,
            "heldout": draft.id.stream == "heldout",
        }
        if draft.next == "rollout":
            nodes = [Node(key, rollout_body, pack(blob))]
            result = await self._driver.submit(nodes, context=len(context))
        else:
            tool_key = self._key("tool", step, draft, index - 1, attempt)
            call = self._call(draft, tool_key, draft.action)
            nodes = [Node(tool_key, tool_body, call), Node(key, rollout_body, pack(blob), tool_key)]
            result = await self._driver.submit(nodes)
        self._account(result["segment"], result.get("tool"))
        hooks.grow(draft, result.get("tool"), result["segment"], result["action"])

    def _account(self, segment: Wire, tool: Wire | None) -> None:
        """Tell the view which time an engine and a tool worked for this step. A tool's own clock counts seconds only;
        it ended just before its continuation began."""
        now, began = time.time(), segment["started"]
        self._emit(Worked(now, f"rollout/{segment['instance']}", began, segment["ended"]))
        if tool is not None:
            self._emit(Worked(now, "tool", began - tool["seconds"], began))

    def _call(self, draft: Draft, key: str, action: Wire | None) -> bytes:
        """The tool task's blob: the call of ``action``, or (None) the session's end, which hands over its artifact."""
        return pack(
            {
                "key": key,
                "trajectory": str(draft.id),
                "turn": len(draft.tools),
                "call": {} if action is None else action["call"],
                "task": draft.task,
                "history": draft.history,
                "context": draft.length,
                "finish": action is None,
            }
        )

    async def _reward(self, draft: Draft, step: int) -> Verdict:
        attempt = next(self._attempts)
        key = self._key("reward", step, draft, 0, attempt)
        finished = draft.finish(None, None, {}, time.time())
        blob = pack({"key": key, "task": draft.task, "trajectory": trajectory_to_wire(finished)})
        if self._rules.artifacts:
            tool_key = self._key("tool", step, draft, len(draft.tools), attempt)
            nodes = [
                Node(tool_key, tool_body, self._call(draft, tool_key, None)),
                Node(key, reward_body, blob, tool_key),
            ]
        else:
            nodes = [Node(key, reward_body, blob)]
        result = await self._driver.submit(nodes)
        return Verdict(float(result["reward"]), None, result.get("artifact") or {})

    def _key(self, kind: Kind, step: int, draft: Draft, index: int, attempt: int) -> str:
        return str(TaskKey(kind, step, self._run, str(draft.id), index, attempt))

    def _check_in_a_row(self, draft: Draft, tried: Next, error: Exception) -> None:
        if (in_a_row := self._in_a_row[tried]) >= self._consecutive:
            raise TooManyFailuresError(
                f"{in_a_row} infrastructure failures in a row (retries.consecutive_infra = {self._consecutive}); "
                f"the last one, of {draft.id}: {error}"
            ) from error


def grow_draft(draft: Draft, tool: Wire | None, segment: Wire, action: Wire) -> None:
    """Grow a draft that no journal follows (held-out evaluation)."""
    draft.grow(None if tool is None else tool_return_from_wire(tool), segment_from_wire(segment), dict(action))
