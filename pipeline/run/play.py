"""Plays one trajectory to its terminal state, as a chain of Dask tasks.

Invariants: a finished segment is handed to ``grow`` once, before anything that follows from it, so it is journaled and
never sampled again; a failure of the infrastructure costs a retry of the unfinished step and never becomes a reward; a
trajectory ends exactly once, with a reward or a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from libra.pipeline.driver.driver import Driver
from libra.pipeline.driver.transport import Node
from libra.pipeline.ledger.draft import Draft, Next
from libra.pipeline.run.forms import Wire, draft_opening
from libra.pipeline.run.pairs import Pairs
from libra.pipeline.run.residences import Residences
from libra.pipeline.run.waits import Emit
from libra.pipeline.view.events import Failed, Moved, Worked
from libra.resources.codec import pack, segment_from_wire, tool_return_from_wire, trajectory_to_wire
from libra.resources.errors import ClusterError, SessionLostError, TaskError
from libra.resources.types import Failure
from libra.tasks.reward import reward as reward_body


@dataclass(frozen=True, slots=True)
class PlayRules:
    """Limits of one trajectory: sampled tokens of a turn, wall seconds, retries after infrastructure failures; whether
    the environment hands over an artifact at the end, and whether its tools run inline."""

    max_turn_tokens: int
    wall_seconds: float
    retries: int
    artifacts: bool
    inline: bool


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
        self._form = (Residences if rules.inline else Pairs)(driver, run, rules.max_turn_tokens)
        self.active = 0

    async def play(self, draft: Draft, step: int, hooks: Hooks) -> Verdict:
        """Run ``draft`` to its end; ``step`` goes into its keys. Raises `TooManyFailuresError` only."""
        self.active += 1
        final = None
        try:
            async with asyncio.timeout(self._rules.wall_seconds) as limit:
                verdict = await self._persist(draft, step, hooks)
            final = draft.length if verdict.failure is None else None
            return verdict
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
            self._driver.end(str(draft.id), final)

    async def _persist(self, draft: Draft, step: int, hooks: Hooks) -> Verdict:
        """Try the next thing the draft needs until it has ended or its retries are used up."""
        failures = 0

        def grow(tool: Wire | None, segment: Wire, action: Wire) -> None:
            self._in_a_row[draft.next] = 0
            self._account(segment, tool)
            hooks.grow(draft, tool, segment, action)

        while True:
            try:
                if draft.next != "reward":
                    await self._form.advance(draft, step, grow)
                    continue
                verdict = await self._reward(draft, step)
                self._in_a_row["reward"] = 0
                return verdict
            except TaskError as error:
                return Verdict(None, Failure("task", str(error)), {})
            except ClusterError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever else a task raises is the infrastructure's failure
                failures += 1
                tried = draft.next
                self._in_a_row[tried] += 1
                reason = f"{type(error).__name__}: {error}"
                if failures > self._rules.retries:
                    self._check_in_a_row(draft, tried, error)
                    return Verdict(None, Failure("infra", reason), {})
                self._emit(Failed(time.time(), "infra", str(draft.id), reason, retried=True))
                if isinstance(error, SessionLostError):
                    hooks.restart(draft, str(error))
                await asyncio.sleep(RETRY_SECONDS * 2 ** (failures - 1))

    async def _reward(self, draft: Draft, step: int) -> Verdict:
        artifact = self._form.artifact(draft, step) if self._rules.artifacts else None
        key = self._form.key("reward", step, draft, len(draft.steps))
        finished = draft.finish(None, None, {}, time.time())
        blob = pack({"key": key, "task": draft.task, "trajectory": trajectory_to_wire(finished)})
        node = Node(key, reward_body, blob, None if artifact is None else artifact.key)
        if artifact is None:
            result = await self._driver.submit([node])
        else:
            result = await self._driver.submit([artifact, node], draft_opening(draft))
        return Verdict(float(result["reward"]), None, result.get("artifact") or {})

    def _account(self, segment: Wire, tool: Wire | None) -> None:
        """Tell the view which time an engine and a tool worked for this step, and of KV that moved. A tool's own clock
        counts seconds only; it ended just before its continuation began."""
        now, began = time.time(), segment["started"]
        self._emit(Worked(now, f"rollout/{segment['instance']}", began, segment["ended"]))
        if tool is not None:
            self._emit(Worked(now, "tool", began - tool["seconds"], began))
        if (move := segment["migration"]) is not None:
            self._emit(Moved(now, move["way"], move["tokens"], move["bytes"], move["seconds"]))

    def _check_in_a_row(self, draft: Draft, tried: Next, error: Exception) -> None:
        if (in_a_row := self._in_a_row[tried]) >= self._consecutive:
            raise TooManyFailuresError(
                f"{in_a_row} infrastructure failures in a row (retries.consecutive_infra = {self._consecutive}); "
                f"the last one, of {draft.id}: {error}"
            ) from error


def grow_draft(draft: Draft, tool: Wire | None, segment: Wire, action: Wire) -> None:
    """Grow a draft that no journal follows (held-out evaluation)."""
    draft.grow(None if tool is None else tool_return_from_wire(tool), segment_from_wire(segment), dict(action))
