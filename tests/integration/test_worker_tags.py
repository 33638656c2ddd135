"""What a worker offers can change while tasks run: none is lost, none is stuck."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from child_parts import awaited
from distributed import Event, get_worker
from worker_harness import Cluster, cluster, until

from libra.resources import wire

pytestmark = pytest.mark.cluster


def offer(c: Cluster, index: int, resources: dict[str, float]) -> None:
    """What the scheduler plugin does on its side: its books, the message, the recalls, the tasks that wait."""
    s, address = c.scheduler, c.workers[index].address
    ws = s.workers[address]
    used = dict(ws.used_resources)
    s.add_resources(address, resources)
    ws.used_resources.update({tag: used.get(tag, 0) for tag in resources})
    c.send(index, wire.RETAG, resources=resources, stimulus_id="test-retag")
    for task in list(ws.processing):
        if any(resources.get(tag, 0) < amount for tag, amount in (task.resource_restrictions or {}).items()):
            c.send(index, wire.RECALL, key=task.key, stimulus_id="test-recall")
    s.transitions(s.bulk_schedule_unrunnable_after_adding_worker(ws), "test-wake")


async def hold(number: int) -> str:
    """Runs until the test says go."""
    await Event("go").wait()
    return str(get_worker().name)


async def quick(number: int) -> str:
    return str(get_worker().name)


async def begun(c: Cluster, index: int, count: int) -> None:
    await until(lambda: len(c.workers[index].state.executing) == count, f"{count} tasks to run")


@awaited
async def test_a_task_that_no_worker_could_take_runs_once_one_offers_its_tag() -> None:
    async with cluster() as c:
        future = c.client.submit(quick, 0, resources={"rollout:tp1": 1})
        await until(lambda: len(c.scheduler.unrunnable) == 1, "the task to wait")
        offer(c, 0, {"rollout:tp1": 2})
        assert await asyncio.wait_for(future, 60) == "a"


@awaited
async def test_a_task_that_waits_on_the_worker_begins_when_the_tag_grows() -> None:
    async with cluster() as c:
        offer(c, 0, {"rollout:tp1": 1})
        futures = c.client.map(hold, range(3), resources={"rollout:tp1": 1})
        await until(lambda: len(c.workers[0].state.constrained) == 2, "two tasks to wait for the tag")
        offer(c, 0, {"rollout:tp1": 3})
        await begun(c, 0, 3)
        await Event("go").set()
        assert await asyncio.wait_for(c.client.gather(futures), 60) == ["a"] * 3
        assert c.workers[0].state.available_resources["rollout:tp1"] == 3


@awaited
async def test_tasks_that_have_not_begun_go_elsewhere_when_the_tag_goes() -> None:
    async with cluster(workers=2) as c:
        offer(c, 0, {"rollout:tp1": 2})
        futures = c.client.map(hold, range(6), resources={"rollout:tp1": 1})
        await until(lambda: len(c.workers[0].state.constrained) == 4, "four tasks to wait for the tag")
        offer(c, 0, {"rollout:tp1": 0, "train": 1})
        # Those that wait are called back; those that run go on; the other tag is not stuck behind either.
        assert await asyncio.wait_for(c.client.submit(quick, 0, resources={"train": 1}), 60) == "a"
        await until(lambda: len(c.scheduler.unrunnable) == 4, "four tasks to come back")
        assert len(c.workers[0].state.executing) == 2
        offer(c, 1, {"rollout:tp1": 8})
        await begun(c, 1, 4)
        await Event("go").set()
        assert sorted(await asyncio.wait_for(c.client.gather(futures), 60)) == ["a"] * 2 + ["b"] * 4
        state = c.workers[0].state
        assert state.available_resources["rollout:tp1"] == 0
        assert state.available_resources["train"] == 1


@awaited
async def test_tags_that_swap_all_the_time_lose_no_task_and_run_none_in_a_wrong_place() -> None:
    async with cluster(workers=2) as c:
        tags = ("rollout:tp1", "train")
        futures: list[Any] = []
        for turn in range(25):
            for index in (0, 1):
                mine = tags[(turn + index) % 2]
                offer(c, index, {tag: 4.0 if tag == mine else 0.0 for tag in tags})
            for tag in tags:
                keys = [f"checked-{turn}-{tag}-{number}" for number in range(10)]
                futures += c.client.map(checked, keys, key=keys, tag=tag, resources={tag: 1})
            await asyncio.sleep(0.02)
        assert set(await asyncio.wait_for(c.client.gather(futures), 60)) == {True}
        assert len(futures) == 500


async def checked(key: str, tag: str) -> bool:
    """Whether the worker offers ``tag`` as the body begins."""
    worker = get_worker()

    async def offers() -> bool:
        return bool(worker.state.total_resources[tag] > 0)

    return await worker.extensions[wire.EXTENSION].bodies.run(key, offers)
