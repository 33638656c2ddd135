"""C-MLFQ on two real vLLM instances of TP 1 and TP 2: it learns from what ends, moves what it expects to outgrow its
bucket while it is still short, KV included, and what it has learned is in the run's folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cluster_parts import playing
from move_parts import environment_of, form_of, moves_spec, play_one, rambling_weights
from vllm_parts import VLLM

from libra.pipeline.ledger.draft import Draft
from libra.resources import wire
from libra.resources.batches import BatchReader, write_batch
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.types import Migration, RequestRecord
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.cmlfq.policy import CMlfq

pytestmark = [*VLLM, pytest.mark.cluster, pytest.mark.timeout(900)]
COUNT = 96
WAVE = 24
"""Trajectories at a time: what the first of them show, the later ones use."""
BOUND = 50
"""Of the bucket of TP 1, in tokens: most trajectories that call the tool twice outgrow it."""
SLOTS = 4


def played(address: str, run: RunSpec, folder: Path) -> tuple[list[Draft], dict[str, Any]]:
    """All trajectories, wave after wave, and the plugin's status at the end."""
    found: list[tuple[list[Draft], dict[str, Any]]] = []

    async def play() -> None:
        weights, environment = rambling_weights(folder), environment_of(run)
        async with playing(address, run, version=None) as claim:
            fields = {"version": weights.version, "path": weights.path, "digest": weights.digest}
            await claim.ask(wire.SET_WEIGHTS, **fields)
            await claim.until("role", count=2, role="rollout", state="ready")
            form, drafts = form_of(claim, run), []
            for first in range(0, COUNT, WAVE):
                wave = (play_one(claim, run, form, environment, n) for n in range(first, first + WAVE))
                drafts += await asyncio.gather(*wave)
            assert not [event for event in claim.events if event["event"] in ("alarm", "unbound", "lost")]
            while (status := await claim.ask(wire.STATUS))["trajectories"]:
                await asyncio.sleep(0.02)
            found.append((drafts, status))

    asyncio.run(asyncio.wait_for(play(), 600))
    return found[0]


def test_cmlfq_learns_and_moves_trajectories_with_their_kv(tmp_path: Path) -> None:
    run = moves_spec(
        tmp_path,
        inline=True,
        engine={"kind": "vllm", "slots": SLOTS, "max_context": 240, "kv_arena": 64 * 2**20},
        buckets=[[1, BOUND, 1], [2, None, 1]],
        policy={"kind": "cmlfq"},
        temperature=1.0,
    )
    with LibraLocalCluster({"rollout": 2}, dashboard=False) as cluster:
        drafts, status = played(str(cluster.scheduler_address), run, tmp_path)

    for instance in status["instances"].values():
        assert instance["kv_room"]["tokens"] >= SLOTS * 240
        assert instance["kv_room"]["bytes_per_token"] > 0
    shown = status["policy"]
    assert shown["learned"] == COUNT
    assert shown["decided predicted"] > 0
    early = [move for draft in drafts for context, move in moves_of(draft) if context <= BOUND]
    loaded = [move for move in early if move.way == "load"]
    assert loaded
    for move in loaded:
        assert move.bytes > 0
        assert move.seconds > 0
        # On one node: the policy's estimates, for the instances have told what their KV takes.
        assert move.expected == move.fetching is not None
        assert move.prefilling is not None
    assert shown["host_bandwidth"] != CMlfq({}).metrics()["host_bandwidth"]  # it follows what these moves took

    kept = CMlfq({})
    kept.relearn((tmp_path / "policy.bin").read_bytes(), 1.0)
    tree = kept.tree
    assert tree.everywhere.evidence(tree.now, tree.half_life) == pytest.approx(COUNT, rel=0.05)

    finished = [draft.finish(0.0, None, {}, 0.0) for draft in drafts]
    write_batch(tmp_path / "batch.zarr", finished, {})
    records = BatchReader(tmp_path / "batch.zarr").records("hop")
    assert records == [RequestRecord.of_trajectory(trajectory, "hop") for trajectory in finished]
    assert sum(record.queue_seconds for record in records) > 0
    assert {tp for record in records for tp in record.residence} == {1, 2}
    assert [m for record in records for m in record.migrations] == [m for draft in drafts for _, m in moves_of(draft)]


def moves_of(draft: Draft) -> list[tuple[int, Migration]]:
    """The context at each move of a trajectory, and how its KV came."""
    segments = [segment for _, segment in draft.steps]
    return [(segment.context, segment.migration) for segment in segments if segment.migration is not None]
