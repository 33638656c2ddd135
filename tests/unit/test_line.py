"""A worker's line to the plugin: what travels together, in which order, and how a question ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from child_parts import awaited

from libra.resources import wire
from libra.resources.errors import InfraError
from libra.resources.types import Migration, ToolState
from libra.tasks.line import Line

OK = ToolState("get", 1, "ok")


def make() -> tuple[Line, list[dict[str, Any]]]:
    sent: list[dict[str, Any]] = []
    return Line(sent.append), sent


@awaited
async def test_what_comes_up_at_once_travels_as_one_message_of_each_kind_segments_first() -> None:
    line, sent = make()
    asks = [asyncio.create_task(line.stays(f"k{n}", n, 0, OK, 50, 5.0)) for n in range(3)]
    await asyncio.sleep(0)
    for n in range(3):
        line.finished(f"k{n}", n, b"segment")
    await asyncio.sleep(0)
    assert [message["op"] for message in sent] == [wire.SEGMENT, wire.ASK]
    assert sent[0]["segments"] == [(f"k{n}", n, b"segment") for n in range(3)]
    assert [ask[1:] for ask in sent[1]["asks"]] == [(f"k{n}", n, 0, ["get", 1, "ok"], 50) for n in range(3)]
    line.answered([(ask[0], ask[1] != "k1", None) for ask in sent[1]["asks"]])
    assert await asyncio.gather(*asks) == [True, False, True]


@awaited
async def test_moves_are_told_and_segments_without_one_are_not() -> None:
    line, sent = make()
    move = Migration("load", "a", "b", 90, 9000, 0.5, None)
    line.finished("k", 1, b"segment")
    line.moved("k", None)
    line.moved("k", move)
    line.flush()
    assert [message["op"] for message in sent] == [wire.SEGMENT, wire.MOVED]
    [(key, fields)] = sent[1]["moves"]
    assert (key, Migration(**fields)) == ("k", move)


@awaited
async def test_a_flush_sends_at_once_and_nothing_twice() -> None:
    line, sent = make()
    line.finished("k", 1, b"segment")
    line.flush()
    assert len(sent) == 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(sent) == 1


@awaited
async def test_a_question_ends_with_the_policy_s_words_or_at_its_deadline_and_late_answers_find_nobody() -> None:
    line, sent = make()
    failing = asyncio.create_task(line.stays("k", 1, 0, OK, 50, 5.0))
    await asyncio.sleep(0.01)
    line.answered([(sent[0]["asks"][0][0], False, "the bucket policy failed: KeyError")])
    with pytest.raises(InfraError, match="the bucket policy failed: KeyError"):
        await failing
    with pytest.raises(InfraError, match=r"waited 0.01 s for a decision where k goes on; unblocked by the bucket"):
        await line.stays("k", 1, 1, OK, 50, 0.01)
    line.answered([(sent[1]["asks"][0][0], True, None)])

    abandoned = asyncio.create_task(line.stays("k", 1, 2, OK, 50, 5.0))
    await asyncio.sleep(0.01)
    abandoned.cancel()
    await asyncio.wait([abandoned])
    line.answered([(sent[2]["asks"][0][0], True, None)])


@awaited
async def test_questions_of_different_deadlines_each_end_at_their_own() -> None:
    line, _ = make()
    long = asyncio.create_task(line.stays("long", 1, 0, OK, 50, 0.3))
    await asyncio.sleep(0)
    short = [asyncio.create_task(line.stays(f"short{n}", 1, 0, OK, 50, 0.02)) for n in range(2)]
    for task in short:
        with pytest.raises(InfraError, match=r"waited 0.02 s for a decision where short\d goes on"):
            await task
    assert not long.done()
    with pytest.raises(InfraError, match=r"waited 0.3 s for a decision where long goes on"):
        await long
