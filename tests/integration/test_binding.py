"""Late binding on a real cluster of label-only workers: right tags, right workers, and nothing runs unbound."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from child_parts import awaited
from cluster_parts import WEIGHTS, Play, label_cluster, playing, spec, tag_of, where
from distributed import Client

from libra.resources import wire

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with label_cluster({"rollout": 2, "tool": 2, "reward": 1, "train": 1}) as cluster:
        yield cluster.scheduler_address


async def chain(play: Play, trajectory: str, sizes: list[int], seconds: float = 0.0) -> list[tuple[dict, int]]:  # type: ignore[type-arg]
    await play.first(trajectory)
    found = [(await play.turn(trajectory, turn, size, seconds), size) for turn, size in enumerate(sizes)]
    play.driver.end(trajectory, None)
    return found


def test_2000_of_2000_continuations_run_under_the_tag_that_the_policy_maps_their_tool_state_to(address: str) -> None:
    @awaited
    async def run() -> None:
        draw = random.Random(5)
        async with playing(address, spec()) as play:
            plays = [chain(play, f"g{n}m0", [draw.choice((0, 1)) for _ in range(4)]) for n in range(500)]
            found = [each for chained in await asyncio.gather(*plays) for each in chained]
            assert len(found) == 2000
            for result, size in found:
                assert result["size"] == size
                assert result["tag"] == result["role"] == tag_of(size)
                assert result["offered"] >= 1
            assert not [event for event in play.events if event["event"] in ("alarm", "unbound", "lost")]
            await asyncio.sleep(0.1)
            left = await play.ask(wire.STATUS)
            assert (left["tasks"], left["trajectories"]) == (0, 0)
            assert left["counters"]["bound"] == 2500

    run()


def test_a_failing_policy_becomes_an_unbound_event_within_its_deadline_and_nothing_runs(address: str) -> None:
    @awaited
    async def run() -> None:
        run_spec = spec(policy={"kind": "cluster_parts:FailsOn"}, bind_seconds=0.3)
        async with playing(address, run_spec) as play:
            outcomes = await asyncio.gather(
                *(chain(play, f"g{n}m0", [0, 3 if n % 2 else 1]) for n in range(20)), return_exceptions=True
            )
            failed = [str(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
            assert len(failed) == 10
            assert all("waited 0.3 s for a decision" in text and "no such bucket" in text for text in failed)
            assert (await play.until("alarm"))[0]["where"] == "policy"
            await asyncio.sleep(0.1)
            left = await play.ask(wire.STATUS)
            assert (left["tasks"], left["no_worker"]) == (0, 0)
            assert left["counters"]["alarm:policy"] == left["counters"]["unbound"] == 10

    run()


def test_a_tool_that_leaves_no_state_leaves_its_continuation_unbound(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, spec(bind_seconds=0.3)) as play:
            await play.first("g0m0")
            with pytest.raises(RuntimeError, match="ended without a tool state"):
                await play.turn("g0m0", 0, 0, silent=True)

    run()


def test_first_segments_without_a_told_context_do_not_run(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, spec(bind_seconds=0.3)) as play:
            with pytest.raises(RuntimeError, match="nobody has told the context"):
                await play.first("g0m0", context=None)  # type: ignore[arg-type]

    run()


def test_segments_are_pinned_to_the_instance_and_calls_to_the_session_of_their_trajectory(address: str) -> None:
    @awaited
    async def run() -> None:
        two_alike = spec(
            buckets=[[1, None, 2]], roles={"rollout": 2, "tool": 2}, policy={"kind": "context_bounds", "margin": 50.0}
        )
        async with playing(address, two_alike) as play:

            async def sticks(trajectory: str) -> tuple[str, str]:
                instances = {(await play.first(trajectory))["worker"]}
                instances |= {(await play.turn(trajectory, turn, 0))["worker"] for turn in range(5)}
                assert len(instances) == 1
                return instances.pop(), trajectory

            found = Counter(instance for instance, _ in await asyncio.gather(*(sticks(f"g{n}m0") for n in range(20))))
            assert set(found.values()) == {10}
            status = await play.ask(wire.STATUS)
            assert {i["sequences"] for i in status["instances"].values()} == {10}
            for n in range(20):
                play.driver.end(f"g{n}m0", None)
            await asyncio.sleep(0.1)
            status = await play.ask(wire.STATUS)
            assert {(i["sequences"], i["tokens"]) for i in status["instances"].values()} == {(0, 0)}

    run()


def test_roles_swapped_every_100_ms_lose_no_task_and_run_none_under_a_wrong_tag(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, spec(buckets=[[1, None, 1], [2, None, 1]])) as play:
            names = sorted(name for name, duty in play.reply["roles"].items() if duty["role"] == "rollout")
            done = asyncio.Event()
            swaps = 0

            async def swap() -> None:
                nonlocal swaps
                while not done.is_set():
                    for name, tp in zip(names, (1, 2) if swaps % 2 else (2, 1), strict=True):
                        await play.ask(wire.SET_ROLE, worker=name, role="rollout", tp=tp)
                    swaps += 1
                    await asyncio.sleep(0.1)

            swapping = asyncio.create_task(swap())
            draw = random.Random(7)
            plays = [chain(play, f"g{n}m0", [draw.choice((0, 1)) for _ in range(6)], 0.02) for n in range(100)]
            found = [each for chained in await asyncio.gather(*plays) for each in chained]
            done.set()
            await swapping
            assert len(found) == 600
            assert {result["worker"] for result, _ in found if result["tag"] == "rollout:tp1"} == set(names)
            for result, size in found:  # whoever runs while its worker drains still has the worker's role
                assert result["tag"] == result["role"] == tag_of(size)
            assert swaps > 5

    run()


def test_guests_never_land_on_rollout_or_train_workers_while_a_run_holds_the_cluster(address: str) -> None:
    @awaited
    async def run() -> None:
        async with Client(address, asynchronous=True, set_as_default=False) as guest:
            everywhere = spec(roles={"rollout": 2, "tool": 1, "reward": 1, "train": 1})
            async with playing(address, everywhere) as play:
                duties = {name: duty["role"] for name, duty in play.reply["roles"].items()}
                homes = await guest.gather(guest.map(where, range(300), pure=False))
                assert set(homes) == {name for name in homes if duties.get(name) not in ("rollout", "train")}
                tagged = await guest.submit(where, pure=False, workers=["rollout-0"])
                assert tagged == "rollout-0"  # a user's own restrictions stand
            homes = await guest.gather(guest.map(where, range(300), pure=False))
            assert {"rollout-0", "rollout-1", "train-0"} & set(homes)

    run()


def test_new_weights_reach_every_instance_and_one_that_cannot_load_is_taken_out(address: str) -> None:
    @awaited
    async def run() -> None:
        async with playing(address, spec(pool={"backoff": 0.05, "restarts": 1})) as play:
            await play.ask(wire.SET_WEIGHTS, version=1, **WEIGHTS)
            assert {e["worker"] for e in await play.until("weights", 2, version=1)} == {"rollout-0", "rollout-1"}
            assert (await play.ask(wire.STATUS))["weights"]["installed"]["rollout-0"] == 1
            await play.ask(wire.SET_WEIGHTS, version=2, path="/broken", digest="0")
            failures = await play.until("weights", 2, version=2)
            assert all("checksum of tensor 'embed'" in event["error"] for event in failures)
            await play.until("role", 2, state="failed")
            assert not (await play.ask(wire.STATUS))["instances"]

    run()
