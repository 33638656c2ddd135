"""``libra train`` from the outside: a whole run, Ctrl-C, resume, and what stands in the way of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from run_harness import records

pytestmark = pytest.mark.cluster
COMMAND = [sys.executable, "-c", "from libra.pipeline.cli import main; main()"]
SECONDS = 120


def train(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "train", "scripted", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_a_run_from_the_command_line_leaves_its_files_and_says_where(tmp_path: Path) -> None:
    done = train(tmp_path, "steps=2", "eval.tasks=8")
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "scripted"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["steps"] == 2
    assert summary["heldout_before"] is not None
    assert summary["heldout_after"] is not None
    assert summary["wall_seconds"] > 0
    assert [len(records(run_dir, kind)) for kind in ("step", "eval")] == [2, 2]
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert "step 2/2" in done.stdout
    assert "dashboard http://127.0.0.1:" in done.stdout
    assert str(Path("runs/scripted/report.html")) in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything_and_resume_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    command = [*COMMAND, "train", "scripted", "steps=2000", "eval.tasks=0", "store.checkpoint_every=1"]
    running = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    family: list[psutil.Process] = []
    try:
        assert running.stdout is not None
        deadline = time.monotonic() + SECONDS
        for line in running.stdout:
            assert time.monotonic() < deadline
            if line.startswith("step 2/"):
                break
        family = psutil.Process(running.pid).children(recursive=True)
        assert len(family) >= 5, "a scheduler and a worker of each role"
        if number == signal.SIGINT:
            os.killpg(running.pid, number)  # what a terminal does: to everyone in the foreground
        else:
            running.send_signal(number)
        _, errors = running.communicate(timeout=SECONDS)
    finally:
        running.kill()
    assert running.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
    run_dir = tmp_path / "runs" / "scripted"
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "interrupted"
    done = records(run_dir, "step")[-1]["step"]

    again = train(tmp_path)
    assert again.returncode == 1
    assert "holds an unfinished run" in again.stderr
    assert "--resume" in again.stderr

    resumed = train(tmp_path, "--resume", f"steps={done + 2}", "eval.tasks=0", "store.checkpoint_every=1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"step {done + 2}/{done + 2}" in resumed.stdout
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "finished"


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (["--scheduler", "tcp://127.0.0.1:1"], 1, "no Dask scheduler answers at tcp://127.0.0.1:1"),
        (["engine.options.script=no.such:player", "deadlines.start=10 s"], 1, "cannot import 'no.such'"),
        (["tokenizer=/nowhere/tokenizer.json"], 2, "/nowhere/tokenizer.json"),
        (["--resume"], 1, "no run to resume"),
    ],
)
def test_what_stands_in_the_way_is_one_message_without_a_traceback(
    tmp_path: Path, arguments: list[str], code: int, fragment: str
) -> None:
    done = train(tmp_path, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert fragment in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("libra: ")]) == 1
