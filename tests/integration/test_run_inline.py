"""Whole runs in the fused form, tools inside rollout tasks: the same trajectories as in the pair form, also while
workers change their roles, and artifacts that come from rollout workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client
from run_harness import (
    FlexibleCluster,
    PlayedRun,
    batches,
    merged,
    run_cluster,
    run_config,
    scheduler_state,
    staleness,
    trained,
    wait_until,
)

from libra.pipeline.view.events import Failed, StepTrained
from libra.resources.errors import ConfigError
from libra.resources.types import Trajectory

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

TWO: dict[str, Any] = {"buckets": [{"instances": 2}], "cluster": {"workers": {"rollout": 2}}}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with run_cluster(FlexibleCluster, rollout=2) as client:
        yield client


def played(client: Client, config: dict[str, Any], inline: bool) -> list[Trajectory]:
    """What a run trains, in order."""
    run = PlayedRun(client, merged(config, {"environment": {"inline": inline}}))
    run.fit()
    assert run.recorder.of(Failed) == []
    return [trajectory for _, batch in batches(run.folder) for trajectory in batch.trajectories()]


def test_both_forms_train_the_same(tmp_path: Path, client: Client) -> None:
    config = run_config(tmp_path / "pairs", staleness={"alpha": 0}, **TWO)
    pairs = played(client, config, inline=False)
    residences = played(client, {**config, "run_dir": str(tmp_path / "residences")}, inline=True)
    assert len(pairs) == len(residences) > 0
    assert sum(len(one.tools) for one in pairs) > 100
    for one, other in zip(pairs, residences, strict=True):
        assert (one.id, one.prompt, one.end, one.reward) == (other.id, other.prompt, other.end, other.reward)
        for field in ("tokens", "mask", "versions", "logprobs"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field), err_msg=f"{field} of {one.id}")
        assert [(t.call, t.digest) for t in one.tools] == [(t.call, t.digest) for t in other.tools]
    assert client.run_on_scheduler(scheduler_state) == {"tasks": 0, "groups": 0, "spans": 0}


def test_a_resumed_run_may_change_its_form(tmp_path: Path, client: Client) -> None:
    config = run_config(tmp_path / "run", steps=8)
    run = PlayedRun(client, config)
    with run.playing():
        wait_until("step 3", lambda: len(run.recorder.of(StepTrained)) >= 3)
    resumed = PlayedRun(client, merged(config, {"environment": {"inline": True}}), resume=True)
    assert resumed.fit()["steps"] == 8
    trained(resumed.folder)  # each member once


def test_artifacts_come_from_the_session_on_the_rollout_worker(tmp_path: Path, client: Client) -> None:
    environment = {"kind": "run_parts:CountingHop", "inline": True}
    run = PlayedRun(client, run_config(tmp_path / "run", environment=environment, **TWO))
    run.fit()
    assert run.recorder.of(Failed) == []
    found = [trajectory for _, batch in batches(run.folder) for trajectory in batch.trajectories()]
    assert any(trajectory.tools for trajectory in found)
    assert all(trajectory.artifact == {"calls": len(trajectory.tools)} for trajectory in found)


def test_an_environment_that_cannot_replay_is_refused(tmp_path: Path, client: Client) -> None:
    environment = {"kind": "run_parts:ForgetfulHop", "inline": True}
    with pytest.raises(ConfigError, match=r"environment.inline = true but ForgetfulHop is not replayable"):
        PlayedRun(client, run_config(tmp_path / "run", environment=environment)).fit()


def test_workers_that_change_roles_lose_nothing_and_make_nothing_stale(tmp_path: Path, client: Client) -> None:
    pace = {"slow_share": 0.02, "slow_factor": 10, "tokens_per_step": 8, "step_seconds": "2 ms"}
    config = run_config(
        tmp_path / "run",
        steps=1000,
        engine={"options": pace},
        environment={"inline": True},
        store={"checkpoint_every": 25},
        **TWO,
    )
    run = PlayedRun(client, config)

    with run.playing():
        run.until_trained(2)
        state = client.run_on_scheduler(scheduler_state)
        kept, leaving = sorted(name for name, role in state["roles"].items() if role == "rollout")
        coming = min({str(w["name"]) for w in client.scheduler_info()["workers"].values()} - state["roles"].keys())
        for _ in range(4):
            for worker, role in ((leaving, None), (coming, "rollout")):
                reply = client.sync(client.scheduler.libra_set_role, token=state["token"], worker=worker, role=role)
                assert reply == {}
            leaving, coming = coming, leaving
            wanted = {kept, leaving}
            wait_until("the swap", lambda now=wanted: client.run_on_scheduler(scheduler_state)["instances"] == now)
            run.until_trained(4)
    assert run.recorder.of(Failed) == []
    assert all(event.failure is None for event in run.recorder.ended().values())
    assert max(map(max, staleness(run.folder))) == 1
    assert len(trained(run.folder)) >= (2 + 4 * 4) * 2 * 4
