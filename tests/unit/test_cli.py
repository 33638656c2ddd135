"""The command line: what it prints, and what it exits with."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from synthetic_run import config_of, make_run

from libra.pipeline import cli
from libra.pipeline.api import Run
from libra.pipeline.config import load_config, to_plain
from libra.pipeline.run_folders import has_begun, make_way
from libra.pipeline.store.checkpoints import CheckpointStore
from libra.pipeline.store.journal import Journal
from libra.pipeline.store.lock import RunLock
from libra.pipeline.store.run_folder import RunFolder
from libra.pipeline.view.view import View
from libra.resources.errors import ClusterError, StoreError


def libra(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from libra.pipeline.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_config_show_prints_every_key_with_overrides() -> None:
    result = libra("config", "show", "scripted", "algorithm.lr=2e-3", "deadlines.train=90 s")
    assert result.exit_code == 0
    assert "lr: 0.002" in result.stdout
    assert "train: 90 s" in result.stdout
    assert "min_usable: 2" in result.stdout


def test_a_wrong_config_is_one_message_without_a_traceback_and_exit_code_2() -> None:
    result = libra("config", "show", "scripted", "algorithm.lrr=1")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("libra: the config scripted (shipped) has 1 error:\n  algorithm.lrr = 1")
    assert "Traceback" not in result.stderr


def test_other_errors_exit_with_1(tmp_path: Path) -> None:
    result = libra("report", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith("libra: ")
    assert "is not a run folder" in result.stderr


def raised_by_a_command(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Result:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("libra.pipeline.config.load_config", broken)
    return libra("config", "show", "scripted")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/run"),
            "/x/run: No space left on device; free some space",
        ),
        (OSError(errno.EACCES, "Permission denied", "/root/x"), "/root/x: Permission denied; allow this user to use"),
        (FileExistsError(errno.EEXIST, "File exists", "/a"), "/a: File exists; check the path"),
        (
            ValueError("red \x1b[31m\nand more"),
            "unexpected ValueError: red ␛[31m and more; --debug shows the traceback",
        ),
        (KeyError(), "unexpected KeyError; --debug"),
    ],
)
def test_an_error_of_any_kind_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    result = raised_by_a_command(monkeypatch, error)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"libra: {words}")
    assert len(result.stderr.splitlines()) == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("where", [("--debug", "config", "show"), ("config", "show", "--debug")])
def test_debug_shows_the_traceback(where: tuple[str, ...], tmp_path: Path) -> None:
    done = script(*where, "nowhere", cwd=tmp_path)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_ctrl_c_is_a_message_and_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("libra.pipeline.config.load_config", interrupted)
    result = libra("config", "show", "scripted")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "--resume" in result.stderr


def test_messages_hold_no_control_characters() -> None:
    result = libra("config", "show", "scripted", "name=\x1b[31m\x07")
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    assert "\x07" not in result.stderr


def test_resume_and_fresh_exclude_each_other() -> None:
    result = libra("train", "scripted", "--resume", "--fresh")
    assert result.exit_code == 2
    assert "give one of them" in result.stderr


def test_report_prints_the_path_of_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, groups=1, members=2)
    result = libra("report", str(folder.path))
    assert result.exit_code == 0
    assert result.stdout.strip() == str(folder.report)
    assert folder.report.is_file()


def test_libra_is_a_subcommand_of_dask(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dask", "libra", "config", "show", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "there is no config 'nowhere'" in done.stderr


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    assert script("--version", cwd=tmp_path).stdout.strip() == "libra, version 0.1.0"


# -- the report after a run --------------------------------------------------------------------------


def ended_by(monkeypatch: pytest.MonkeyPatch, error: Exception, *arguments: str) -> Result:
    """``libra train`` whose run raises ``error`` as it begins."""

    def fit(_: object) -> None:
        raise error

    monkeypatch.setattr("libra.pipeline.api.Run.fit", fit)
    return libra("train", *arguments)


def test_a_report_that_fails_never_hides_why_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", steps=1, groups=1, members=2, finish=False)

    def broken(_: Path) -> Path:
        raise TypeError("float() argument must be\na number \x1b[31m")

    monkeypatch.setattr("libra.pipeline.commands.train.write_report", broken)
    result = ended_by(monkeypatch, StoreError("the real reason"), str(run.path / "config.yaml"), "--resume")
    assert result.exit_code == 1
    warning, error = result.stderr.splitlines()
    assert warning.startswith("warning: no report: unexpected TypeError: float() argument must be a number ␛[31m")
    assert error == "libra: the real reason"


def test_a_folder_that_another_process_is_training_gets_no_report_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps=1, groups=1, members=2, finish=False)
    with RunLock.acquire(run.path, "training"):
        result = ended_by(monkeypatch, StoreError("in use"), str(run.path / "config.yaml"), "--resume")
    assert result.exit_code == 1
    assert "in use by process" in result.stderr
    assert "starting" not in result.stdout
    assert not run.report.exists()


# -- what becomes of a run folder that is there ----------------------------------------------------


def test_a_new_run_folder_needs_no_way(tmp_path: Path) -> None:
    assert make_way(tmp_path / "run", resume=False, fresh=False) is None
    (tmp_path / "empty").mkdir()
    assert make_way(tmp_path / "empty", resume=False, fresh=True) is None


def test_a_finished_run_is_moved_aside(tmp_path: Path) -> None:
    for number in (1, 2):
        make_run(tmp_path / "run", steps=1, groups=1, members=2)
        moved = make_way(tmp_path / "run", resume=False, fresh=False)
        assert moved == tmp_path / f"run.{number}"
        assert (moved / "summary.json").is_file()
        assert not (tmp_path / "run").exists()


def test_an_unfinished_run_is_never_moved_unless_asked(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=2, groups=1, members=2, finish=False)
    with pytest.raises(StoreError, match=r"unfinished run \(step 2 done\): --resume .* --fresh .* name="):
        make_way(tmp_path / "run", resume=False, fresh=False)
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    assert make_way(tmp_path / "run", resume=True, fresh=False) is None
    assert make_way(tmp_path / "run", resume=False, fresh=True) == tmp_path / "run.1"


def test_a_run_that_never_began_is_moved_aside_and_loses_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    folder = RunFolder.create(config.run_dir, to_plain(config))
    (folder.logs / "scheduler.log").write_text("no such environment")
    Journal(folder.journal).close()
    View(folder.path).close()
    assert make_way(folder.path, resume=False, fresh=False) == tmp_path / "run.1"
    assert (tmp_path / "run.1" / "logs" / "scheduler.log").read_text() == "no such environment"


@pytest.mark.parametrize("what", ["journal", "checkpoint", "evaluation"])
def test_a_run_with_anything_to_lose_has_begun(tmp_path: Path, what: str) -> None:
    config = config_of(tmp_path / "run")
    folder = RunFolder.create(config.run_dir, to_plain(config))
    assert not has_begun(folder.path)
    if what == "journal":
        with Journal(folder.journal) as journal:
            journal.append({"event": "Installed", "version": 0})
    elif what == "checkpoint":
        store = CheckpointStore(folder.checkpoints, 1)
        store.begin(0)
        assert not has_begun(folder.path)
        store.commit(0, {})
    else:
        folder.metrics.write_text('{"kind": "eval", "version": 0, "when": "before"}\n')
    assert has_begun(folder.path)
    with pytest.raises(StoreError, match="unfinished run"):
        make_way(folder.path, resume=False, fresh=False)


def test_resuming_a_finished_run_says_so_and_touches_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, groups=1, members=2)
    config = tmp_path / "config.yaml"
    shutil.copy(folder.path / "config.yaml", config)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    result = libra("train", str(config), "--resume")
    assert result.exit_code == 0, result.stderr
    assert "synthetic is finished: all its 1 steps are trained; steps=<more> goes on with it" in result.stdout
    with Run(load_config(config), resume=True) as run:
        assert run.fit().summary["heldout_after"] == 0.84
        with pytest.raises(ClusterError, match="all are asked for"):
            run.step()
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_a_folder_in_use_is_never_moved(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1, groups=1, members=2)
    with RunLock.acquire(tmp_path / "run", "training"), pytest.raises(StoreError, match="in use by process"):
        make_way(tmp_path / "run", resume=False, fresh=True)
    assert (tmp_path / "run").is_dir()


def test_a_folder_that_is_no_run_is_never_moved(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(StoreError, match="is not a run folder"):
        make_way(tmp_path, resume=False, fresh=True)
    assert (tmp_path / "precious").read_text() == "mine"


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run to resume"):
        make_way(tmp_path / "run", resume=True, fresh=False)
