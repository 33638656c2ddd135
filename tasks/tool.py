"""The tool role, which holds sessions, and the body of tool tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from libra.resources.codec import tool_return_to_wire
from libra.resources.types import TrajectoryId
from libra.tasks.roles import Role, Setting, make_environment
from libra.tasks.running import Request, run_body
from libra.tasks.sessions import Conversation, PastCall, Sessions


async def tool(blob: bytes) -> dict[str, Any]:
    """Body of a tool task: one call in the trajectory's session on this worker.

    ``blob`` packs ``key``, ``trajectory``, ``turn``, ``call``, ``task`` (the task's spec), ``history`` ([{``call``,
    ``digest``}] of the turns before), ``context`` (tokens before the payload) and ``finish``. Returns the `ToolReturn`
    as a dict, for the rollout task that continues; leaves ``state`` (type, size, status) and ``context`` (payload
    included) as the task's metadata. With ``finish`` there is no call: returns the session's artifact for the reward.
    """

    async def work(role: ToolRole, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        history = tuple(PastCall(past["call"], past["digest"]) for past in request["history"])
        conversation = Conversation(TrajectoryId.parse(request["trajectory"]), request["task"], history)
        if request["finish"]:
            artifact = await role.sessions.artifact(conversation)
            return {"state": ["finish", 0, "ok"], "context": request["context"]}, artifact
        result = await role.sessions.call(conversation, request["call"])
        wire = tool_return_to_wire(result)
        return {"state": wire["state"], "context": request["context"] + len(result.payload)}, wire

    return await run_body(ToolRole, blob, work)


class ToolRole(Role):
    """Tool sessions of one environment."""

    name = "tool"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._sessions: Sessions | None = None

    @property
    def sessions(self) -> Sessions:
        """The sessions of a started role."""
        assert self._sessions is not None
        return self._sessions

    async def start(self) -> None:
        self._sessions = Sessions(await asyncio.to_thread(make_environment, self.spec), self.spec)

    async def stop(self) -> None:
        if self._sessions is not None:
            self._sessions.close()

    def forget(self, trajectories: Iterable[str]) -> None:
        self.sessions.forget(trajectories)

    def stats(self) -> dict[str, Any]:
        return {} if self._sessions is None else self._sessions.stats()
