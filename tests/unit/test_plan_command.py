"""``libra plan`` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from recorded_nvml import RecordedNVML

from libra.pipeline.commands.plan import plan
from libra.resources.errors import ClusterError, ConfigError


def run(*arguments: str) -> Result:
    """Without simulating plans, unless ``arguments`` say so."""
    return CliRunner().invoke(plan, ["--requests", "200", "--simulate", "0", *arguments])


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
    assert [tree["gpus"] for tree in data["trees"]] == list(range(1, 16))
    for tree in data["trees"]:
        assert {node["level"] for node in tree["nodes"]} >= {"TP", "PP"}


def test_json_carries_the_tree_of_the_plan_and_what_was_close() -> None:
    data = json.loads(run("--gpus", "48", "--json").output)
    (tree,) = data["trees"]
    assert tree["gpus"] == data["strategy"]["tp"] * data["strategy"]["pp"] * data["strategy"]["dp"]
    kept = [n["seconds"] for n in tree["nodes"] if n["level"] == "RC" and n["kept"]]
    assert min(kept) == pytest.approx(data["train_seconds"])
    splits = [plan for plan in data["close"]["plans"] if not plan["what"].startswith(f"split {tree['gpus']} ")]
    assert splits
    assert all(plan["over"] >= -1e-9 for plan in data["close"]["plans"])
    assert data["close"]["strategies"]
    assert all(s["seconds"] >= data["train_seconds"] * (1 - 1e-9) for s in data["close"]["strategies"])


def test_explain_lists_every_number_of_devices_and_marks_the_chosen_strategy() -> None:
    output = run("--explain").output
    for gpus in range(1, 48):
        assert f"training strategies for {gpus} a800_80g" in output
    assert "PP 40 " in output
    assert "MB 4 " in output
    assert "RC selective " in output
    assert output.count("← chosen") == 1
    assert "close: split " in output
    assert "close: train " in output


def test_two_kinds_of_hardware_are_drawn() -> None:
    output = run("--cluster", "h800_h20", "--model", "Qwen3-8B").output
    assert "on h800" in output
    assert "on h20" in output


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("1000\n2000\n30000\n" * 50)
    assert json.loads(run("--lengths", str(file), "--json").output)["rollout_seconds"] > 0


def test_the_best_plans_are_simulated_and_the_count_is_printed() -> None:
    arguments = ("--gpus", "2", "--hardware", "h200", "--model", "Qwen3-0.6B", "--requests", "8", "--simulate", "60")
    data = json.loads(run(*arguments, "--json").output)["simulated"]
    assert 1 <= data["plans"] <= data["offered"]
    assert data["seconds"] <= data["seconds_of_predicted_best"]
    assert f"of the best {data['offered']} plans simulated" in run(*arguments).output


def test_a_time_in_which_nothing_can_be_simulated_is_told() -> None:
    assert "no plan simulated: none was done within 0.01 s" in run("--gpus", "8", "--simulate", "0.01").output


def test_several_kinds_are_not_simulated_and_refused_where_asked_for() -> None:
    arguments = ["--requests", "50", "--cluster", "h800_h20", "--model", "Qwen3-8B"]
    assert "on several kinds of hardware (h800, h20) are not simulated" in CliRunner().invoke(plan, arguments).output
    refused = CliRunner().invoke(plan, [*arguments, "--simulate", "5"])
    assert isinstance(refused.exception, ConfigError)
    assert "planner.rescore_seconds: 0" in str(refused.exception)


def test_a_run_config_says_which_trainer_and_how_many_slots() -> None:
    output = run("--config", "quickstart", "--gpus", "2", "--hardware", "h200", "--model", "Qwen3-0.6B").output
    assert "train           1  DP1" in output
    assert "no trainer of this package launches them yet" not in output
    assert "strategies: those of the megatron trainer, to plan with" in run("--gpus", "8").output


def test_the_published_profile_is_named() -> None:
    assert "published (a800_published" in run("--profile", "a800_published").output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "Qwen3-15B"), "did you mean qwen3_14b"),
        (("--cluster", "a800_48", "--gpus", "8"), "give one of them"),
        (
            ("--cluster", "cpu", "--hardware", "h100"),
            "--hardware h100 goes with --gpus N",
        ),
        (("--hardware", "h100"), "without it the cluster says"),
        (("--gpus", "8", "--hardware", "b100"), "there is no hardware spec 'b100'"),
        (("--mean", "3"), "a mean of 500 to 40,960 tokens"),
        (("--gpus", "2", "--model", "Qwen3-32B"), "no plan for Qwen3-32B"),
        (("--trainer", "torch", "--gpus", "8"), "another trainer would do"),
        (("--trainer", "deepspeed"), "take torch or scripted, megatron (to plan for: nothing here launches it yet)"),
    ],
)
def test_wrong_input_says_what_would_do(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


def test_the_machines_own_gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedNVML([("NVIDIA H200", 143771, 0, 0)] * 4)
    monkeypatch.setitem(sys.modules, "pynvml", recorded)
    output = run("--cluster", "nvml", "--model", "Qwen3-4B").output
    assert "Qwen3-4B on 4 h200" in output
    assert "localhost" in output
    assert not recorded.open


def test_a_machine_without_a_driver_says_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNVML([], driver=False))
    result = run("--cluster", "nvml")
    assert isinstance(result.exception, ClusterError)
    assert "describe the machine by hand" in str(result.exception)


def test_a_bad_length_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("12 potato")
    result = run("--lengths", str(file))
    assert isinstance(result.exception, ConfigError)
    assert "one a line or as a JSON list" in str(result.exception)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[1e400, 5]", b"[true, 5]", b"[12.5]", b"[[4]]"])
def test_lengths_that_are_no_whole_numbers_are_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "lengths"
    file.write_bytes(text)
    result = run("--lengths", str(file))
    assert isinstance(result.exception, ConfigError)
    assert "must hold final contexts in tokens" in str(result.exception)


@pytest.mark.parametrize(
    "arguments", [("--mean", "nan"), ("--mean", "inf"), ("--mean", "1e300"), ("--simulate", "nan")]
)
def test_numbers_that_mean_nothing_are_refused(arguments: tuple[str, str]) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert arguments[0] in str(result.exception)


def test_equally_fast_layouts_are_not_told_as_better_or_simpler() -> None:
    output = run("--model", "quickstart").output  # bound by its longest request, on any number of devices
    assert "one TP degree; nothing else is faster" in output
    assert "beat mixing" not in output
    assert "(as fast)" in output


def test_ten_thousand_devices_are_planned_without_placing_what_was_close() -> None:
    data = json.loads(run("--gpus", "10240", "--json").output)
    used = [device for placement in data["placements"] for device in placement["devices"]]
    assert len(set(used)) == len(used)
    assert len(used) + len(data["idle"]) == 10240
    assert data["close"]["plans"]
