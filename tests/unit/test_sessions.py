"""Tool sessions: each call happens once, and a lost session is rebuilt exactly or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_parts import CountingEnvironment, CountingSession, awaited, run_spec

from libra.resources.errors import InfraError, SessionLostError, TaskError
from libra.resources.types import ToolReturn, ToolState, TrajectoryId
from libra.tasks.roles import make_environment
from libra.tasks.sessions import Conversation, PastCall, Sessions

FIRST = TrajectoryId("train", 0, 0)
SECOND = TrajectoryId("train", 0, 1)
CALL = {"name": "count"}


def make(tmp_path: Path, tool_timeout: float = 30.0, **options: Any) -> Sessions:
    environment = {
        "kind": "child_parts:CountingEnvironment",
        "tool_timeout": tool_timeout,
        "options": options,
    }
    spec = run_spec(tmp_path, environment=environment)
    return Sessions(make_environment(spec), spec)


def after(*returns: ToolReturn, trajectory: TrajectoryId = FIRST) -> Conversation:
    return Conversation(trajectory, {"prompt": 0}, tuple(PastCall(r.call, r.digest) for r in returns))


async def play(sessions: Sessions, calls: int, trajectory: TrajectoryId = FIRST) -> list[ToolReturn]:
    returns: list[ToolReturn] = []
    for _ in range(calls):
        returns.append(await sessions.call(after(*returns, trajectory=trajectory), CALL))
    return returns


def payloads(returns: list[ToolReturn]) -> list[int]:
    return [int(one.payload[0]) for one in returns]


@awaited
async def test_calls_of_a_session_follow_each_other(tmp_path: Path) -> None:
    sessions = make(tmp_path)
    returns = await play(sessions, 3)
    assert payloads(returns) == [101, 102, 103]
    assert [one.turn for one in returns] == [0, 1, 2]
    assert await sessions.artifact(after(*returns)) == {"calls": 3}


@awaited
async def test_a_call_made_again_is_answered_from_the_record(tmp_path: Path) -> None:
    sessions = make(tmp_path)
    returns = await play(sessions, 2)
    again = await sessions.call(after(returns[0]), CALL)
    assert again is returns[1]
    assert sessions.calls == 2
    # Two tries of the same call at once are one call.
    both = await asyncio.gather(*(sessions.call(after(*returns), CALL) for _ in range(2)))
    assert payloads(both) == [103, 103]
    assert sessions.calls == 3


@awaited
async def test_a_lost_session_is_rebuilt_by_replay(tmp_path: Path) -> None:
    returns = await play(make(tmp_path), 2)
    elsewhere = make(tmp_path)
    third = await elsewhere.call(after(*returns), CALL)
    assert payloads([third]) == [103]
    assert elsewhere.replayed == 2
    assert await make(tmp_path).artifact(after(*returns, third)) == {"calls": 3}


@awaited
async def test_a_replay_that_differs_loses_the_session(tmp_path: Path) -> None:
    returns = await play(make(tmp_path, unstable=True), 1)
    with pytest.raises(SessionLostError, match=rf"call 0 of g0m0 gave .* which was {returns[0].digest}"):
        await make(tmp_path, unstable=True).call(after(*returns), CALL)


@awaited
async def test_an_environment_that_cannot_replay_loses_the_session(tmp_path: Path) -> None:
    returns = await play(make(tmp_path), 2)
    elsewhere = make(tmp_path, replayable=False)
    with pytest.raises(SessionLostError, match="cannot replay its 2 calls"):
        await elsewhere.call(after(*returns), CALL)
    # The trajectory starts again from its prompt.
    assert payloads(await play(elsewhere, 1)) == [101]


@awaited
async def test_a_restarted_trajectory_does_not_meet_its_old_session(tmp_path: Path) -> None:
    sessions = make(tmp_path)
    await play(sessions, 3)
    other = await sessions.call(after(), {"name": "count", "differently": True})
    assert payloads([other]) == [101]


@awaited
async def test_one_slow_tool_does_not_delay_others(tmp_path: Path) -> None:
    sessions = make(tmp_path, slow=[str(FIRST)])
    slow = asyncio.create_task(sessions.call(after(), CALL))
    await asyncio.sleep(0)
    for _ in range(20):
        await play(sessions, 2, SECOND)
    assert not slow.done()
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow


@awaited
async def test_a_tool_that_takes_too_long_is_an_infrastructure_failure(tmp_path: Path) -> None:
    sessions = make(tmp_path, tool_timeout=0.05, slow=[str(FIRST)])
    with pytest.raises(InfraError, match=r"call 0 of g0m0 took longer than environment.tool_timeout = 0\.05 s"):
        await sessions.call(after(), CALL)


@awaited
async def test_a_tool_that_breaks_is_the_task_s_failure(tmp_path: Path) -> None:
    sessions = make(tmp_path, broken=[str(FIRST)])
    with pytest.raises(TaskError, match="call 0 of g0m0 failed: ValueError: the tool has no battery"):
        await sessions.call(after(), CALL)


@awaited
async def test_held_out_sessions_do_not_depend_on_the_evaluation_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, int]] = []

    def spy(self: CountingEnvironment, task: dict[str, Any], trajectory: str, seed: int) -> CountingSession:
        opened.append((trajectory, seed))
        return CountingSession({}, trajectory, seed)

    monkeypatch.setattr(CountingEnvironment, "open", spy)
    sessions = make(tmp_path)
    for trajectory in (TrajectoryId("heldout", 0, 7), TrajectoryId("heldout", 4, 7), TrajectoryId("train", 4, 7)):
        await play(sessions, 1, trajectory)
    assert opened == [("heldout/7", 2), ("heldout/7", 2), ("g4m7", 1)]


@awaited
async def test_forgotten_sessions_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CountingSession] = []
    init = CountingSession.__init__

    def spy(self: CountingSession, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(CountingSession, "__init__", spy)
    sessions = make(tmp_path, slow=[str(SECOND)])
    await play(sessions, 1)
    running = asyncio.create_task(sessions.call(after(trajectory=SECOND), CALL))
    await asyncio.sleep(0)
    sessions.forget([str(FIRST), str(SECOND), "g9m9"])
    assert len(sessions) == 0
    running.cancel()
    await asyncio.wait([running])
    assert [session.closed for session in made] == [True, True]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType, not a ToolReturn"),
        (np.array([5, -3], np.int32), "returned token id -3; ids are at least 0"),
        (np.zeros(401, np.int32), "returned a payload of 401 tokens; engine.max_context is 400"),
        (np.zeros((2, 2), np.int32), "a payload that is no one-dimensional array of token ids"),
        (np.zeros(2), "a payload that is no one-dimensional array of token ids"),
    ],
)
def test_what_is_no_payload_is_the_task_s_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: Any, words: str
) -> None:
    async def tool(session: CountingSession, turn: int, call: dict[str, Any]) -> Any:
        return None if returned is None else ToolReturn(turn, call, returned, ToolState("count", 0, "ok"), 0.0, "")

    monkeypatch.setattr(CountingSession, "tool", tool)

    @awaited
    async def play_one() -> None:
        with pytest.raises(TaskError, match=f"tool call 0 of g0m0 {words}|{words}"):
            await play(make(tmp_path), 1)

    play_one()
