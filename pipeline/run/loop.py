"""The run loop: five activities over one ledger, none of which is a barrier for another.

===========  =================================================  ==================================================
activity     waits for                                          unblocked by
===========  =================================================  ==================================================
admission    room: (installed + α + 1)·B less groups in credit  an installed version, a returned group, the buffer
members      their next task                                    Dask, through the driver
training     groups that fall due, then the first complete      members ending
installation a published version; a running evaluation          training; the evaluation
watch        nothing: it looks every second                     the clock
===========  =================================================  ==================================================

Invariants: training consumes batches in order of version; a batch is journaled, then stored, then trained; versions are
installed in order and never while an evaluation runs; when `run` returns, every step is trained, evaluated and saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libra.pipeline.config import RunConfig
from libra.pipeline.driver.driver import Driver
from libra.pipeline.ledger.draft import Draft
from libra.pipeline.ledger.events import Admitted, Ended, Installed, Restarted, Segmented, Stored, Trained
from libra.pipeline.run.books import Books, step_trained
from libra.pipeline.run.evaluation import When, evaluate
from libra.pipeline.run.fleet import Fleet
from libra.pipeline.run.fruitless import Fruitless
from libra.pipeline.run.play import Hooks, Player
from libra.pipeline.run.prompts import PromptOrder
from libra.pipeline.run.training import TrainingSide
from libra.pipeline.run.waits import Emit, bounded, waiting
from libra.pipeline.view.events import GroupFinished, InFlight, Load, PolicyState, Published, WaitStarted
from libra.resources.batches import write_batch
from libra.resources.codec import array_bytes
from libra.resources.errors import DeadlineError, LibraError
from libra.resources.types import TrajectoryId, WeightVersion
from libra.scheduler_plugin.admission import Wait
from libra.tasks.envs import calls
from libra.tasks.envs.base import Environment

WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """What the plugin says at this instant: what runs, by worker, and what the bucket policy shows of itself."""

    running: dict[str, int]
    policy: dict[str, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with; `libra.pipeline.run.session` puts it together."""

    config: RunConfig
    books: Books
    driver: Driver
    fleet: Fleet
    player: Player
    training: TrainingSide
    environment: Environment
    batch_path: Callable[[int], Path]
    weights_dir: Path
    set_weights: Callable[[WeightVersion], Awaitable[None]]
    post_batch: Callable[[int, dict[str, Any]], Awaitable[None]]
    report_step: Callable[[int, float, float, Path], Awaitable[None]]
    save_checkpoint: Callable[[], Awaitable[None]]
    look: Callable[[], Awaitable[Look]]
    emit: Emit


class RunLoop:
    """One run, from wherever the books are to its last step. ``allow(version)`` lets training reach ``version``."""

    def __init__(self, parts: Parts) -> None:
        self._p, self._c = parts, parts.config
        self._books, self._ledger = parts.books, parts.books.ledger
        self._prompts = PromptOrder(parts.environment, self._c.seed)
        self._members: dict[TrajectoryId, asyncio.Task[None]] = {}
        self._published: asyncio.Queue[WeightVersion] = asyncio.Queue()
        self._evaluation: asyncio.Task[None] | None = None
        self._group = asyncio.TaskGroup()
        self._allowed = self._c.steps
        self._stepped: float | None = None
        self.begins_at = self._ledger.version
        self._fruitless = Fruitless()
        self._hooks = Hooks(grow=self._grow, restart=self._restart)

    async def run(self) -> None:
        """Train until the last step, then evaluate. Errors of any activity end all of them and are raised."""
        try:
            async with self._group:
                side = [self._group.create_task(a()) for a in (self._admit, self._install_versions, self._watch)]
                await self._publish()
                await self._train()
                await self._settle()
                for task in (*side, *self._members.values()):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    def allow(self, version: int) -> None:
        """Let training go on until ``version`` batches are trained (all of them, unless limited before)."""
        self._allowed = version
        self._books.changes.notify()

    # -- training

    async def _train(self) -> None:
        await self._first_evaluation()
        while self._ledger.version < self._c.steps:
            path = await self._next_batch()
            version = self._ledger.version
            self._p.emit(InFlight(time.time(), {"train": 1}))
            measures = await self._p.training.train(self._ledger, path)
            self._p.emit(InFlight(time.time(), {"train": 0}))
            self._books.record(Trained(version, measures))
            self._p.emit(await asyncio.to_thread(step_trained, version, path, measures))
            await self._p.post_batch(version, {"version": version, "path": str(path), "measures": measures})
            await self._publish()
            await self._report(path, float(measures["seconds"]))
            if self._ledger.version % self._c.store.checkpoint_every == 0 or self._ledger.version == self._c.steps:
                with waiting(self._p.emit, "train", "checkpoint", "its own checkpoint", "the disk", None):
                    await self._p.save_checkpoint()

    async def _report(self, path: Path, train_seconds: float) -> None:
        """Tell the plugin what the step took. Not the first of this process: it began with a start or a resume."""
        last, self._stepped = self._stepped, time.monotonic()
        if last is not None:
            await self._p.report_step(self._ledger.version, self._stepped - last, train_seconds, path)

    async def _first_evaluation(self) -> None:
        """Version 0 is evaluated before it is trained away, so that a run that is killed meanwhile can still do it."""
        if self._ledger.version == 0 and self._wants_evaluation(0):
            with waiting(self._p.emit, "train", "evaluation", "version 0", "its last held-out trajectory", None):
                while self._wants_evaluation(0):
                    await self._books.changes.wait()

    async def _next_batch(self) -> Path:
        """Close the next batch and store it; a batch closed before a resume comes first."""
        version = self._ledger.version
        if version not in self._ledger.closed:
            while version >= self._allowed:
                await self._books.changes.wait()
            self._books.close_batch(await self._next_groups())
        if (stored := self._ledger.closed[version]) is not None:
            return Path(stored)
        batch = self._ledger.batches[version]
        await self._books.settled()
        path = self._p.batch_path(version)
        attributes = {"version": version, "run": self._c.name}
        await asyncio.to_thread(write_batch, path, batch.trajectories, attributes)
        self._books.record(Stored(version, str(path)))
        return path

    async def _next_groups(self) -> list[int]:
        """Until a batch can be closed. Groups that are due may keep it waiting for ``staleness.deadline`` at most; then
        the run fails or drops their open members, by ``staleness.on_expiry``."""
        while isinstance(found := self._ledger.next_batch(), Wait):
            if found.cause == "due":
                await self._wait_for_due(found.groups)
            else:
                detail = f"{self._c.batch_groups} groups with spread ({len(self._ledger.ready)} are ready)"
                with waiting(self._p.emit, "train", "batch", detail, "rollouts that end", None):
                    await self._books.changes.wait()
        return found

    async def _wait_for_due(self, groups: tuple[int, ...]) -> None:
        seconds, ledger = self._c.staleness.deadline, self._ledger
        open_members = ", ".join(str(draft.id) for o in groups for draft in ledger.groups[o].drafts.values())
        what = f"groups {list(groups)}, due in batch {ledger.version} (open: {open_members})"

        async def no_longer() -> None:
            while isinstance(found := ledger.next_batch(), Wait) and found.cause == "due":
                await self._books.changes.wait()

        try:
            with waiting(self._p.emit, "train", "due group", what, "rollout and tool workers", seconds):
                await bounded(no_longer(), seconds, what, "rollout and tool workers", "See staleness.on_expiry.")
        except DeadlineError:
            if self._c.staleness.on_expiry == "fail":
                raise
            for ordinal in groups:
                self._expire(ordinal)

    def _expire(self, ordinal: int) -> None:
        group = self._ledger.groups.get(ordinal)
        if group is None:
            return
        for draft in list(group.drafts.values()):
            self._members[draft.id].cancel()
            reason = f"due in batch {self._ledger.version}, not finished within staleness.deadline"
            self._books.record(Ended(str(draft.id), None, ["infra", reason], {}, time.time()))
        self._p.emit(GroupFinished(time.time(), ordinal, len(group.ended), len(group.usable), "expired"))

    # -- rollout

    async def _admit(self) -> None:
        for draft in self._ledger.drafts():
            self._start(draft)
        while True:
            while self._ledger.room > 0 and self._ledger.bytes_held < self._c.store.buffer:
                self._admit_group()
            if self._ledger.returned_in_a_row >= self._c.groups.max_returned:
                raise LibraError(self._fruitless.message(self._c.groups.max_returned))
            await self._books.changes.wait()

    def _admit_group(self) -> None:
        ordinal = self._ledger.admitted
        epoch, prompt = self._prompts.place(ordinal)
        task, tokens = calls.opening(self._p.environment, "train", prompt)
        packed = array_bytes(tokens, np.int32)
        self._books.record(Admitted(ordinal, epoch, prompt, task, packed, self._ledger.installed, time.time()))
        for draft in list(self._ledger.groups[ordinal].drafts.values()):
            self._start(draft)

    def _start(self, draft: Draft) -> None:
        self._members[draft.id] = self._group.create_task(self._play(draft))

    async def _play(self, draft: Draft) -> None:
        try:
            verdict = await self._p.player.play(draft, draft.id.group // self._c.batch_groups, self._hooks)
            failure = None if verdict.failure is None else [verdict.failure.kind, verdict.failure.reason]
            self._fruitless.ended(str(draft.id), None if failure is None else f"{failure[0]} failure: {failure[1]}")
            self._books.record(Ended(str(draft.id), verdict.reward, failure, verdict.artifact, time.time()))
            if self._ledger.returned_in_a_row == 0:
                self._fruitless.reset()
        finally:
            del self._members[draft.id]

    def _grow(self, draft: Draft, tool: dict[str, Any] | None, segment: dict[str, Any], action: dict[str, Any]) -> None:
        self._books.record(Segmented(str(draft.id), tool, segment, action))

    def _restart(self, draft: Draft, reason: str) -> None:
        self._books.record(Restarted(str(draft.id), self._ledger.installed, reason))

    # -- versions

    async def _publish(self) -> None:
        with waiting(self._p.emit, "train", "publish", "its own weights being written", "the trainer", None):
            weights = await self._p.training.publish(self._ledger, self._p.weights_dir)
        self._published.put_nowait(weights)

    async def _install_versions(self) -> None:
        while True:
            weights = await self._published.get()
            while not self._published.empty() and not self._wants_evaluation(weights.version):
                weights = self._published.get_nowait()
            await self._evaluation_over()
            await self._install(weights)
            if self._wants_evaluation(weights.version):
                self._evaluation = self._group.create_task(self._evaluate(weights.version))

    async def _install(self, weights: WeightVersion) -> None:
        started, seconds = time.time(), self._c.deadlines.publish
        await self._p.set_weights(weights)
        waits_for = f"every rollout instance to load version {weights.version} ({self._p.fleet.describe('rollout')})"
        await bounded(self._p.fleet.until_installed(weights.version), seconds, waits_for, "the engines", "See logs/.")
        self._books.record(Installed(weights.version))
        self._p.emit(Published(time.time(), weights.version, time.time() - started))

    def _wants_evaluation(self, version: int) -> bool:
        if not self._c.eval.tasks or any(e.version == version for e in self._ledger.evaluations):
            return False
        every = self._c.eval.every
        return version in (0, self._c.steps) or bool(every and version % every == 0)

    async def _evaluate(self, version: int) -> None:
        when: When = "before" if version == 0 else "after" if version == self._c.steps else "during"
        p, seconds, tasks = self._p, self._c.deadlines.eval, self._c.eval.tasks
        playing = evaluate(
            p.player, p.environment, tasks, version, version, when, self._c.environment.max_turns, p.emit
        )
        try:
            event = await bounded(playing, seconds, f"the evaluation of version {version}", "rollout and tool workers")
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        self._books.record(event)

    async def _evaluation_over(self) -> None:
        if self._evaluation is not None and not self._evaluation.done():
            with waiting(self._p.emit, "rollout", "evaluation", "a running evaluation", "its last trajectory", None):
                await asyncio.wait([self._evaluation])

    async def _settle(self) -> None:
        """The last version is installed and evaluated."""
        while self._ledger.installed < self._c.steps:
            await self._books.changes.wait()
        while self._wants_evaluation(self._c.steps):
            await self._books.changes.wait()

    # -- watch

    async def _watch(self) -> None:
        """Every second: is every role filled, does anything move, what runs."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._p.fleet.check()
            driver, seconds = self._p.driver, self._c.deadlines.step
            if driver.inflight and time.monotonic() - driver.last_result > seconds:
                roles = "; ".join(
                    f"{role}: {self._p.fleet.describe(role)}" for role in ("rollout", "tool", "reward", "train")
                )
                raise DeadlineError(
                    f"any of {driver.inflight} tasks to end", f"the workers ({roles})", seconds, "deadlines.step"
                )
            look = await self._p.look()
            self._p.emit(Load(time.time(), look.running))
            if look.policy:
                self._p.emit(PolicyState(time.time(), look.policy))
            self._p.emit(idle_engines(self._p.fleet, self._p.player.active, self._ledger.version))


def idle_engines(fleet: Fleet, playing: int, trained: int) -> WaitStarted:
    """What an engine that is idle now waits for, with ``playing`` trajectories under way and version ``trained``."""
    if fleet.installed is None:
        detail = f"an instance with weights ({fleet.describe('rollout')})"
        return WaitStarted(time.time(), "engines", "rollout", "start", detail, "the workers, which start their engines")
    if playing:
        detail = f"tool returns and hand-over of {playing} trajectories"
        return WaitStarted(time.time(), "engines", "rollout", "tool", detail, "tool workers, the scheduler")
    detail = f"room for a group (version {fleet.installed} installed, {trained} trained)"
    return WaitStarted(time.time(), "engines", "rollout", "admission", detail, "training, then its weights installed")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that is not a cancellation, however deep."""
    for error in group.exceptions:
        found = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(found, asyncio.CancelledError):
            return found
    return group.exceptions[0]
