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

from libra.pipeline.view.events import StepTrained

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
        environment={"options": {"max_hops": 2}},
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


def test_workers_that_change_roles_lose_nothing_and_make_nothing_stale(tmp_path: Path, client: Client) -> None:
    run = PlayedRun(client, tailed(tmp_path / "run", steps=40, batch_groups=2))
    swaps = 0

    def steps() -> int:
        return len(run.recorder.of(StepTrained))

    with run.playing() as result:
        wait_until("step 2", lambda: steps() >= 2)
        token = client.run_on_scheduler(scheduler_state)["token"]
        generating, calling = "rollout-1", "tool-1"
        while steps() < 34 and not result.done():
            for worker, role in ((generating, "tool"), (calling, "rollout")):
                reply = client.sync(client.scheduler.libra_set_role, token=token, worker=worker, role=role)
                assert reply == {}
            generating, calling = calling, generating
            state = wait_until(
                "the swap",
                lambda now={"rollout-0", generating}: (
                    (state := client.run_on_scheduler(scheduler_state)).get("instances", now) == now and state
                ),
            )
            assert state.get("routes", 0) <= 2 * 2 * 4  # (α + 1)·B groups of 4: who has ended is forgotten
            swaps += 1
        summary = result.result(100)
    assert swaps >= 3
    assert summary["steps"] == 40
    assert summary["failures"].get("infra", 0) == 0
    assert max(map(max, staleness(run.folder))) == 1
    assert len(trained(run.folder)) == 40 * 2 * 4
