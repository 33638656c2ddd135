"""Fifty steps of large batches: the memory of every process stays what it was after the first fifteen."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_harness import RunProcess, run_config

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(300)]


def test_memory_is_flat(tmp_path: Path) -> None:
    config = run_config(
        tmp_path / "run",
        steps=52,
        batch_groups=4,
        algorithm={"group_size": 16},
        engine={"slots": 256, "options": {"tokens_per_step": 16, "step_seconds": 0}},
        environment={"options": {"max_hops": 1}},
    )
    with RunProcess(config) as run:
        run.until_step(15)
        early = run.memory()
        run.until_step(50, 300)
        late = run.memory()
        assert run.end() == 0, run.output
    grown = {kind: late[kind] / early[kind] for kind in early}
    assert max(grown.values()) < 1.09, grown
