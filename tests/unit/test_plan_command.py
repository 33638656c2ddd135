"""``libra plan`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from libra.pipeline.commands.plan import plan
from libra.resources.errors import ConfigError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan, ["--requests", "200", *arguments])


def test_a_plan_as_table_and_picture() -> None:
    result = run("--model", "Qwen3-14B", "--cluster", "a800_48")
    assert result.exit_code == 0, result.output
    assert "Qwen3-14B on 48 a800_80g, 200 trajectories a step" in result.output
    assert "devices (T trains" in result.output
    assert "lengths on a800_80g" in result.output
    assert "why:" in result.output
    assert "costs: derived from the specs" in result.output


def test_json_for_programs() -> None:
    result = run("--gpus", "16", "--hardware", "h100", "--model", "Qwen3-4B", "--json", "--explain")
    data = json.loads(result.output)
    used = [device for placement in data["placements"] for device in placement["devices"]]
    assert len(used) + len(data["idle"]) == 16
    assert data["seconds"] == max(data["train_seconds"], data["rollout_seconds"])
    assert {node["level"] for node in data["tree"]} >= {"TP", "PP", "DP"}


def test_explain_lists_kept_and_pruned_nodes_and_marks_the_chosen_one() -> None:
    output = run("--explain").output
    assert "kept" in output
    assert "cut" in output
    assert "← chosen" in output


def test_two_kinds_of_hardware_are_drawn() -> None:
    output = run("--cluster", "h800_h20", "--model", "Qwen3-8B").output
    assert "on h800" in output
    assert "on h20" in output


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("1000\n2000\n30000\n" * 50)
    assert json.loads(run("--lengths", str(file), "--json").output)["rollout_seconds"] > 0


def test_plans_can_be_simulated_in_a_child_process() -> None:
    data = json.loads(
        run("--gpus", "8", "--hardware", "h200", "--model", "Qwen3-4B", "--simulate", "1", "--json").output
    )
    assert data["simulated"]["plans"] >= 1
    assert data["simulated"]["seconds"] <= data["simulated"]["seconds_of_predicted_best"]


def test_the_published_profile_is_named() -> None:
    assert "published (a800_published" in run("--profile", "a800_published").output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "Qwen3-15B"), "did you mean qwen3_14b"),
        (("--cluster", "a800_48", "--gpus", "8"), "give one of them"),
        (("--gpus", "8", "--hardware", "b100"), "there is no hardware spec 'b100'"),
        (("--mean", "3"), "a mean of 500 tokens"),
        (("--gpus", "2", "--model", "Qwen3-32B"), "no plan for Qwen3-32B"),
        (("--trainer", "torch", "--gpus", "8"), "another trainer would do"),
    ],
)
def test_wrong_input_says_what_would_do(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


def test_a_bad_length_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("12 potato")
    result = run("--lengths", str(file))
    assert isinstance(result.exception, ConfigError)
    assert "one a line or as a JSON list" in str(result.exception)
