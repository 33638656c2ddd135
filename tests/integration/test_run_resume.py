"""What may be resumed, with what, and by whom. (After kills: `chaos/test_kill_and_resume.py`.)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client
from run_harness import PlayedRun, records, run_cluster, run_config, trained, wait_until

from libra.pipeline.view.events import StepTrained
from libra.resources.errors import StoreError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with run_cluster() as client:
        yield client


def test_a_finished_run_ends_at_once_goes_on_with_more_steps_and_refuses_fewer(tmp_path: Path, client: Client) -> None:
    folder = tmp_path / "run"
    first = PlayedRun(client, run_config(folder, steps=3, eval={"tasks": 4})).fit()
    batches = trained(folder)

    again = PlayedRun(client, run_config(folder, steps=3, eval={"tasks": 4}), resume=True)
    summary = again.fit()
    assert again.recorder.of(StepTrained) == []
    told = ("outcome", "steps", "failures", "skipped_groups", "staleness_max", "heldout")
    assert {key: summary[key] for key in told} == {key: first[key] for key in told}
    assert trained(folder) == batches

    on = PlayedRun(client, run_config(folder, steps=5, eval={"tasks": 4}), resume=True).fit()
    assert on["steps"] == 5
    assert trained(folder) >= batches
    assert len(trained(folder)) == 5 * 2 * 4
    assert [record["step"] for record in records(folder, "step")] == [1, 2, 3, 4, 5]

    with pytest.raises(StoreError, match=r"steps = 4, but the run in .* has trained 5 already"):
        PlayedRun(client, run_config(folder, steps=4, eval={"tasks": 4}), resume=True).fit()


def test_a_run_that_is_being_driven_is_left_alone(tmp_path: Path, client: Client) -> None:
    folder, gate = tmp_path / "run", tmp_path / "gate"
    held = {"tool_timeout": "100 s", "options": {"faults": {"hang": ["g1m2"], "gate": str(gate)}}}
    config = run_config(folder, environment=held)
    run = PlayedRun(client, config)
    with run.playing() as result:
        wait_until("a step", lambda: run.recorder.of(StepTrained))
        before = (folder / "metrics.jsonl").read_bytes()
        with pytest.raises(StoreError, match="is in use by process"):
            PlayedRun(client, config, resume=True).fit()
        with pytest.raises(StoreError, match="was made with another config"):
            PlayedRun(client, {**config, "batch_groups": 3}, resume=True).fit()
        assert (folder / "metrics.jsonl").read_bytes() == before
        assert not (folder / "summary.json").exists()
        gate.touch()
        assert result.result(60)["outcome"] == "finished"
