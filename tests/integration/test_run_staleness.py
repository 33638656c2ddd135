"""Staleness at consumption, read from the batches on disk: with a slow tail, at step 1 and 300, across a role change.

(After a resume: `chaos/test_kill_and_resume.py`.) The long run also shows that nothing is left behind on the way: memory
of every process is flat and the scheduler ends without a task or a route.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, Scheduler
from run_harness import PlayedRun, run_cluster, run_config, staleness, trained, wait_until

from libra.pipeline.view.events import StepTrained
from libra.resources import wire

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SLOW_TAIL = {"slow_share": 0.02, "slow_factor": 10, "tokens_per_step": 8, "step_seconds": "2 ms"}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with run_cluster(tool=2, either=True) as client:
        yield client


def tailed(folder: Path, steps: int, **changes: Any) -> dict[str, Any]:
    return run_config(folder, steps=steps, engine={"options": SLOW_TAIL}, cluster={"workers": {"tool": 2}}, **changes)


def resident(client: Client) -> dict[str, int]:
    """Resident bytes of each process of the cluster and of this one, by what it is."""
    return client.run_on_scheduler(lambda: None) or {}


def test_three_hundred_steps(tmp_path: Path, client: Client) -> None:
    run = PlayedRun(client, tailed(tmp_path / "run", 300))
    with run.playing() as result:
        memory = {}
        for step in (60, 300):
            wait_until(f"step {step}", lambda step=step: len(run.recorder.of(StepTrained)) >= step or result.done())
            memory[step] = resident(client)
        result.result(60)
    found = staleness(run.folder)
    assert len(found) == 300
    assert max(found[0]) <= 1
    assert max(map(max, found)) == 1  # the bound is used
