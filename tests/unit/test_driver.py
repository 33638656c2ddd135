"""The driver without Dask: segments of residences, and the ends of the calls that they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from child_parts import awaited

from libra.pipeline.driver.driver import Driver
from libra.pipeline.driver.transport import Listener, Node, Transport


class Hand(Transport):
    """A transport whose other end is the test."""

    answers = "stream"
    alive = True
    listener: Listener

    def __init__(self) -> None:
        self.released: list[str] = []

    def attach(self, listener: Listener) -> None:
        self.listener = listener

    def detach(self) -> None:
        pass

    def submit(self, nodes: Sequence[Node], wanted: Iterable[str]) -> None:
        pass

    def release(self, keys: Sequence[str]) -> None:
        self.released += keys

    def send(self, op: str, **fields: Any) -> None:
        pass


def make() -> tuple[Hand, Driver]:
    hand = Hand()
    return hand, Driver(hand, "token", window=0.001, max_inflight=8, on_event=lambda event: None)


def body(blob: bytes) -> None:
    """Never runs here."""


async def called(driver: Driver, got: list[bytes]) -> asyncio.Task[dict[str, Any]]:
    """A submitted residence ``k``."""
    call = asyncio.create_task(driver.submit([Node("k", body, b"")], 10, got.append))
    await asyncio.sleep(0.01)
    return call


@awaited
async def test_segments_come_in_order_before_the_result_and_none_after_it() -> None:
    hand, driver = make()
    got: list[bytes] = []
    call = await called(driver, got)
    hand.listener.on_segments([("k", b"1"), ("another", b"?"), ("k", b"2")])
    hand.listener.on_result("k", {"tool": None})
    hand.listener.on_segments([("k", b"3")])
    assert await call == {"tool": None}
    assert (got, driver.segments) == ([b"1", b"2"], 2)


@awaited
async def test_a_cancelled_call_takes_no_segment_from_that_instant_on() -> None:
    """Its trajectory may have been given an end in the books already, although the task has not run again yet."""
    hand, driver = make()
    got: list[bytes] = []
    call = await called(driver, got)
    call.cancel()
    hand.listener.on_segments([("k", b"1")])
    await asyncio.wait([call])
    await asyncio.sleep(0.01)
    assert (got, hand.released) == ([], ["k"])


@awaited
async def test_a_segment_that_cannot_be_taken_fails_the_call_with_the_reason() -> None:
    hand, driver = make()

    def refuse(segment: bytes) -> None:
        raise ValueError("extends nothing")

    call = asyncio.create_task(driver.submit([Node("k", body, b"")], 10, refuse))
    await asyncio.sleep(0.01)
    hand.listener.on_segments([("k", b"1"), ("k", b"2")])
    with pytest.raises(ValueError, match="extends nothing"):
        await call
    await asyncio.sleep(0.01)
    assert (driver.inflight, hand.released) == (0, ["k"])
