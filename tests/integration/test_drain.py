"""A busy rollout role is taken away: its requests are cut short, and their turns go on elsewhere with the tokens that
they have; nothing is sampled twice and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_parts import awaited
from cluster_parts import Play, playing
from move_parts import moves_spec, play_all, rambling_weights, rewards

from libra.pipeline.ledger.draft import Draft
from libra.resources import wire
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.types import WeightVersion
from libra.resources.types.run import RunSpec

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
COUNT = 24
ENGINE = {"kind": "random", "slots": 64, "max_context": 240, "options": {"vocab": 480, "step_seconds": "20 ms"}}
"""A token depends on the trajectory and its position alone, and a turn takes a while."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LibraLocalCluster({"rollout": 2, "tool": 1}, dashboard=False) as cluster:
        yield str(cluster.scheduler_address)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> WeightVersion:
    return rambling_weights(tmp_path_factory.mktemp("weights"))


def busy_spec(folder: Path, inline: bool) -> RunSpec:
    two_of_a_kind: dict[str, Any] = {"buckets": [[1, None, 2]], "policy": {"kind": "context_bounds"}}
    return moves_spec(folder, inline, engine=ENGINE, temperature=1.0, **two_of_a_kind)


async def start(play: Play, weights: WeightVersion) -> None:
    await play.ask(wire.SET_WEIGHTS, version=weights.version, path=weights.path, digest=weights.digest)
    await play.until("role", count=2, role="rollout", state="ready")


@pytest.mark.parametrize("inline", [False, True], ids=["pairs", "residences"])
def test_a_drained_instance_s_turns_go_on_elsewhere_as_if_nothing_had_happened(
    address: str, weights: WeightVersion, tmp_path: Path, inline: bool
) -> None:
    run = busy_spec(tmp_path, inline)

    @awaited
    async def check() -> None:
        async with playing(address, run, version=None) as play:
            await start(play, weights)
            whole = await play_all(play, run, COUNT)
        async with playing(address, run, version=None) as play:
            await start(play, weights)
            playing_all = asyncio.create_task(play_all(play, run, COUNT))
            while play.driver.results + play.driver.segments < COUNT:
                await asyncio.sleep(0.01)
            await play.ask(wire.SET_ROLE, worker="rollout-0", role=None)
            drained = await playing_all
            assert rewards(run, drained) == rewards(run, whole)
            (idle,) = await play.until("role", worker="rollout-0", state="idle")
            assert idle["error"] is None  # its deadline did not end it
            assert not [event for event in play.events if event["event"] in ("alarm", "unbound", "lost", "residence")]
        assert cut_short(drained)
        for draft, other in zip(drained, whole, strict=True):
            assert draft.finish(1.0, None, {}, 0.0).turns == len(other.steps)
            np.testing.assert_array_equal(draft.context, other.context)

    check()


def cut_short(drafts: list[Draft]) -> list[int]:
    """Tokens of the segments that were cut short with some."""
    segments = [segment for draft in drafts for _, segment in draft.steps if segment.finish == "abort"]
    assert {segment.instance for segment in segments} <= {"rollout-0"}
    return [len(segment.tokens) for segment in segments if len(segment.tokens)]
