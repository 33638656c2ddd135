"""Staged KV between the arenas of two nodes, over Dask's own RPC: what comes is what was staged, and whether it comes
follows from what fetching and computing have taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from child_parts import awaited
from distributed.core import ConnectionPool, Server

from libra.resources.kv.entries import Entry, Writing
from libra.resources.kv.layout import KVLayout
from libra.tasks import kv_fetch
from libra.tasks.kv import Hint, Source, Staging
from libra.tasks.kv_fetch import KVServer

pytestmark = pytest.mark.cluster
LAYOUT = KVLayout("float32", layers=2, kv_heads=2, head_dim=32, block_size=32, tp=1, page_format="test")
RUN = "0badf00d"
TOKENS = np.arange(300, dtype=np.int32)
SECONDS = 30.0


class Link:
    """What stands between a node's arena and the others: ``delay`` seconds a chunk, ``damages`` its bytes, or
    ``loses`` the entry after the first chunk."""

    def __init__(self, staging: Staging) -> None:
        self.staging, self.delay, self.damages, self.loses = staging, 0.0, False, False
        self.chunks = 0

    async def chunk(self, **request: Any) -> dict[str, Any]:
        await asyncio.sleep(self.delay)
        reply = KVServer(lambda run: self.staging.arena).chunk(**request)
        self.chunks += 1
        if self.damages:
            reply["data"] = b"\xff" + reply["data"][1:]
        if self.loses:
            self.staging.forget([request["trajectory"]])
        return reply


@asynccontextmanager
async def two_nodes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Staging, Staging, Link, Hint]]:
    """Arenas on the nodes A and B, at weights 3; the link to A, and the hint that KV lies there. Two blocks a chunk."""
    monkeypatch.setattr(kv_fetch, "CHUNK_BYTES", 2 * LAYOUT.kv_heads * LAYOUT.extent_bytes)
    async with AsyncExitStack() as stack:
        pool = await ConnectionPool()
        stack.push_async_callback(pool.close)
        a, b = (Staging(RUN, name, name, 8 * 2**20, pool) for name in "AB")
        for each in (a, b):
            await asyncio.to_thread(each.open, LAYOUT.to_json(), "test", 3)
            stack.callback(end, each)
        link = Link(a)
        handlers = {**KVServer(lambda run: a.arena).handlers(), "libra_kv_chunk": link.chunk}
        server = Server(handlers)
        await server.listen("tcp://127.0.0.1:0")
        stack.push_async_callback(server.close)
        yield a, b, link, Hint(True, (Source("A", "A", server.address),))


def end(staging: Staging) -> None:
    owned = staging.take()
    if owned is not None:
        owned.release()


def put(staging: Staging, trajectory: str) -> None:
    """Stage KV whose bytes tell where they belong."""
    arena = staging.arena
    assert arena is not None
    writing = arena.begin(trajectory, 3, TOKENS)
    assert isinstance(writing, Writing)
    table = writing.entry.table
    arena.extents[table.ravel()] = np.arange(table.size, dtype=np.uint8)[:, None]
    assert writing.publish()


def found(staging: Staging, trajectory: str) -> Entry | None:
    arena = staging.arena
    assert arena is not None
    entry = arena.find(trajectory, 3, TOKENS, LAYOUT)
    return entry if isinstance(entry, Entry) else None


def test_what_comes_is_what_was_staged_for_the_tokens_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    @awaited
    async def check() -> None:
        async with two_nodes(monkeypatch) as (a, b, link, hint):
            put(a, "g0m0")
            context = np.concatenate([TOKENS[:200], TOKENS[:50]])
            told = await b.bring("g0m0", context, hint, SECONDS)
            assert told.fetched is not None
            assert link.chunks == 4  # 7 blocks
            entry = found(b, "g0m0")
            assert entry is not None
            np.testing.assert_array_equal(entry.tokens, TOKENS[:200])
            assert b.arena is not None
            pages = b.arena.extents[entry.table.ravel()]
            np.testing.assert_array_equal(pages, np.arange(14, dtype=np.uint8)[:, None] + np.zeros_like(pages))
            ended = {"loaded": 200, "cached": 200, "kv_seconds": 0.5}
            migration = b.migration(told, ended, 250)
            assert migration is not None
            assert (migration.way, migration.tokens) == ("fetch", 200)
            assert migration.seconds == 0.5 + told.fetched

    check()


def test_what_is_just_being_staged_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    @awaited
    async def check() -> None:
        async with two_nodes(monkeypatch) as (a, b, _, hint):
            assert a.arena is not None
            writing = a.arena.begin("g0m0", 3, TOKENS)
            assert isinstance(writing, Writing)
            bringing = asyncio.create_task(b.bring("g0m0", TOKENS, hint, SECONDS))
            await asyncio.sleep(0.1)
            assert not bringing.done()
            assert writing.publish()
            assert (await bringing).fetched is not None

    check()


@pytest.mark.parametrize("fault", ["damages", "loses", "version", "absent", "gone"])
def test_of_a_fetch_that_fails_nothing_stays(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    @awaited
    async def check() -> None:
        async with two_nodes(monkeypatch) as (a, b, link, hint):
            if fault != "absent":
                put(a, "g0m0")
            link.damages, link.loses = fault == "damages", fault == "loses"
            assert b.arena is not None
            if fault == "version":
                b.arena.set_weight_version(4)
            if fault == "gone":
                end(a)
            assert await b.bring("g0m0", TOKENS, hint, SECONDS) == hint
            assert found(b, "g0m0") is None
            stats = b.arena.stats()
            assert (stats.entries, stats.writing, stats.used_bytes) == (0, 0, 0)

    check()


def test_the_cheaper_way_is_taken_by_what_both_have_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    @awaited
    async def check() -> None:
        async with two_nodes(monkeypatch) as (a, b, link, hint):
            for name in ("g0m0", "g1m0", "g2m0"):
                put(a, name)
            link.delay = 0.05
            slow = await b.bring("g0m0", TOKENS, hint, SECONDS)  # never measured: tried
            assert slow.fetched is not None
            assert slow.fetched >= 5 * link.delay
            b.rates.prefilled(300, slow.fetched / 100)
            told = await b.bring("g1m0", TOKENS, hint, SECONDS)
            assert told.fetched is None
            assert told.fetching is not None
            assert told.prefilling is not None
            assert told.prefilling < told.fetching
            assert found(b, "g1m0") is None
            for _ in range(40):
                b.rates.prefilled(300, slow.fetched * 100)
            assert (await b.bring("g2m0", TOKENS, hint, SECONDS)).fetched is not None

    check()


def test_what_lies_on_the_node_itself_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    @awaited
    async def check() -> None:
        async with two_nodes(monkeypatch) as (a, b, link, hint):
            put(a, "g0m0")
            near = Hint(True, (*hint.sources, Source("C", "B", "tcp://127.0.0.1:1")))
            assert await b.bring("g0m0", TOKENS, near, SECONDS) == near
            assert link.chunks == 0

    check()


def test_a_link_that_is_too_slow_costs_its_deadline_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    @awaited
    async def check() -> None:
        async with two_nodes(monkeypatch) as (a, b, link, hint):
            put(a, "g0m0")
            link.delay = 3600.0
            assert await b.bring("g0m0", TOKENS, hint, 0.2) == hint
            assert b.arena is not None
            assert b.arena.stats().writing == 0

    check()
