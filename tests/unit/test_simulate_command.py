"""``libra simulate`` on the command line: tables, JSON, offline pages, and honesty about published figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from libra.pipeline.commands.simulate import simulate
from libra.pipeline.simulate.jobs import is_shared, load_shared
from libra.pipeline.simulate.scenario import load_scenario
from libra.resources.errors import ConfigError
from libra.resources.specs.files import shipped

SMALL = """
name: tiny
model: Qwen3-4B
cluster: one_node_h200
steps: 3
groups: 3
members: 4
uniform_tp: 2
rescore: 2
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(SMALL)
    return file


def test_every_policy_is_compared_over_seeds(scenario: Path) -> None:
    result = CliRunner().invoke(simulate, [str(scenario), "--seeds", "2", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["policy"] for row in rows] == list(load_scenario(scenario).variants)
    assert all(row["seeds"] == 2 and row["tokens_per_s_per_gpu"] > 0 for row in rows)


def test_the_page_is_offline_and_escaped(scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(SMALL.replace("name: tiny", "name: '<b>tiny'") + "variants: [static_uniform, elastic]\n")
    page = tmp_path / "page.html"
    result = CliRunner().invoke(simulate, [str(scenario), "--seeds", "1", "--html", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "&lt;b&gt;tiny" in text
    assert "<b>tiny" not in text
    assert not re.search(r"https?://|<script|src=", text)
    assert "simulated" in text


@pytest.mark.parametrize("name", shipped("sim"))
def test_shipped_scenarios_load(name: str) -> None:
    loaded = load_shared(name) if is_shared(name) else load_scenario(name)
    assert loaded.name == name


def test_a_wrong_scenario_names_the_key(scenario: Path) -> None:
    scenario.write_text(SMALL + "variants: [magic]\n")
    result = CliRunner().invoke(simulate, [str(scenario)])
    assert isinstance(result.exception, ConfigError)
    assert "variants" in str(result.exception)


def test_several_runs_share_a_cluster(tmp_path: Path) -> None:
    file, page = tmp_path / "shared.yaml", tmp_path / "jobs.html"
    file.write_text(
        "name: shared\nnodes: 4\nseconds: 1200\nevery: 600\njobs:\n"
        "- {name: short, model: Qwen3-0.6B, groups: 4, workload: {mean_from: 2000, mean_to: 2000}}\n"
        "- {name: long, model: Qwen3-4B, groups: 8, workload: {mean_from: 4000, mean_to: 9000}}\n"
    )
    result = CliRunner().invoke(simulate, [str(file), "--json", "--html", str(page)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    equal, driven = json.loads(result.stdout)
    assert (equal["way"], driven["way"]) == ("static equal", "demand-driven with feedback")
    assert len(driven["values"]) == 3
    assert driven["spread"] > 0
    assert sum(driven["last"].values()) <= 4
    assert "Several runs on one cluster" in page.read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("uniform_tp: 0", "uniform_tp"),
        ("switch_seconds: .inf", "switch_seconds: Input should be a finite number"),
        ("workload: {mean_to: .inf}", "workload.mean_to: Input should be a finite number"),
        ("variants: []", "variants"),
        ("seeds: [-1]", "seeds.0"),
        ("min_usable: 5", "min_usable 5 is more than a group has \\(4 members \\+ 0 redundant\\)"),
    ],
)
def test_a_scenario_that_cannot_be_simulated_is_refused_by_key_and_value(scenario: Path, line: str, said: str) -> None:
    key = line.partition(":")[0]
    kept = [each for each in SMALL.splitlines() if not each.startswith(f"{key}:")]
    scenario.write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError, match=said):
        load_scenario(scenario)


def test_a_scenario_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bytes.yaml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read the scenario"):
        load_scenario(file)


def test_a_page_that_cannot_be_written_is_refused_before_the_simulation(scenario: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(simulate, [str(scenario), "--html", str(tmp_path / "missing" / "page.html")])
    assert isinstance(result.exception, ConfigError)
    assert "--html" in str(result.exception)
    assert "seed 0" not in result.output
