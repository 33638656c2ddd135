"""Staleness at consumption, read from the batches on disk: with a slow tail, at step 1 and at step 300, and while
workers change their roles. (After a resume: `chaos/test_kill_and_resume.py`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from run_harness import (
    FlexibleCluster,
    PlayedRun,
    run_cluster,
    run_config,
    scheduler_state,
    staleness,
    trained,
    wait_until,
)

from libra.pipeline.view.events import Failed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TWO = {"rollout": 2, "tool": 2}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with run_cluster(FlexibleCluster, **TWO) as client:
        yield client


def tailed(folder: Path, steps: int, batch_groups: int) -> dict[str, Any]:
    """A run with a tail: one sequence in fifty is ten times as slow."""
    pace = {"slow_share": 0.02, "slow_factor": 10, "tokens_per_step": 8, "step_seconds": "2 ms"}
    return run_config(
        folder,
        steps=steps,
        batch_groups=batch_groups,
        engine={"options": pace},
        environment={"options": {"max_hops": 1}},
        buckets=[{"instances": 2}],
        cluster={"workers": TWO},
        store={"checkpoint_every": 25},
    )


def test_three_hundred_steps(tmp_path: Path, client: Client) -> None:
    run = PlayedRun(client, tailed(tmp_path / "run", steps=300, batch_groups=1))
    run.fit()
    found = staleness(run.folder)
    assert len(found) == 300
    assert set(found[0]) <= {0, 1}
    assert set(found[299]) <= {0, 1}
    assert max(map(max, found)) == 1  # the bound is kept, and in use
    assert client.run_on_scheduler(scheduler_state) == {"tasks": 0, "groups": 0, "spans": 0}


def instances(client: Client) -> set[str]:
    """The workers that generate now."""
    found: set[str] = client.run_on_scheduler(scheduler_state).get("instances", set())
    return found


def test_workers_that_change_roles_lose_nothing_and_make_nothing_stale(tmp_path: Path, client: Client) -> None:
    run = PlayedRun(client, tailed(tmp_path / "run", steps=1000, batch_groups=2))

    with run.playing():
        run.until_trained(2)
        state = client.run_on_scheduler(scheduler_state)
        kept, generating = sorted(name for name, role in state["roles"].items() if role == "rollout")
        calling = next(name for name, role in state["roles"].items() if role == "tool")
        for _ in range(4):
            for worker, role in ((generating, "tool"), (calling, "rollout")):
                reply = client.sync(client.scheduler.libra_set_role, token=state["token"], worker=worker, role=role)
                assert reply == {}
            generating, calling = calling, generating
            wait_until("the swap", lambda now={kept, generating}: instances(client) == now)
            run.until_trained(4)
            assert client.run_on_scheduler(scheduler_state)["routes"] <= 2 * 2 * 4  # (α + 1)·B groups of 4
    assert run.recorder.of(Failed) == []
    assert all(event.failure is None for event in run.recorder.ended().values())
    assert max(map(max, staleness(run.folder))) == 1
    assert len(trained(run.folder)) >= (2 + 4 * 4) * 2 * 4
