"""The fused form: the body of a residence, which plays a trajectory on one rollout worker for as long as it stays.

Used where tools are inline. Invariants: a segment is handed over (`libra.tasks.line`) before the call that it makes,
and is on its way before the task ends; no segment is sampled after a tool's return before the policy has said that the
trajectory stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from libra.resources.codec import pack, segment_to_wire, tool_return_from_wire, tool_return_to_wire
from libra.resources.types import Tokens, ToolReturn, TrajectoryId
from libra.tasks.kv import NO_HINT, hint_of
from libra.tasks.line import Line
from libra.tasks.rollout import RolloutRole, Turn, judge
from libra.tasks.running import Request, annotation, run_body, this_host
from libra.tasks.sessions import Conversation, PastCall, Sessions


async def residence(blob: bytes) -> None:
    """Body of a rollout task in the fused form: segments of one trajectory and the calls between them.

    ``blob`` packs ``key``, ``trajectory``, ``tokens`` (int32, the context), ``max_new``, ``max_turns`` (calls of the
    trajectory at most), ``task`` (the task's spec), ``history`` ([{``call``, ``digest``}] of the calls whose returns
    are in ``tokens``), ``cut`` (the last of ``tokens`` that are of a turn which was cut short, to be continued), and of
    ``call`` and ``tool`` at most one: the call to begin with, or its return. Hands over each segment as it ends
    (`libra.resources.wire.SEGMENT`). Leaves ``tool`` as the task's metadata: None if the trajectory has ended or was
    cut short, else the return after which it moves.
    """
    host = this_host()

    async def work(role: RolloutRole, request: Request) -> tuple[dict[str, Any], None]:
        run = host.worker.state.tasks[request["key"]].run_id
        try:
            left = await Residence(role, host.line, request, run).play()
        finally:
            host.line.flush()
        return {"tool": None if left is None else tool_return_to_wire(left)}, None

    await run_body(RolloutRole, blob, work)


async def hand_over(blob: bytes) -> dict[str, Any]:
    """Body of the rollout task before a reward: what the trajectory's session hands over at its end. ``blob`` packs
    ``key``, ``trajectory``, ``task`` and ``history``."""

    async def work(role: RolloutRole, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        history = tuple(PastCall(past["call"], past["digest"]) for past in request["history"])
        conversation = Conversation(TrajectoryId.parse(request["trajectory"]), request["task"], history)
        return {}, await _sessions(role).artifact(conversation)

    return await run_body(RolloutRole, blob, work)


class Residence:
    """One residence, in Dask's run ``run`` of its task."""

    def __init__(self, role: RolloutRole, line: Line, request: Request, run: int) -> None:
        self._role, self._line, self._sessions = role, line, _sessions(role)
        self._key, self._run = str(request["key"]), run
        self._trajectory = TrajectoryId.parse(request["trajectory"])
        self._task, self._max_new, self._max_turns = request["task"], request["max_new"], request["max_turns"]
        self._history = [PastCall(past["call"], past["digest"]) for past in request["history"]]
        self._context: Tokens = request["tokens"]
        self._cut = int(request["cut"])
        self._call: dict[str, Any] | None = request["call"]
        self._hint = hint_of(annotation(self._key), stage=True)
        self._tool = None if request["tool"] is None else tool_return_from_wire(request["tool"])
        if self._tool is not None:
            self._take(self._tool)

    async def play(self) -> ToolReturn | None:
        """Until the trajectory ends (None), or moves after a tool's return. Raises what calls, the engine and the
        policy raise."""
        call, tool = self._call, self._tool
        while True:
            if call is not None:
                tool = await self._made(call)
                if not await self._stays(tool):
                    return tool
            call = await self._segment(tool)
            if call is None:
                return None

    async def _segment(self, tool: ToolReturn | None) -> dict[str, Any] | None:
        """Sample a segment, after ``tool`` if given, and hand it over; the call that it makes and may make."""
        role = self._role
        # Its KV lies elsewhere for the first segment only; after the last call it need not be staged.
        hint = replace(self._hint, stage=len(self._history) < self._max_turns)
        turn = Turn(self._context, self._cut, self._max_new)
        segment = await role.generate(self._trajectory, self._context, turn.room, hint)
        self._hint, self._cut = NO_HINT, 0
        action = judge(role.environment, turn, segment, role.room(len(self._context)))
        self._context = np.concatenate([self._context, segment.tokens])
        told = {
            "tool": None if tool is None else tool_return_to_wire(tool),
            "segment": segment_to_wire(segment),
            "action": {"kind": action.kind, "call": action.call, "end": action.end},
        }
        self._line.finished(self._key, self._run, pack(told))
        self._line.moved(self._key, segment.migration)
        return action.call if action.kind == "call" and len(self._history) < self._max_turns else None

    async def _made(self, call: dict[str, Any]) -> ToolReturn:
        conversation = Conversation(self._trajectory, self._task, tuple(self._history))
        tool = await self._sessions.call(conversation, call)
        self._take(tool)
        return tool

    def _take(self, tool: ToolReturn) -> None:
        self._history.append(PastCall(tool.call, tool.digest))
        self._context = np.concatenate([self._context, tool.payload])

    async def _stays(self, tool: ToolReturn) -> bool:
        turn, seconds = len(self._history) - 1, self._role.spec.bind_seconds
        return await self._line.stays(self._key, self._run, turn, tool.state, len(self._context), seconds)


def _sessions(role: RolloutRole) -> Sessions:
    assert role.sessions is not None, "a residence runs where environment.inline says so"
    return role.sessions
