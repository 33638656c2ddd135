"""The fused form on a real cluster: trajectories stay and move as the policy says, and nothing that was handed over is
sampled again, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from child_parts import awaited
from cluster_parts import Play, playing
from distributed import Client
from fused_parts import Book, deaf, form_of, fused_cluster, fused_spec, process_of, reside, residing

from libra.pipeline.driver.dask_public import TopicTransport
from libra.pipeline.driver.driver import Driver
from libra.pipeline.run.residences import Residences
from libra.resources import wire
from libra.resources.errors import InfraError

pytestmark = pytest.mark.cluster

ON = {0: "rollout-0", 1: "rollout-1", 2: "rollout-0"}
"""Where `cluster_parts:BySize` puts what follows a payload of each size class."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with fused_cluster() as cluster:
        yield str(cluster.scheduler_address)


async def play_all(play: Play, count: int, turns: int, sizes: tuple[int, ...] = (0, 1)) -> list[Book]:
    draw, form = random.Random(5), form_of(play)
    plans = [[draw.choice(sizes) for _ in range(turns)] for _ in range(count)]
    return await asyncio.gather(*(reside(play, form, f"g{n}m0", plan) for n, plan in enumerate(plans)))


async def at_rest(play: Play) -> dict[str, Any]:
    """The plugin's status once no task and no trajectory is left, nor anything of one on a worker."""
    while (status := await play.ask(wire.STATUS))["tasks"] or status["trajectories"]:
        await asyncio.sleep(0.02)
    while set((await play.client.run(residing)).values()) != {(0, 0)}:
        await asyncio.sleep(0.02)
    return status


async def kill(play: Play, worker: str) -> None:
    pids = dict((await play.client.run(process_of)).values())
    os.kill(pids[worker], signal.SIGKILL)


def test_trajectories_stay_and_move_as_the_policy_says(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, fused_spec()) as play:
            books = await play_all(play, 400, 5)
            for book in books:
                book.assert_whole()
                assert book.instances == ["rollout-0", *(ON[size] for size in book.sizes)]
            counters = (await at_rest(play))["counters"]
            moves = sum(a != b for book in books for a, b in zip(book.instances, book.instances[1:], strict=False))
            assert (counters["moved"], counters["stayed"]) == (moves, 400 * 5 - moves)
            assert counters["segments"] == play.driver.segments == 400 * 6
            assert counters["results"] == play.driver.results == 400 + moves  # a task a residence
            assert not [event for event in play.events if event["event"] in ("alarm", "unbound", "lost", "residence")]

    run()


def test_where_kv_is_staged_each_move_says_where_it_lies_and_nothing_is_forgotten_before(address: str) -> None:
    @awaited
    async def run() -> None:
        engine = {"options": {"seconds": 0.0}, "kv_arena": 1}
        async with playing(address, fused_spec(engine=engine)) as play:
            books = await play_all(play, 50, 5)
            moves = 0
            for book in books:
                book.assert_whole()
                segments = [segment for _, segment in book.draft.steps]
                for before, after in pairwise(segments):
                    moved = before.instance != after.instance
                    moves += moved
                    told = None if after.migration is None else (after.migration.source, after.migration.target)
                    assert told == ((before.instance, after.instance) if moved else None)
            assert (await at_rest(play))["counters"]["kv:prefill"] == moves > 0

    run()


def test_a_failing_policy_ends_the_residence_with_its_words(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, fused_spec(policy={"kind": "cluster_parts:FailsOn"})) as play:
            book = Book("g0m0", [0, 3, 0])
            with pytest.raises(InfraError, match=r"the bucket policy failed: KeyError: 'no such bucket'"):
                await form_of(play).advance(book.draft, 0, book.grow)
            assert len(book.draft.steps) == 2  # what was handed over before is kept
            play.driver.end("g0m0", None)
            assert (await at_rest(play))["counters"]["alarm:policy"] == 1

    run()


def test_a_question_that_nobody_answers_is_an_infrastructure_failure_at_its_deadline(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, fused_spec(bind_seconds=0.3)) as play:
            await play.client.run_on_scheduler(deaf, hears=False)
            book = Book("g0m0", [0])
            try:
                words = r"waited 0.3 s for a decision where rollout-000000-0badcafe-g0m0-0-0 goes on; unblocked by the"
                with pytest.raises(InfraError, match=words):
                    await form_of(play).advance(book.draft, 0, book.grow)
            finally:
                await play.client.run_on_scheduler(deaf, hears=True)
            await form_of(play).advance(book.draft, 1, book.grow)
            book.assert_whole()

    run()


def test_a_lost_worker_costs_no_segment_that_was_handed_over(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, fused_spec(seconds=0.05)) as play:
            playing_all = asyncio.create_task(play_all(play, 100, 8))
            while play.driver.segments < 250:
                await asyncio.sleep(0.01)
            await kill(play, "rollout-1")
            books = await playing_all
            for book in books:
                book.assert_whole()
            assert sum(book.lost for book in books) == len([e for e in play.events if e["event"] == "residence"]) > 0
            assert play.driver.segments == sum(len(book.draft.steps) for book in books)  # each taken once
            await at_rest(play)

    run()


def test_a_residence_that_has_handed_nothing_over_is_bound_again_without_its_driver(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, fused_spec(seconds=1.0, policy={"kind": "context_bounds"})) as play:
            first = asyncio.create_task(reside(play, form_of(play), "g0m0", []))
            while (await play.ask(wire.STATUS))["instances"]["rollout-0"]["sequences"] != 1:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            await kill(play, "rollout-0")
            book = await first
            book.assert_whole()
            assert (book.lost, play.driver.graphs) == (0, 1)
            assert (await at_rest(play))["counters"]["again:rollout"] >= 1

    run()


def test_a_busy_worker_that_drains_lets_its_trajectories_move(address: str) -> None:
    @awaited
    async def run() -> None:
        run_spec = fused_spec(seconds=0.05, buckets=[[1, None, 2]], policy={"kind": "context_bounds"})
        async with playing(address, run_spec) as play:
            playing_all = asyncio.create_task(play_all(play, 60, 12))
            while play.driver.segments < 200:
                await asyncio.sleep(0.01)
            await play.ask(wire.SET_ROLE, worker="rollout-1", role=None)
            await play.until("role", worker="rollout-1", state="idle")
            drained = play.driver.segments
            assert drained < 60 * 13
            books = await playing_all
            for book in books:
                book.assert_whole()
                assert book.lost == 0
            left = [book for book in books if "rollout-1" in book.instances and book.instances[-1] == "rollout-0"]
            assert len(left) > 10
            await at_rest(play)

    run()


def test_a_residence_that_is_taken_away_goes_on_elsewhere_from_its_last_segment(address: str, tmp_path: Path) -> None:
    @awaited
    async def run() -> None:
        gate = tmp_path / "gate"
        options = {"blocked": ["g0m0"], "gate": str(gate)}
        limits = {"backoff": 0.05, "drain": 0.3}
        run_spec = fused_spec(options=options, buckets=[[1, None, 2]], policy={"kind": "context_bounds"}, pool=limits)
        async with playing(address, run_spec) as play:
            playing_on = asyncio.create_task(reside(play, form_of(play), "g0m0", [0, 0, 0]))
            while play.driver.segments < 1:
                await asyncio.sleep(0.01)
            await play.ask(wire.SET_ROLE, worker="rollout-0", role=None)
            [event] = await play.until("residence")
            assert "the worker of rollout-000000-0badcafe-g0m0-0-0 is gone, or its role was taken" in event["reason"]
            gate.touch()
            book = await playing_on
            book.assert_whole()
            assert book.instances == ["rollout-0", *["rollout-1"] * 3]
            assert book.lost == 1
            await play.until("role", worker="rollout-0", state="idle")

    run()


def test_a_cancelled_residence_frees_its_body_and_its_session(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, fused_spec(seconds=0.1)) as play:
            form = form_of(play)
            tasks = [asyncio.create_task(reside(play, form, f"g{n}m0", [0] * 500)) for n in range(20)]
            while play.driver.segments < 60:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await at_rest(play)
            seen = play.driver.segments
            await asyncio.sleep(0.3)
            assert play.driver.segments == seen

    run()


def test_a_tool_that_blocks_its_thread_holds_nobody_else_up(address: str, tmp_path: Path) -> None:
    @awaited
    async def run() -> None:
        gate = tmp_path / "gate"
        options = {"blocked": ["g0m0"], "gate": str(gate)}
        async with playing(address, fused_spec(options=options)) as play:
            form = form_of(play)
            blocked = asyncio.create_task(reside(play, form, "g0m0", [0, 0]))
            others = [reside(play, form, f"g{n}m0", [0, 0]) for n in range(1, 50)]
            for book in await asyncio.gather(*others):
                book.assert_whole()
            assert not blocked.done()
            gate.touch()
            (await blocked).assert_whole()

    run()


def test_the_public_transport_carries_segments_too_and_a_client_may_change_its_mind(address: str) -> None:
    """A client that has claimed with answers on a topic gets those of its next claim on the stream, if it asks so."""

    @awaited
    async def run() -> None:
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            run_spec = fused_spec(run="0000cafe")
            reply = await client.scheduler.libra_claim(spec=run_spec.to_wire(), client=client.id, answers="topic")
            token = reply["token"]
            await client.scheduler.libra_set_weights(token=token, version=0, path="/nowhere", digest="0")
            driver = Driver(TopicTransport(client), token, window=0.01, max_inflight=64, on_event=lambda event: None)
            books = [Book(f"g{n}m0", [0, 1, 1, 0]) for n in range(8)]
            form = Residences(driver, run_spec.run, max_turn_tokens=8)
            await asyncio.gather(*(form.advance(book.draft, 0, book.grow) for book in books))
            for book in books:
                book.assert_whole()
            driver.close()
            await client.scheduler.libra_release(token=token)

            reply = await client.scheduler.libra_claim(spec=fused_spec().to_wire(), client=client.id, answers="stream")
            play = Play(client, fused_spec().run, reply)
            await play.ask(wire.SET_WEIGHTS, version=0, path="/nowhere", digest="0")
            await play.until("role", count=2, role="rollout", state="ready")
            (await reside(play, form_of(play), "g0m0", [0, 1])).assert_whole()
            play.driver.close()
            await client.scheduler.libra_release(token=play.token)

    run()
