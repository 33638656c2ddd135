"""Trajectories move between two real vLLM instances of TP 1 and TP 2, on Dask workers of their own, and take their KV
along: nothing of what they sample changes."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster_parts import playing
from move_parts import moves_spec, play_all, rambling_weights, rewards
from throttled_link import SECONDS
from vllm_parts import VLLM

from libra.pipeline.ledger.draft import Draft
from libra.resources import wire
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.kv.ownership import SHARED_MEMORY
from libra.resources.tags import Role
from libra.resources.types import Migration, Segment, WeightVersion
from libra.resources.types.run import RunSpec

pytestmark = [*VLLM, pytest.mark.cluster, pytest.mark.timeout(1200)]
COUNT = 64
DRAINED_AT = 0.62
RUN = "0bad30e5"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LibraLocalCluster({"rollout": 2, "tool": 1}, dashboard=False) as cluster:
        yield str(cluster.scheduler_address)


class ApartCluster(LibraLocalCluster):
    """Each worker says that it is on a node of its own, and the link between them is slow."""

    def _worker(self, role: Role, slots: int) -> dict[str, Any]:
        worker = super()._worker(role, slots)
        options = worker["options"]["options"]
        options["resources"][f"node:{secrets.token_hex(4)}"] = 1
        options["preload"] = [*options["preload"], "throttled_link"]
        return worker


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> WeightVersion:
    return rambling_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def alone(address: str, weights: WeightVersion, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The rewards of two waves on a single instance that stages nothing."""
    run = moves_spec(
        tmp_path_factory.mktemp("alone"),
        inline=True,
        run=RUN,
        engine={"kind": "vllm", "slots": 32, "max_context": 240},
        buckets=[[1, None, 1]],
        roles={"rollout": 1, "tool": 0, "reward": 0, "train": 0},
        policy={"kind": "context_bounds"},
    )
    waves, _ = played(address, run, weights, waves=2)
    drafts = [draft for wave in waves for draft in wave]
    assert not moved(drafts)
    return rewards(run, drafts)


def played(
    address: str, run: RunSpec, weights: WeightVersion, waves: int = 1, drains: str | None = None
) -> tuple[list[list[Draft]], dict[str, Any]]:
    """So many ``waves`` of trajectories, one after the other, and the plugin's counters after the first. The worker
    ``drains`` loses its role in the middle of the last."""
    found: list[list[Draft]] = []
    counters: dict[str, Any] = {}

    async def play() -> None:
        async with playing(address, run, version=None) as claim:
            fields = {"version": weights.version, "path": weights.path, "digest": weights.digest}
            await claim.ask(wire.SET_WEIGHTS, **fields)
            await claim.until("role", count=run.roles["rollout"], role="rollout", state="ready")
            for wave in range(waves):
                done = claim.driver.results + claim.driver.segments
                wave_task = asyncio.create_task(play_all(claim, run, COUNT, first=wave * COUNT))
                if drains is not None and wave == waves - 1:
                    # Of a wave, so that the slower instance is in the middle of its half whatever the other has done.
                    while claim.driver.results + claim.driver.segments < done + DRAINED_AT * done / wave:
                        await asyncio.sleep(0.01)
                    await claim.ask(wire.SET_ROLE, worker=drains, role=None)
                found.append(await wave_task)
                if wave == 0:
                    counters.update((await claim.ask(wire.STATUS))["counters"])
            assert not [event for event in claim.events if event["event"] in ("alarm", "unbound", "lost")]

    asyncio.run(asyncio.wait_for(play(), 900))
    return found, counters


@dataclass(frozen=True)
class Moved:
    """A segment after a move: the segment ``before`` it, and whether the instance had ``seen`` the trajectory."""

    before: Segment
    after: Segment
    seen: bool

    @property
    def migration(self) -> Migration:
        """How its KV came."""
        assert self.after.migration is not None
        return self.after.migration


def moved(drafts: list[Draft]) -> list[Moved]:
    """The segments whose worker has told of a move."""
    found = []
    for draft in drafts:
        segments = [segment for _, segment in draft.steps]
        for number, after in enumerate(segments):
            if after.migration is not None:
                earlier = segments[:number]
                seen = any(segment.instance == after.instance for segment in earlier)
                found.append(Moved(earlier[-1], after, seen))
    return found


@pytest.mark.parametrize("inline", [False, True], ids=["pairs", "residences"])
def test_moved_trajectories_take_their_kv_along_and_earn_what_they_earn_alone(
    address: str, weights: WeightVersion, alone: list[float], tmp_path: Path, inline: bool
) -> None:
    """In a second wave an instance is drained, which stages what it cuts short; the other one goes on from there."""
    run = moves_spec(tmp_path, inline, run=RUN)
    (drafts, drained), counters = played(address, run, weights, waves=2, drains="rollout-1")
    assert rewards(run, [*drafts, *drained]) == alone
    check_moves(drafts, counters)
    check_drained(drained)
    assert not list(SHARED_MEMORY.glob(f"libra-{RUN}-kv-*"))  # the run has ended, and the arenas with it


def check_moves(drafts: list[Draft], counters: dict[str, Any]) -> None:
    movers = [draft for draft in drafts if len({segment.instance for _, segment in draft.steps}) > 1]
    assert len(movers) >= COUNT // 4
    moves = moved(drafts)
    assert len(moves) == counters.get("kv:load", 0) + counters.get("kv:prefill", 0)
    for move in moves:
        assert (move.migration.source, move.migration.target) == (move.before.instance, move.after.instance)
        assert move.migration.seconds > 0
        assert (move.migration.way == "load") == (move.migration.bytes > 0)
    # An instance that has seen the trajectory may have the beginning of its KV in its own cache still.
    new = [move for move in moves if not move.seen]
    assert sum(move.migration.tokens for move in new if move.migration.way == "load") >= share(new)
    reused = [(move.seen, move.before.staged, move.after.cached, move.migration) for move in moves]
    assert sum(move.after.cached for move in moves) >= share(moves), reused


def check_drained(drafts: list[Draft]) -> None:
    cut = [move for move in moved(drafts) if move.before.finish == "abort" and len(move.before.tokens)]
    assert cut
    for move in cut:
        assert (move.migration.source, move.migration.target) == ("rollout-1", "rollout-0")
    # All but the last token, whose KV nobody has computed.
    assert sum(move.after.cached for move in cut) >= 0.95 * sum(move.after.context - 1 for move in cut)


def test_between_nodes_kv_is_fetched_or_computed_and_nothing_else_changes(
    weights: WeightVersion, alone: list[float], tmp_path: Path
) -> None:
    run = moves_spec(tmp_path, inline=True, run=RUN)
    with ApartCluster({"rollout": 2}, dashboard=False) as cluster:
        (drafts,), counters = played(str(cluster.scheduler_address), run, weights)
    assert rewards(run, drafts) == alone[:COUNT]
    moves = [move.migration for move in moved(drafts)]
    ways = Counter(move.way for move in moves)
    assert ways == {way: counters[f"kv:{way}"] for way in ways}
    assert not ways["load"]
    # The first fetch shows how slow the link is; from then on computing is the cheaper.
    fetched = [move for move in moves if move.way == "fetch"]
    assert fetched
    assert min(move.seconds for move in fetched) >= SECONDS
    chosen = [move for move in moves if move.way == "prefill" and move.fetching and move.prefilling]
    assert [move for move in chosen if move.prefilling < move.fetching]


def share(moves: list[Moved]) -> float:
    """95 % of the tokens that were staged before these moves."""
    assert moves
    return 0.95 * sum(move.before.staged for move in moves)
