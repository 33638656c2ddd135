"""Trajectories move between two real vLLM instances of TP 1 and TP 2, on Dask workers of their own, and take their KV
along: nothing of what they sample changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_parts import playing
from move_parts import moves_spec, play_all, rambling_weights, rewards
from vllm_parts import VLLM

from libra.pipeline.ledger.draft import Draft
from libra.resources import wire
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.kv.ownership import SHARED_MEMORY
from libra.resources.types import Migration, WeightVersion
from libra.resources.types.run import RunSpec

pytestmark = [*VLLM, pytest.mark.cluster, pytest.mark.timeout(1200)]
COUNT = 64
RUN = "0badcafe"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LibraLocalCluster({"rollout": 2, "tool": 1}, dashboard=False) as cluster:
        yield str(cluster.scheduler_address)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> WeightVersion:
    return rambling_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def alone(address: str, weights: WeightVersion, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The rewards of a run on a single instance that stages nothing."""
    run = moves_spec(
        tmp_path_factory.mktemp("alone"),
        inline=True,
        engine={"kind": "vllm", "slots": 32, "max_context": 240},
        buckets=[[1, None, 1]],
        roles={"rollout": 1, "tool": 0, "reward": 0, "train": 0},
        policy={"kind": "context_bounds"},
    )
    drafts, _ = played(address, run, weights)
    assert not migrations(drafts)
    return rewards(run, drafts)


def played(address: str, run: RunSpec, weights: WeightVersion) -> tuple[list[Draft], dict[str, Any]]:
    """All trajectories of a run, and the plugin's counters at its end."""
    found: list[tuple[list[Draft], dict[str, Any]]] = []

    async def play() -> None:
        async with playing(address, run, version=None) as claim:
            fields = {"version": weights.version, "path": weights.path, "digest": weights.digest}
            await claim.ask(wire.SET_WEIGHTS, **fields)
            await claim.until("role", count=run.roles["rollout"], role="rollout", state="ready")
            drafts = await play_all(claim, run, COUNT)
            assert not [event for event in claim.events if event["event"] in ("alarm", "unbound", "lost")]
            found.append((drafts, (await claim.ask(wire.STATUS))["counters"]))

    asyncio.run(asyncio.wait_for(play(), 900))
    return found[0]


def migrations(drafts: list[Draft]) -> list[tuple[int, Migration]]:
    """How each moved segment's KV came, with the tokens that were staged at the end of the segment before."""
    return [
        (before.staged, after.migration)
        for draft in drafts
        for (_, before), (_, after) in zip(draft.steps, draft.steps[1:], strict=False)
        if after.migration is not None
    ]


@pytest.mark.parametrize("inline", [False, True], ids=["pairs", "residences"])
def test_moved_trajectories_take_their_kv_along_and_earn_what_they_earn_alone(
    address: str, weights: WeightVersion, alone: list[float], tmp_path: Path, inline: bool
) -> None:
    run = moves_spec(tmp_path, inline)
    drafts, counters = played(address, run, weights)
    assert rewards(run, drafts) == alone
    moves = [draft for draft in drafts if len({segment.instance for _, segment in draft.steps}) > 1]
    assert len(moves) >= COUNT // 4
    told = migrations(drafts)
    assert len(told) == counters.get("kv:load", 0) + counters.get("kv:prefill", 0)
    assert sum(move.tokens for _, move in told if move.way == "load") >= 0.95 * sum(staged for staged, _ in told) > 0
    for _, move in told:
        assert {move.source, move.target} == {"rollout-0", "rollout-1"}
        assert move.way != "load" or (move.seconds > 0 and move.bytes > 0)
    assert not list(SHARED_MEMORY.glob(f"libra-{RUN}-kv-*"))  # the roles have ended, and their arenas with them
