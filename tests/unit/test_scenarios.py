"""What a scenario's costs do to whole simulated runs: failures, redundancy, publishing, turn-taking, changes; and what
the report says of seeds. Every comparison is on paired seeds."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev

import pytest
from click.testing import CliRunner

from libra.pipeline.commands.simulate import simulate as command
from libra.pipeline.simulate.scenario import Scenario, VariantName, load_scenario
from libra.pipeline.simulate.variants import simulate
from libra.scheduler_plugin.planner.replan import ReplanConfig
from libra.scheduler_plugin.simulation import LoopResult

SEEDS = (0, 1, 2)
ROUGH = load_scenario("rough").model_copy(update={"steps": 6, "rescore": 0})


def run(seed: int, variant: VariantName = "homogeneous", **changes: object) -> LoopResult:
    return simulate(Scenario.model_validate(ROUGH.model_dump() | changes), variant, seed)


def idle(result: LoopResult) -> float:
    return sum(step.idle_seconds for step in result.steps)


def test_the_shipped_scenario_has_every_cost() -> None:
    assert ROUGH.failure > 0
    assert ROUGH.redundant > 0
    costs = ("activation_seconds", "join_seconds", "stop_seconds", "switch_seconds", "install_seconds")
    assert all(getattr(ROUGH, name) > 0 for name in costs)


@pytest.mark.parametrize("seed", SEEDS)
def test_failures_redo_work(seed: int) -> None:
    calm, rough = run(seed, failure=0.0, redundant=0), run(seed, failure=0.05, redundant=0)
    assert calm.restarts == calm.failed == 0
    assert rough.restarts > 0
    assert rough.generated > calm.generated
    assert rough.seconds > calm.seconds


def test_groups_with_too_few_members_left_are_discarded_and_replaced() -> None:
    result = run(0, failure=0.04, retries=0, redundant=0, min_usable=7)
    assert result.failed > 0
    assert result.returned > 0
    assert len(result.steps) == ROUGH.steps
    assert run(0, failure=0.04, retries=0, redundant=0, min_usable=1).returned == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_redundant_members_cut_the_tail(seed: int) -> None:
    plain, more = run(seed, alpha=0, redundant=0), run(seed, alpha=0, redundant=2)
    assert (plain.cancelled, more.cancelled > 0) == (0, True)
    assert idle(more) < idle(plain)


@pytest.mark.parametrize("seed", SEEDS)
def test_publishing_stands_in_every_step_without_staleness(seed: int) -> None:
    fast, slow = (run(seed, alpha=0, install_seconds=seconds) for seconds in (0.0, 30.0))
    grown = [b.seconds - a.seconds for a, b in zip(fast.steps, slow.steps, strict=True)]
    assert grown[0] == pytest.approx(0.0)  # the first batch is sampled with the weights that are there
    assert grown[1:] == pytest.approx([30.0] * (ROUGH.steps - 1), abs=1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_colocated_step_has_two_switches(seed: int) -> None:
    free, paid = (run(seed, "colocated", switch_seconds=seconds) for seconds in (0.0, 10.8))
    assert paid.seconds - free.seconds == pytest.approx(2 * 10.8 * ROUGH.steps, rel=0.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_cost_activation_stopping_and_joining(seed: int) -> None:
    costs = ("activation_seconds", "join_seconds", "stop_seconds")
    free, paid = (run(seed, "greedy", cluster="a800_48", **dict.fromkeys(costs, value)) for value in (0.0, 60.0))
    change = next(i for i, step in enumerate(free.steps) if step.change == "apply")
    same = slice(0, change + 1)
    assert [s.seconds for s in free.steps[same]] == [s.seconds for s in paid.steps[same]]
    assert paid.steps[change + 1].seconds > free.steps[change + 1].seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_the_shipped_drift_is_replanned_as_shipped_without_harm(seed: int) -> None:
    """The plugin's replanning with its defaults, plans simulated: a few changes, none back, and no slower for them."""
    drift = load_scenario("drift")
    assert drift.replan == ReplanConfig()
    small = drift.model_copy(update={"groups": 24, "members": 8, "rescore": 3})
    kept, replanned = (simulate(small, variant, seed) for variant in ("cmlfq", "elastic"))
    changes = [step for step in replanned.steps if step.change in ("apply", "roll_back")]
    assert len(changes) <= 2
    assert all(step.change == "apply" for step in changes)
    assert replanned.seconds <= kept.seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_the_oracle_is_an_upper_bound_on_accuracy(seed: int) -> None:
    bound = run(seed, "oracle")
    for variant in ("heterogeneous", "cmlfq"):
        assert bound.accuracy >= run(seed, variant).accuracy


def test_the_report_tells_the_spread_over_three_seeds(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(
        "name: spread\nmodel: Qwen3-4B\ncluster: one_node_h200\nsteps: 3\ngroups: 3\nmembers: 4\nuniform_tp: 2\n"
        "rescore: 0\nvariants: [static_uniform, cmlfq]\n"
    )
    page = tmp_path / "page.html"
    result = CliRunner().invoke(command, [str(file), "--json", "--html", str(page)], catch_exceptions=False)
    rows = json.loads(result.stdout)
    text = page.read_text()
    for row in rows:
        assert row["seeds"] == len(row["throughputs"]) == len(SEEDS)
        assert len(set(row["throughputs"])) == len(SEEDS)  # seeds are different runs
        assert row["tokens_per_s_per_gpu"] == pytest.approx(mean(row["throughputs"]))
        assert row["spread"] == pytest.approx(stdev(row["throughputs"]))
        assert f"{row['tokens_per_s_per_gpu']:.1f} ± {row['spread']:.1f}" in text
