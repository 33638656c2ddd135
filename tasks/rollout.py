"""The rollout role, which owns an engine's process, and the body of rollout tasks.

Invariants: a generate call ends exactly once (a segment, or an `InfraError` with the engine's own text); a call that is
cancelled or runs out of time is aborted in the engine, which frees its slot; loading a version that is loaded does
nothing; a role that shall stage KV is not ready without the arena of its worker (`libra.tasks.kv`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from libra.resources.codec import segment_to_wire, tool_return_from_wire
from libra.resources.errors import InfraError, TaskError
from libra.resources.types import KVRoom, Segment, Tokens, TrajectoryId, WeightVersion
from libra.tasks.child.host import error_text
from libra.tasks.child.parent import ChildProcess
from libra.tasks.engines.base import EngineConfig, Place
from libra.tasks.envs.base import Action, Environment, EnvironmentConfig
from libra.tasks.kv import NO_HINT, Hint, Staging, hint_of
from libra.tasks.names import sample_stream, temperature
from libra.tasks.roles import Role, Setting, make_environment
from libra.tasks.running import Request, annotation, run_body, this_host
from libra.tasks.sessions import Sessions

_HOST = "libra.tasks.child.engine_host"


async def rollout(blob: bytes, tool: dict[str, Any] | None = None) -> None:
    """Body of a rollout task: one segment of one trajectory, and what it means.

    ``blob`` packs ``key``, ``trajectory``, ``turn``, ``tokens`` (int32, the context before the tool payload),
    ``max_new``, ``heldout`` and ``cut`` (the last tokens of the context that are of the same turn, which was cut
    short); ``tool`` is what the tool task returned, whose payload continues the context. Leaves ``segment``, ``action``
    (``kind``, ``call``, ``end``) and ``tool`` as the task's metadata.
    """

    async def work(role: RolloutRole, request: Request) -> tuple[dict[str, Any], None]:
        context: Tokens = request["tokens"]
        if tool is not None:
            context = np.concatenate([context, tool_return_from_wire(tool).payload])
        hint = hint_of(annotation(request["key"]), stage=True)
        turn = Turn(context, request["cut"], request["max_new"])
        segment = await role.generate(TrajectoryId.parse(request["trajectory"]), context, turn.room, hint)
        this_host().line.moved(request["key"], segment.migration)
        action = judge(role.environment, turn, segment, role.room(len(context)))
        return {"segment": segment_to_wire(segment), "action": asdict(action), "tool": tool}, None

    await run_body(RolloutRole, blob, work)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that goes on after ``context``, whose last ``cut`` tokens are its own; it has ``limit`` tokens at most."""

    context: Tokens
    cut: int
    limit: int

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.limit - self.cut


def judge(environment: Environment, turn: Turn, segment: Segment, room: int) -> Action:
    """What a segment means. One that was cut short (`RolloutRole.drain`) is continued elsewhere; one that filled the
    ``room`` which the context limit left ends the trajectory with ``tokens``. `TaskError` if the environment cannot
    tell."""
    if segment.finish == "abort":
        return Action("cut")
    if segment.finish != "stop" and len(segment.tokens) >= room:
        return Action("final", end="tokens")
    tokens = segment.tokens
    if turn.cut:
        tokens = np.concatenate([turn.context[len(turn.context) - turn.cut :], tokens])
    try:
        return environment.parse(tokens, segment.finish == "stop")
    except Exception as error:
        raise TaskError(f"the environment cannot parse a turn: {error_text(error)}") from error


class RolloutRole(Role):
    """One engine, in a process of its own."""

    name = "rollout"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._config = EngineConfig(**self.spec.engine)
        # No request may take longer than its whole trajectory.
        self._limit = EnvironmentConfig(**self.spec.environment).wall_timeout
        self._max_context = min(self.spec.max_context, self._config.max_context)
        self._engine: asyncio.Future[ChildProcess] = asyncio.get_running_loop().create_future()
        # By trajectory, then by request; a trajectory has one as a rule.
        self._pending: dict[str, dict[str, asyncio.Future[dict[str, Any]]]] = {}
        self._numbers = itertools.count()
        self._loaded: int | None = None
        self._kv_room: KVRoom | None = None
        self._drains = False
        self._loading = asyncio.Lock()
        self._stats: dict[str, Any] = {}
        budget = self._config.kv_arena
        self._staging = (
            Staging(setting.arena, self.spec.run, setting.worker, setting.node, budget, setting.peer)
            if budget
            else None
        )
        self.environment: Environment
        self.sessions: Sessions | None = None
        """Where tools are inline."""

    async def start(self) -> None:
        spec = self.spec
        try:
            self.environment = await asyncio.to_thread(make_environment, spec)
            self.sessions = Sessions(self.environment, spec) if spec.inline else None
            child = await ChildProcess.start(
                _HOST,
                {
                    "engine": spec.engine,
                    "tokenizer": spec.tokenizer,
                    "deterministic": spec.deterministic,
                    "place": asdict(self._place()),
                },
                name=f"engine of {self.setting.worker}",
                log=self.setting.log("rollout"),
                seconds=spec.start_seconds,
                threads=self._config.threads,
                on_event=self._on_event,
                on_exit=self._on_exit,
            )
        except BaseException as error:
            self._give_up(f"the engine did not start: {error_text(error)}")
            raise
        self._engine.set_result(child)

    async def stop(self) -> None:
        self._fail_pending(f"the engine of {self.setting.worker} is being stopped")
        if self.sessions is not None:
            self.sessions.close()
        if not self._engine.done():
            self._give_up("the role was given up before its engine started")
        elif self._engine.exception() is None:
            await self._engine.result().stop(self.spec.stop_seconds / 2)

    async def load(self, weights: WeightVersion) -> None:
        """Load published weights, once the engine is up. Raises `WeightError` (the old ones stay), `InfraError` or
        `DeadlineError`."""
        engine = await asyncio.shield(self._engine)
        async with self._loading:
            if self._loaded == weights.version:
                return
            # An engine may need the weights to be built at all.
            building = self.spec.start_seconds if self._loaded is None else 0.0
            loaded = await engine.call("load", seconds=building + self.spec.load_seconds, **asdict(weights))
            if self._staging is not None and self._loaded is None:
                await self._staging.open(loaded["kv_layout"], self._config.kind, loaded["version"])
            self._kv_room = KVRoom(**loaded["kv_room"])
            self._loaded = loaded["version"]

    def room(self, context: int) -> int:
        """Tokens that may follow a context of this many."""
        return self._max_context - context

    async def generate(self, trajectory: TrajectoryId, context: Tokens, max_new: int, hint: Hint = NO_HINT) -> Segment:
        """Continue ``context`` by up to ``max_new`` tokens, fewer if the context limit is nearer; none if it is
        reached. ``hint``: where its KV may come from, and whether it shall be staged."""
        started = time.time()
        max_new = min(max_new, self.room(len(context)))
        if max_new < 1:
            return self._empty_segment(len(context), started)
        staging, name = self._staging, str(trajectory)
        if staging is not None and not self._drains:
            hint = await staging.bring(name, context, hint, self.spec.load_seconds)
        if self._drains:  # maybe only since its KV was being brought
            return replace(self._empty_segment(len(context), started), finish="abort")
        end = await self._request(
            name,
            tokens=np.asarray(context, np.int32),
            max_new=max_new,
            stop=list(self.environment.stop),
            temperature=temperature(self.spec, trajectory),
            stream=sample_stream(self.spec, trajectory),
            **({} if staging is None else staging.wish(name, context, hint)),
        )
        if staging is not None:
            staging.count(end["refused"])
        return Segment(
            end["tokens"],
            end["logprobs"],
            end["versions"],
            # One that has had all its tokens as it was cut short has ended.
            "length" if end["finish"] == "abort" and len(end["tokens"]) >= max_new else end["finish"],
            context=len(context),
            cached=end["cached"],
            instance=self.setting.worker,
            started=started,
            ended=time.time(),
            queued=end["queued"],
            staged=end["staged"],
            migration=None if staging is None else staging.migration(hint, end, len(context)),
            tp=self.setting.tp or 1,
        )

    def drain(self, drains: bool) -> None:
        """End all requests now, with the tokens that they have, and take none; or take requests again."""
        self._drains = drains
        engine = self._living()
        for requests in self._pending.values() if drains and engine is not None else ():
            for identifier in requests:
                assert engine is not None
                engine.send("abort", request=identifier)

    def forget(self, trajectories: Iterable[str]) -> None:
        ended = list(trajectories)
        if self.sessions is not None:
            self.sessions.forget(ended)
        engine = self._living()
        for trajectory in ended:
            for identifier, future in self._pending.get(trajectory, {}).items():
                if not future.done():
                    future.set_exception(InfraError(f"{trajectory} has ended; its request is aborted"))
                    if engine is not None:
                        engine.send("abort", request=identifier)
        if engine is not None:
            engine.send("release", sequences=ended)

    @property
    def ready(self) -> bool:
        return self._loaded is not None

    @property
    def version(self) -> int | None:
        return self._loaded

    @property
    def kv_room(self) -> KVRoom | None:
        return self._kv_room

    def slots(self, threads: int) -> int:
        return self._config.slots

    def stats(self) -> dict[str, Any]:
        sessions = {} if self.sessions is None else self.sessions.stats()
        return {**self._stats, "pending": len(self._pending), **sessions}

    async def _request(self, trajectory: str, **fields: Any) -> dict[str, Any]:
        """The fields of the engine's `Generated`."""
        engine = self._engine.result()
        identifier = f"{trajectory}/{next(self._numbers)}"
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        requests = self._pending.setdefault(trajectory, {})
        requests[identifier] = future
        try:
            engine.send("submit", id=identifier, sequence=trajectory, **fields)
            async with asyncio.timeout(self._limit):
                end = await future
        except TimeoutError:
            raise InfraError(
                f"{engine.name} did not finish a request of {trajectory} within environment.wall_timeout = "
                f"{self._limit:g} s (its log: {engine.log})"
            ) from None
        finally:
            del requests[identifier]
            if not requests:
                self._pending.pop(trajectory, None)
            if future.cancelled() and self._living() is not None:
                engine.send("abort", request=identifier)
        if end["error"] is not None or (end["finish"] == "abort" and not self._drains):
            raise InfraError(f"{engine.name} ended a request of {trajectory}: {end['error'] or 'aborted'}")
        return end

    def _empty_segment(self, context: int, now: float) -> Segment:
        return Segment(
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.empty(0, np.int32),
            "length",
            context=context,
            cached=0,
            instance=self.setting.worker,
            started=now,
            ended=now,
            tp=self.setting.tp or 1,
        )

    def _place(self) -> Place:
        return Place(self.setting.tp or 1, None if self._staging is None else str(self._staging.path))

    def _give_up(self, reason: str) -> None:
        """There will be no engine: whoever waits for it to load weights ends too."""
        self._engine.set_exception(InfraError(reason))
        self._engine.exception()  # seen: usually nobody waits

    def _living(self) -> ChildProcess | None:
        """The engine if it can be spoken to."""
        if not self._engine.done() or self._engine.exception() is not None:
            return None
        engine = self._engine.result()
        return engine if engine.alive else None

    def _on_event(self, name: str, fields: dict[str, Any]) -> None:
        if name == "stats":
            self._stats = fields
        elif name == "generated":
            for end in fields["ended"]:
                future = self._pending.get(end["sequence"], {}).get(end["id"])
                if future is not None and not future.done():
                    future.set_result(end)

    def _on_exit(self, death: str) -> None:
        self._fail_pending(death)
        self.setting.on_lost(death)

    def _fail_pending(self, reason: str) -> None:
        for requests in self._pending.values():
            for future in requests.values():
                if not future.done():
                    future.set_exception(InfraError(reason))
