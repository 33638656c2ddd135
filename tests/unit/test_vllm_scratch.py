"""What a vLLM engine leaves behind is cleared away, however it ends. No vLLM is needed for that."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from libra.resources.durable import HeldLock
from libra.tasks.engines.vllm_scratch import FirstError, clear, reap

ENGINE = """
import json, os, signal, sys, time
from multiprocessing.shared_memory import SharedMemory
from libra.tasks.engines.vllm_scratch import Scratch
scratch = Scratch()
memory = SharedMemory(create=True, size=100)
(scratch.path / "vllm_dist_abc").touch()
scratch.note_segments()
print(json.dumps([str(scratch.path), "/dev/shm/" + memory.name]), flush=True)
time.sleep(60)
"""


def test_a_killed_process_group_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)} if len(str(tmp_path)) < 50 else dict(os.environ)
    command = [sys.executable, "-c", ENGINE]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as engine:
        assert engine.stdout is not None
        had = [Path(path) for path in json.loads(engine.stdout.readline())]
        assert all(path.exists() for path in had)
        assert had[0].stat().st_mode & 0o777 == 0o700
        os.killpg(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(path.exists() for path in had):
        assert time.monotonic() < deadline, had
        time.sleep(0.02)


def folder(root: Path, name: str, *, old: bool = True) -> Path:
    path = root / f"libra-vllm-{name}"
    path.mkdir()
    if old:
        os.utime(path, (0, 0))
    return path


def test_what_dead_undertakers_left_is_reaped_and_that_of_living_ones_kept(tmp_path: Path) -> None:
    dead, young, living = folder(tmp_path, "dead"), folder(tmp_path, "young", old=False), folder(tmp_path, "living")
    lock = HeldLock.take(living / "owner.lock", "undertaker")
    assert lock is not None
    assert reap(tmp_path, tmp_path) == [dead]
    assert young.exists()
    assert living.exists()
    lock.release()
    assert reap(tmp_path, tmp_path) == [living]


@pytest.mark.parametrize("orderly", [True, False])
def test_the_ranks_memory_goes_with_the_folder(tmp_path: Path, orderly: bool) -> None:
    """vLLM removes the file after which it named the memory at an orderly end only."""
    shared = tmp_path / "shm"
    shared.mkdir()
    mine, other = shared / "vllm_dist_1f-tp:0-[0-1]-cpushm_0", shared / "vllm_dist_2f-tp:0-[0-1]-cpushm_0"
    mine.touch()
    other.touch()
    scratch = folder(tmp_path, "x")
    (scratch / ("segments" if orderly else "vllm_dist_1f")).write_text("vllm_dist_1f")
    clear(scratch, shared)
    assert not scratch.exists()
    assert not mine.exists()
    assert other.exists()


def test_the_first_exception_is_kept(tmp_path: Path) -> None:
    class EngineDeadError(Exception):
        """As vLLM's, by name: another process has failed."""

    logger = logging.Logger("under test")
    logger.addHandler(FirstError(str(tmp_path / "errors")))
    logger.error("no exception")
    for error in (EngineDeadError("see above"), ValueError("no such head"), KeyError("later")):
        try:
            raise error
        except (EngineDeadError, ValueError, KeyError):
            logger.exception("failed")
    text = (tmp_path / "errors").read_text()
    assert "ValueError: no such head" in text
    assert "test_vllm_scratch.py" in text
    assert "later" not in text
