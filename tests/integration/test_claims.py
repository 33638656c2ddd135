"""Who holds the cluster, how that ends, and what becomes of workers that die meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from child_parts import awaited
from cluster_parts import WEIGHTS, Play, label_cluster, playing, running_bodies, spec, where
from distributed import Client, LocalCluster

from libra.resources import wire
from libra.resources.cluster.attach import attached, check
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.errors import ClusterError

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LibraLocalCluster]:
    with label_cluster({"rollout": 2, "tool": 2}) as cluster:
        yield cluster


@pytest.fixture
def address(cluster: LibraLocalCluster) -> str:
    return str(cluster.scheduler_address)


def test_a_second_driver_is_refused_and_told_who_holds_the_cluster(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, spec(name="first")) as first, Client(address, asynchronous=True) as other:
            reply = await other.scheduler.libra_claim(
                spec=spec(name="second", run="0000cafe").to_wire(), client=other.id
            )
            assert "held by run 'first' (0badcafe)" in reply["error"]
            assert first.client.id in reply["error"]

    run()


def test_requests_with_a_wrong_token_change_nothing(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, spec()) as play:
            scheduler = play.client.scheduler
            for reply in (
                await scheduler.libra_set_weights(token="guessed", version=9, **WEIGHTS),
                await scheduler.libra_set_role(token="guessed", worker="rollout-0", role=None),
                await scheduler.libra_status(token="guessed"),
                await scheduler.libra_release(token="guessed"),
            ):
                assert "does not hold the cluster" in reply["error"]
            assert (await play.ask(wire.STATUS))["weights"]["current"] == 0

    run()


def test_a_claim_ends_with_its_client_its_tasks_are_cancelled_and_its_roles_stopped(address: str) -> None:
    @awaited
    async def run() -> None:
        async with Client(address, asynchronous=True, set_as_default=False) as observer:
            async with playing(address, spec()) as play:
                running = asyncio.create_task(play.first("g0m0", seconds=3600))
                while (await play.ask(wire.STATUS))["instances"].get("rollout-0", {}).get("sequences") != 1:
                    await asyncio.sleep(0.02)
                await play.client.close()
                running.cancel()
            async with playing(address, spec(name="next", run="0000cafe")) as following:
                status = await following.ask(wire.STATUS)
                assert status["tasks"] == 0
                assert set((await observer.run(running_bodies)).values()) == {0}

    run()


def test_a_claim_that_cannot_be_filled_says_what_is_missing(address: str) -> None:
    @awaited
    async def run() -> None:
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            wanted = spec(roles={"rollout": 2, "tool": 1, "train": 1})
            reply = await client.scheduler.libra_claim(spec=wanted.to_wire(), client=client.id)
            assert "train: 1 wanted, 1 missing" in reply["error"]
            reply = await client.scheduler.libra_claim(
                spec=spec(policy={"kind": "nothing"}).to_wire(), client=client.id
            )
            assert "policy.kind 'nothing'" in reply["error"]

    run()


def test_a_batch_is_handed_to_who_waits_for_it_and_a_wait_ends_with_the_run(address: str) -> None:
    @awaited
    async def run() -> None:
        async with Client(address, asynchronous=True, set_as_default=False) as worker:
            async with playing(address, spec()) as play:
                waits = asyncio.create_task(worker.scheduler.libra_await_batch(run=play.run, version=3))
                await asyncio.sleep(0.05)
                assert not waits.done()
                await play.ask(wire.POST_BATCH, version=3, record={"path": "/batch/3"})
                assert (await waits)["path"] == "/batch/3"
                waits = asyncio.create_task(worker.scheduler.libra_await_batch(run=play.run, version=4))
                await asyncio.sleep(0.05)
            assert "ended before it posted the batch of version 4" in (await waits)["error"]

    run()


def test_a_killed_rollout_worker_comes_back_with_its_role_and_no_segment_is_lost(address: str) -> None:
    @awaited
    async def run() -> None:
        alike = spec(buckets=[[1, None, 2]], policy={"kind": "context_bounds"}, roles={"rollout": 2, "tool": 2})
        async with playing(address, alike) as play:
            await play.ask(wire.SET_WEIGHTS, version=5, **WEIGHTS)
            await play.until("weights", 2, version=5)

            async def whole(trajectory: str) -> None:
                await play.first(trajectory, 1.0)
                for turn in range(4):
                    await play.turn(trajectory, turn, 0, 0.02)
                play.driver.end(trajectory, None)

            plays = [asyncio.create_task(whole(f"g{n}m0")) for n in range(40)]
            while (status := await play.ask(wire.STATUS))["instances"]["rollout-0"]["sequences"] < 20:
                await asyncio.sleep(0.02)
            await kill_worker(play, status, "rollout-0")
            await play.until("lost", worker="rollout-0", role="rollout")
            await asyncio.gather(*plays)
            back = (await play.until("role", 2, worker="rollout-0", state="ready"))[-1]
            assert back["version"] == 5
            status = await play.ask(wire.STATUS)
            assert set(status["instances"]) == {"rollout-0", "rollout-1"}
            assert status["counters"]["again:rollout"] == 20  # those that ran there began again elsewhere

    run()


def test_why_kv_was_not_used_comes_with_the_heartbeats_and_is_counted_once(address: str) -> None:
    def refuse(dask_worker: Any) -> None:
        dask_worker.extensions[wire.EXTENSION].arena.refused.update(["layout", "layout", "version"])

    @awaited
    async def run() -> None:
        async with playing(address, spec()) as play:
            workers = (await play.ask(wire.STATUS))["roles"]
            for again in (1, 2):
                for name in ("rollout-0", "rollout-1"):
                    await play.client.run(refuse, workers=[workers[name]["address"]])
                told = await play.until("kv_refused", 2 * again)
                assert {event["worker"] for event in told} == {"rollout-0", "rollout-1"}
                assert all(event["reasons"] == {"layout": 2, "version": 1} for event in told)
            counters = (await play.ask(wire.STATUS))["counters"]
            assert (counters["kv_refused:layout"], counters["kv_refused:version"]) == (8, 4)

    run()


def test_a_killed_tool_worker_loses_no_trajectory(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, spec(roles={"rollout": 2, "tool": 2})) as play:

            async def whole(trajectory: str) -> None:
                await play.first(trajectory)
                for turn in range(5):
                    await play.turn(trajectory, turn, turn % 2, 0.05)
                play.driver.end(trajectory, None)

            plays = [asyncio.create_task(whole(f"g{n}m0")) for n in range(40)]
            await asyncio.sleep(0.2)
            await kill_worker(play, await play.ask(wire.STATUS), "tool-0")
            await asyncio.gather(*plays)
            await play.until("lost", worker="tool-0", role="tool")
            await play.until("role", 2, worker="tool-0", state="ready")

    run()


async def kill_worker(play: Play, status: dict[str, Any], name: str) -> None:
    (pid,) = (await play.client.run(os.getpid, workers=[status["roles"][name]["address"]])).values()
    os.kill(pid, signal.SIGKILL)


def test_tasks_of_a_run_that_does_not_hold_the_cluster_run_nowhere(address: str) -> None:
    @awaited
    async def run() -> None:
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            stray = client.submit(where, key="rollout-000000-deadbeef-g0m0-0-0")
            guest = client.submit(where, pure=False)
            await guest
            status = await client.scheduler.get_task_status(keys=[stray.key])
            assert status == {stray.key: "no-worker"}

    run()


def test_workers_of_a_plain_dask_cluster_take_roles_and_take_them_again_after_their_nanny_restarts_them() -> None:
    @awaited
    async def run() -> None:
        async with LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=None,
            scheduler_kwargs={"preload": ["cluster_parts"]},
            asynchronous=True,
        ) as plain:
            one_each = spec(buckets=[[1, None, 1]], roles={"rollout": 1, "tool": 1}, policy={"kind": "context_bounds"})
            async with playing(plain.scheduler_address, one_each) as play:
                assert any("got their roles by name: 0 → rollout (tp 1), 1 → tool" in n for n in play.reply["notes"])
                assert any("rollout worker 0 has 1 thread(s)" in note for note in play.reply["notes"])
                assert (await play.first("g0m0"))["worker"] == "0"
                await kill_worker(play, await play.ask(wire.STATUS), "0")
                assert (await play.turn("g0m0", 0, 0))["worker"] == "0"
                await play.until("lost", worker="0", role="rollout")

    run()


def test_a_scheduler_without_the_plugin_is_refused_with_the_line_that_mends_it() -> None:
    @awaited
    async def run() -> None:
        async with (
            LocalCluster(n_workers=0, processes=False, dashboard_address=None, asynchronous=True) as plain,
            Client(plain, asynchronous=True) as client,
        ):
            with pytest.raises(ClusterError, match=r"dask scheduler --preload libra\.scheduler_plugin\.preload"):
                await check(client)

    run()


def test_attaching_to_a_scheduler_that_is_not_there_says_so() -> None:
    @awaited
    async def run() -> None:
        with pytest.raises(ClusterError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
            async with attached("tcp://127.0.0.1:9", seconds=0.5):
                pass

    run()


def test_attaching_to_a_cluster_with_the_plugin(address: str) -> None:
    @awaited
    async def run() -> None:
        async with attached(address) as client:
            assert (await check(client))["workers"] == 4

    run()


def test_no_process_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from cluster_parts import label_cluster
cluster = label_cluster({{"rollout": 1, "tool": 1}}, logs=__import__("pathlib").Path({str(tmp_path)!r}))
print("up", flush=True)
time.sleep(3600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=TESTS, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        below = psutil.Process(launcher.pid).children(recursive=True)
        assert len(below) == 3
    finally:
        launcher.kill()
        launcher.wait(10)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive


def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No module named 'no_such_preload'"):
        LibraLocalCluster({"tool": 1}, preload="no_such_preload", logs=tmp_path)
