"""Staged KV outlives the engine that computed it and its worker's role: trajectories of a real vLLM engine that was
killed, and of one that had to make room for a trainer, go on elsewhere with the KV that they had."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_parts import Play, playing
from move_parts import environment_of, form_of, moves_spec, play_one, rambling_weights, rewards
from vllm_parts import VLLM

from libra.pipeline.ledger.draft import Draft
from libra.resources import wire
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.kv.arena import Arena
from libra.resources.kv.ownership import SHARED_MEMORY, arena_path
from libra.resources.tags import Role, capability
from libra.resources.types import WeightVersion
from libra.resources.types.run import RunSpec

pytestmark = [*VLLM, pytest.mark.cluster, pytest.mark.timeout(900)]
COUNT = 24
HOMES = ("rollout-0", "rollout-1", "rollout-2")


class VersatileCluster(LibraLocalCluster):
    """Rollout workers may train, too."""

    def _worker(self, role: Role, slots: int) -> dict[str, Any]:
        made = super()._worker(role, slots)
        if role == "rollout":
            made["options"]["options"]["resources"][capability("train")] = 1
        return made


def test_trajectories_of_a_killed_engine_and_of_a_changed_role_take_their_kv_along(tmp_path: Path) -> None:
    run = moves_spec(
        tmp_path,
        inline=False,
        run="0bad1055",
        buckets=[[1, None, 3]],
        roles={"rollout": 3, "tool": 1, "reward": 0, "train": 0},
        policy={"kind": "move_parts:AtHome"},
        trainer={"kind": "scripted"},
        pool={"backoff": 600.0, "backoff_most": 600.0},
    )
    with VersatileCluster({"rollout": 3, "tool": 1}, dashboard=False) as cluster:
        asyncio.run(asyncio.wait_for(check(str(cluster.scheduler_address), run, rambling_weights(tmp_path)), 600))


async def check(address: str, run: RunSpec, weights: WeightVersion) -> None:
    async with playing(address, run, version=None) as claim:
        await claim.ask(wire.SET_WEIGHTS, version=weights.version, path=weights.path, digest=weights.digest)
        await claim.until("role", count=3, role="rollout", state="ready")
        undisturbed = rewards(run, await asyncio.gather(*played(claim, run, member=0)))
        halfway, go = Halfway(), asyncio.Event()
        tasks = [asyncio.create_task(one) for one in played(claim, run, member=1, pause=halfway.until(go))]
        await until(lambda: len(halfway.drafts) + sum(task.done() for task in tasks) == COUNT)
        for home in HOMES:  # what they have computed is staged
            with Arena(arena_path(run.run, home)) as arena:
                staged = len([draft for draft in halfway.drafts if home_of(draft) == home])
                await until(lambda arena=arena, staged=staged: holds(arena) == (staged, 0))
        await kill_core(claim, "rollout-1")
        await claim.until("lost", worker="rollout-1")
        await claim.ask(wire.SET_ROLE, worker="rollout-2", role="train")
        await claim.until("role", worker="rollout-2", role="train", state="ready")
        go.set()
        drafts = await asyncio.gather(*tasks)
        assert rewards(run, drafts) == undisturbed
        moved = [draft for draft in halfway.drafts if home_of(draft) != "rollout-0"]
        assert {home_of(draft) for draft in moved} == {"rollout-1", "rollout-2"}
        for draft in moved:
            (_, first), (_, second), *_ = draft.steps
            assert second.migration is not None
            found = second.migration
            assert (found.way, found.source, found.target) == ("load", home_of(draft), "rollout-0")
            assert second.cached >= 0.95 * first.staged > 0
        counters = (await claim.ask(wire.STATUS))["counters"]
        assert counters["kv:load"] == len(moved)
        assert not [event for event in claim.events if event["event"] in ("alarm", "unbound", "residence")]
        # Ended trajectories leave nothing, wherever it lay; the arenas are there until the run ends.
        for home in HOMES:
            with Arena(arena_path(run.run, home), writable=True) as arena:
                await until(lambda arena=arena: holds(arena) == (0, 0))
                assert arena.audit() == []
    assert not list(SHARED_MEMORY.glob(f"libra-{run.run}-kv-*"))


class Halfway:
    """The trajectories that have come to their first call of a tool."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []

    def until(self, go: asyncio.Event) -> Callable[[Draft], Any]:
        async def pause(draft: Draft) -> None:
            if len(draft.steps) == 1:
                self.drafts.append(draft)
                await go.wait()

        return pause


def played(claim: Play, run: RunSpec, member: int, **options: Any) -> list[Any]:
    """All trajectories, not awaited yet."""
    environment, form = environment_of(run), form_of(claim, run)
    return [play_one(claim, run, form, environment, number, member, **options) for number in range(COUNT)]


def home_of(draft: Draft) -> str:
    """The instance of its first segment."""
    return draft.steps[0][1].instance


def holds(arena: Arena) -> tuple[int, int]:
    """Entries that are whole, and that are being written."""
    stats = arena.stats()
    return stats.entries, stats.writing


async def kill_core(claim: Play, worker: str) -> None:
    """kill -9 of the EngineCore of a worker's engine."""
    address = (await claim.ask(wire.STATUS))["roles"][worker]["address"]
    (pid,) = (await claim.client.run(os.getpid, workers=[address])).values()
    parts = psutil.Process(pid).children(recursive=True)
    (core,) = [part for part in parts if "EngineCore" in " ".join(part.cmdline())]
    core.kill()


async def until(condition: Callable[[], bool]) -> None:
    """The test's own deadline ends what never comes true."""
    while not condition():
        await asyncio.sleep(0.02)
