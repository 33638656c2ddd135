"""However a run ends: one clear message, an exit code, no process, no open port, nothing in shared memory."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from run_harness import RunProcess, run_config, summary

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.timeout(200)]

LONG = {"steps": 1000, "store": {"checkpoint_every": 1000}}


def ports(run: RunProcess) -> set[int]:
    """What the processes of the run listen on."""
    found = set()
    for process in run.family():
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def listening() -> set[int]:
    """What anybody on this machine listens on."""
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    config = run_config(tmp_path / "run", **LONG)
    with RunProcess(config) as run:
        run.until_step(2)
        opened = ports(run)
        assert len(opened) >= 5  # the scheduler's and each worker's
        assert run.shared_memory()
        run.kill("driver", number)
        code = run.end(40)
        run.assert_no_process()
        assert not opened & listening()
        if number == signal.SIGKILL:  # the next start cleans up
            assert code == -signal.SIGKILL
            return
        assert code == 130, run.output
        assert "interrupted; what had finished is kept, and --resume goes on from there" in run.output
        assert "Traceback" not in run.output
        assert run.shared_memory() == []
        assert summary(tmp_path / "run")["outcome"] == "interrupted"


def test_an_error_of_the_run_ends_everything(tmp_path: Path) -> None:
    faults = {"infra": ["m0", "m1", "m2", "m3"]}
    config = run_config(
        tmp_path / "run", environment={"options": {"faults": faults}}, retries={"infra": 1, "consecutive_infra": 4}
    )
    with RunProcess(config) as run:
        assert run.end() == 1
        run.assert_nothing_left()
        assert "is on fire" in run.output
        assert "Traceback" not in run.output
        assert summary(tmp_path / "run")["outcome"] == "failed"


@pytest.mark.parametrize("when", ["as it starts", "later"])
def test_the_scheduler_s_death_ends_the_run_with_words(tmp_path: Path, when: str) -> None:
    config = run_config(tmp_path / "run", **LONG)
    with RunProcess(config) as run:
        if when == "later":
            run.until_step(2)
        else:
            run.until("a trainer", lambda: run.find("trainer"))
        assert run.kill("scheduler")
        assert run.end(60) == 1
        assert "the Dask scheduler is gone" in run.output
        assert "Traceback" not in run.output
        run.assert_nothing_left()
