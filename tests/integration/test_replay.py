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
from libra.pipeline.simulate.recorded_plan import devices_of, recorded_plan, with_degrees
from libra.pipeline.simulate.replay import read_recording, replay
from libra.pipeline.view.files import read_metrics
from libra.resources.cost_model import RolloutCosts, StepCost
from libra.resources.cost_model.rollout import QueueModel
from libra.resources.errors import StoreError
from libra.resources.inventory import uniform
from libra.resources.specs import load_hardware
from libra.scheduler_plugin.simulation import Trace

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


TWO_BUCKETS = """
name: two
steps: 4
batch_groups: 4
engine:
  kind: scripted
  slots: 4
  options: {script: "libra.tasks.envs.hop_demo:sloppy", step_seconds: 0.005}
trainer: {kind: scripted}
algorithm: {group_size: 4}
environment: {kind: hop}
eval: {tasks: 0}
buckets:
- {tp: 1, max_context: 40, instances: 1}
- {tp: 2, max_context: null, instances: 1}
cluster: {dashboard: false, workers: {rollout: 2}}
"""


def test_a_run_of_two_tp_degrees_is_replayed_on_its_buckets(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(TWO_BUCKETS)
    done = subprocess.run(
        [*COMMAND, "train", "two.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    recording = read_recording(tmp_path / "runs" / "two")
    config = recording.config
    plan = recorded_plan(config, uniform(load_hardware("cpu"), devices_of(config)), 1)
    assert plan.layout.degrees == (1, 2)
    assert [(b.tp, b.max_context, b.instances) for b in plan.layout.buckets] == [(1, 40, 1), (2, None, 1)]
    both = replay(recording)
    assert [row[0] for row in both.rows] == [2, 3, 4]
    # Both instances take part: with the first one alone, of four slots, everything queues there. (Hand-overs are left
    # out: on a busy machine they take longer than the engines.)
    bare = replace(recording, groups={n: [without_waits(trace) for trace in g] for n, g in recording.groups.items()})
    alone = config.buckets[0].model_copy(update={"max_context": None})
    one = replay(replace(bare, config=config.model_copy(update={"buckets": [alone]})))
    assert one.simulated > replay(bare).simulated


def without_waits(trace: Trace) -> Trace:
    turns = tuple(replace(turn, seconds=0.0) for turn in trace.turns)
    return replace(trace, lead=0.0, trail=0.0, turns=turns)


def test_a_degree_that_nobody_measured_is_scaled_and_said() -> None:
    cost = StepCost(2, 0.02, 1e-3, 1e-6, 0.1, 1e-4, 1e-9, capacity=1000.0, slots=8)
    costs = RolloutCosts((cost,), QueueModel(), "measured")
    assert with_degrees(costs, [2]) == costs
    more = with_degrees(costs, [1, 2, 4])
    assert [step.tp for step in more.steps] == [1, 2, 4]
    assert more.of(2) == cost
    assert (more.of(4).step, more.of(4).token, more.of(4).capacity) == (0.01, 5e-7, 2000.0)
    assert (more.of(1).step, more.of(1).capacity, more.of(1).admission) == (0.04, 500.0, 0.1)
    assert more.provenance == (
        "measured; TP 1 scaled from TP 2 as if work divided evenly; TP 4 scaled from TP 2 as if work divided evenly"
    )


def test_what_cannot_be_replayed_says_why(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    kept = metrics.read_text()
    try:
        metrics.write_text(next(line for line in kept.splitlines() if '"kind": "step"' in line) + "\n")
        with pytest.raises(StoreError, match="has 1 trained step"):
            read_recording(run)
    finally:
        metrics.write_text(kept)
