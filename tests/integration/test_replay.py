"""A recorded run simulated: what the record says goes in, step times stand beside the real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import CliRunner

from libra.pipeline.commands.simulate import simulate
from libra.pipeline.simulate.played import trace_of_row, trace_row
from libra.pipeline.simulate.replay import read_recording, replay
from libra.pipeline.view.files import read_metrics
from libra.resources.errors import ConfigError, StoreError

pytestmark = pytest.mark.cluster
COMMAND = [sys.executable, "-c", "from libra.pipeline.cli import main; main()"]
STEPS = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on real Dask processes whose engine takes its time."""
    folder = tmp_path_factory.mktemp("replay")
    overrides = [f"steps={STEPS}", "eval.tasks=0", "engine.options.step_seconds=5 ms", "cluster.dashboard=false"]
    done = subprocess.run(
        [*COMMAND, "train", "scripted", *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "scripted"


def test_every_step_after_the_first_is_compared(run: Path) -> None:
    result = CliRunner().invoke(simulate, [str(run), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    real = {record["step"]: record["seconds"] for record in read_metrics(run).steps}
    assert {row["step"]: row["real"] for row in found["steps"]} == {step: real[step] for step in range(2, STEPS + 1)}
    assert all(row["simulated"] > 0 for row in found["steps"])
    assert found["simulated"] == pytest.approx(fmean(row["simulated"] for row in found["steps"]))
    assert found["costs"] == "the pace of the scripted engine"


def test_the_record_is_the_workload(run: Path) -> None:
    recording = read_recording(run)
    config = recording.config
    stored = set(recording.groups) - recording.returned
    returned = {record["group"] for record in read_metrics(run).groups}
    assert len(stored) >= STEPS * config.batch_groups
    assert recording.returned == {number for number in returned if number < max(stored)}
    assert recording.returned <= set(recording.groups), "what returned groups did is known"
    assert all(len(group) == config.group_size for group in recording.groups.values())


def test_what_members_did_travels_through_the_metrics_file(run: Path) -> None:
    for trace in read_recording(run).groups[0]:
        assert trace_of_row(json.loads(json.dumps(trace_row(trace)))) == trace


def test_slower_engines_and_a_busier_trainer_take_longer(run: Path) -> None:
    recording = read_recording(run)
    base = replay(recording).simulated
    engine = recording.config.engine
    slow = engine.model_copy(update={"options": {**engine.options, "step_seconds": 0.05}})
    slower = replace(recording, config=recording.config.model_copy(update={"engine": slow}))
    assert replay(slower).simulated > base
    assert replay(replace(recording, aside=recording.aside + 60)).simulated > 60


def test_a_run_corrects_the_costs_of_its_second_half(run: Path) -> None:
    recording = read_recording(run)
    plain = replay(recording)
    found = replay(recording, correct=True)
    assert [row[0] for row in found.rows] == [4, 5]
    assert "corrected by 2 steps: engines × " in found.provenance
    twice = {step: 2 * seconds for step, seconds in recording.engine_seconds.items()}
    slower = replay(replace(recording, engine_seconds=twice), correct=True)
    assert slower.simulated > found.simulated
    assert len(plain.rows) == STEPS - 1


def test_tables_and_pages_name_the_run(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(simulate, [str(run), "--html", str(page)], catch_exceptions=False)
    assert "run scripted replayed" in result.output
    assert "mean" in result.output
    assert "scripted replayed" in page.read_text()


def test_what_cannot_be_replayed_says_why(run: Path) -> None:
    recording = read_recording(run)
    buckets = (recording.config.buckets[0].model_copy(update={"tp": 2}),)
    with pytest.raises(ConfigError, match="has buckets of TP 2; only runs at TP 1"):
        replay(replace(recording, config=recording.config.model_copy(update={"buckets": buckets})))
    metrics = run / "metrics.jsonl"
    kept = metrics.read_text()
    try:
        metrics.write_text(next(line for line in kept.splitlines() if '"kind": "step"' in line) + "\n")
        with pytest.raises(StoreError, match="has 1 trained step"):
            read_recording(run)
    finally:
        metrics.write_text(kept)
