"""What a bucket policy learned outlives its run: through the plugin, real processes and files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from child_parts import awaited
from cluster_parts import Play, label_cluster, playing, spec

from libra.resources.errors import ConfigError
from libra.resources.types import Bucket, ToolState
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.learned import load
from libra.scheduler_plugin.policy import FinishedTrajectory, PlacementRequest, load_policy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

OK = ToolState("search", 0, "ok")
BUCKETS = [Bucket(1, 4096), Bucket(2, None)]


def run_spec(folder: Path, **changes: object) -> RunSpec:
    return spec(run_dir=str(folder), buckets=[[1, 4096, 1], [2, None, 1]], policy={"kind": "cmlfq"}, **changes)


def learned_from(file: Path) -> CMlfq:
    """A policy that knows what ``file`` says."""
    policy = CMlfq({})
    policy.relearn(file.read_bytes(), 1.0)
    return policy


async def finish(play: Play, trajectory: str, final: int | None) -> None:
    await play.first(trajectory)
    await play.turn(trajectory, 0, 0)
    play.driver.end(trajectory, final)


def test_what_a_run_learns_is_in_its_folder_when_it_ends_and_a_resumed_run_goes_on_from_it(tmp_path: Path) -> None:
    @awaited
    async def play_twice() -> None:
        with label_cluster({"rollout": 2, "tool": 1}) as cluster:
            for attempt in (1, 2):
                async with playing(cluster.scheduler_address, run_spec(tmp_path)) as play:
                    await asyncio.gather(*(finish(play, f"g{attempt}m{n}", 130) for n in range(4)))
                    await finish(play, f"g{attempt}m9", None)  # failed: teaches nothing
                tree = learned_from(tmp_path / "policy.bin").tree
                node = (tree.everywhere.children or {})[tree.names([OK])[0]]
                assert node.evidence(tree.now, tree.half_life) == pytest.approx(4 * attempt, rel=0.01)

    play_twice()
    assert [file.name for file in tmp_path.iterdir()] == ["policy.bin"]


def taught(folder: Path) -> Path:
    """A file of a policy that has seen four trajectories of prompt ``p1``."""
    policy = CMlfq({})
    for member in range(4):
        name = f"g0m{member}"
        policy.place(PlacementRequest(name, "p1", 100, [], None), (), BUCKETS)
        policy.place(PlacementRequest(name, "p1", 300, [OK], None), (), BUCKETS)
        policy.observe(FinishedTrajectory(name, "p1", 9_000, [OK]))
    file = folder / "other.bin"
    file.write_bytes(policy.learned())
    return file


def test_a_new_run_learns_from_others_and_its_own_file_comes_first(tmp_path: Path) -> None:
    other, run = taught(tmp_path), tmp_path / "run"
    run.mkdir()
    first = load_policy({"kind": "cmlfq"})
    assert load(first, run_spec(run, learn_from=[str(other)], learn_keep=0.5)) == []
    assert isinstance(first, CMlfq)
    assert first.tree.everywhere.evidence(first.tree.now, first.tree.half_life) == pytest.approx(2.0, rel=0.01)
    (run / "policy.bin").write_bytes(CMlfq({}).learned())
    second = load_policy({"kind": "cmlfq"})
    assert load(second, run_spec(run, learn_from=[str(other)])) == []
    assert isinstance(second, CMlfq)
    assert second.tree.everywhere.evidence(second.tree.now, second.tree.half_life) == 0.0


def test_a_damaged_own_file_is_left_out_with_a_note_and_a_named_one_is_an_error(tmp_path: Path) -> None:
    other = taught(tmp_path)
    (tmp_path / "policy.bin").write_bytes(other.read_bytes()[:-1])
    [note] = load(CMlfq({}), run_spec(tmp_path))
    assert "policy.bin" in note and "left out" in note
    (tmp_path / "policy.bin").unlink()
    for wrong in ("nowhere.bin", "short.bin"):
        (tmp_path / "short.bin").write_bytes(other.read_bytes()[:50])
        with pytest.raises(ConfigError, match=f"policy.learn_from names .*{wrong}"):
            load(CMlfq({}), run_spec(tmp_path, learn_from=[str(tmp_path / wrong)]))
    with pytest.raises(ConfigError, match="ContextBounds learns nothing"):
        load(load_policy({"kind": "context_bounds"}), run_spec(tmp_path, learn_from=[str(other)]))
