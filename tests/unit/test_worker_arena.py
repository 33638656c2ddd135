"""The arena of a Dask worker: it outlives the engines and roles of a run, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import kv_parts
import pytest
from child_parts import awaited
from kv_parts import get, put

from libra.resources.kv.arena import Arena
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.ownership import arena_path
from libra.tasks.arena import WorkerArena

LAYOUT = KVLayout("float32", layers=2, kv_heads=2, head_dim=4, block_size=4, tp=1, page_format="test")
RUN, OTHER = "0badfee1", "0badfee2"
BUDGET = 4 * 2**20
TEN = list(range(10))


@asynccontextmanager
async def lent(layout: KVLayout = LAYOUT, version: int = 3) -> AsyncIterator[tuple[WorkerArena, Arena]]:
    """A worker's arena, lent to an engine of `RUN` that has staged ``g0m0``."""
    lender = WorkerArena("w")
    await lender.lend(RUN, layout, BUDGET, version)
    arena = lender.of(RUN)
    assert arena is not None
    assert put(arena, "g0m0", version, TEN) == "stored"
    try:
        yield lender, arena
    finally:
        await lender.end()
        for run in (RUN, OTHER):
            assert not arena_path(run, "w").parent.exists()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_next_engine_of_the_run_finds_what_the_last_one_staged(tp: int) -> None:
    @awaited
    async def check() -> None:
        async with lent() as (lender, arena):
            await lender.lend(RUN, LAYOUT.at_tp(tp), BUDGET, 3)
            assert lender.of(RUN) is arena
            assert get(arena, "g0m0", 3, TEN) == 10

    check()


def test_an_engine_with_newer_weights_finds_nothing_of_older_ones() -> None:
    @awaited
    async def check() -> None:
        async with lent() as (lender, arena):
            await lender.lend(RUN, LAYOUT, BUDGET, 4)
            assert arena.weight_version == 4
            assert arena.stats().used_bytes == 0

    check()


@pytest.mark.parametrize("changed", ["layout", "budget", "run"])
def test_an_arena_that_does_not_fit_is_replaced(changed: str) -> None:
    @awaited
    async def check() -> None:
        async with lent() as (lender, _):
            with Arena(arena_path(RUN, "w")) as reader:
                run = OTHER if changed == "run" else RUN
                layout = replace(LAYOUT, block_size=8) if changed == "layout" else LAYOUT
                await lender.lend(run, layout, BUDGET * (2 if changed == "budget" else 1), 3)
                assert reader.removed  # who has mapped it looks anew
            arena = lender.of(run)
            assert arena is not None
            assert arena.layout == layout
            assert arena.stats().entries == 0

    check()


def test_it_is_there_for_its_run_only_and_ends_with_that() -> None:
    @awaited
    async def check() -> None:
        async with lent() as (lender, arena):
            assert lender.of(OTHER) is None
            await lender.end(but=RUN)
            assert lender.of(RUN) is arena
            await lender.end(but=OTHER)
            assert lender.of(RUN) is None
            assert not arena_path(RUN, "w").exists()
            lender.forget(["g0m0"])
            await lender.settle()
            await lender.end()

    check()


def test_nothing_of_a_forgotten_trajectory_stays() -> None:
    @awaited
    async def check() -> None:
        async with lent() as (lender, arena):
            assert put(arena, "g1m0", 3, TEN) == "stored"
            lender.forget(["g0m0", "g9m9"])
            assert (get(arena, "g0m0", 3, TEN), get(arena, "g1m0", 3, TEN)) == ("absent", 10)

    check()


def test_what_a_dead_engine_was_writing_is_freed_and_what_is_whole_stays() -> None:
    @awaited
    async def check() -> None:
        async with lent() as (lender, arena):
            engine = kv_parts.start("serve", arena.path)
            assert engine.stdin is not None
            assert engine.stdout is not None
            engine.stdin.write('["open", "g1m0", 3, [1, 2, 3]]\n')
            engine.stdin.flush()
            assert (await asyncio.to_thread(engine.stdout.readline)).startswith('["opened"')
            assert arena.being_written("g1m0", 3)
            settling = asyncio.create_task(lender.settle())  # its host is dead already, this part not yet
            await asyncio.sleep(0.3)
            assert not settling.done()
            engine.kill()
            await asyncio.to_thread(engine.wait, 30)
            await settling
            assert (arena.stats().writing, arena.stats().reaped) == (0, 1)
            assert get(arena, "g0m0", 3, TEN) == 10
            engine.stdin.close()
            engine.stdout.close()

    check()


def test_a_role_that_is_given_up_while_the_arena_is_made_leaves_it_to_the_worker() -> None:
    @awaited
    async def check() -> None:
        lender = WorkerArena("w")
        lending = asyncio.create_task(lender.lend(RUN, LAYOUT, BUDGET, 0))
        await asyncio.sleep(0)
        lending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lending
        await lender.end()
        assert not arena_path(RUN, "w").parent.exists()

    check()
