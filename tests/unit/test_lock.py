from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from libra.pipeline.store.lock import RunLock
from libra.resources.errors import StoreError

HOLD = """
import sys
from pathlib import Path
from libra.pipeline.store.lock import RunLock
lock = RunLock.acquire(Path(sys.argv[1]), "training")
sys.stdout.write("locked\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_second_process_is_told_who_holds_the_lock_until_that_one_dies(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(StoreError, match=rf"in use by process {holder.pid} on \S+ \(training, since .*\); wait"):
            RunLock.acquire(tmp_path, "training")
    finally:
        holder.kill()
        holder.communicate(timeout=60)
    with RunLock.acquire(tmp_path, "training"), pytest.raises(StoreError, match=f"process {os.getpid()} "):
        RunLock.acquire(tmp_path, "a second run of this process")
    RunLock.acquire(tmp_path, "after the release").release()


def test_a_look_at_the_lock_takes_nothing(tmp_path: Path) -> None:
    assert RunLock.holder(tmp_path) is None
    assert not list(tmp_path.iterdir())
    with RunLock.acquire(tmp_path, "training"):
        assert f"process {os.getpid()} " in str(RunLock.holder(tmp_path))
        with pytest.raises(StoreError, match=r"in use by process"):
            RunLock.check_free(tmp_path)
    RunLock.check_free(tmp_path)
    assert RunLock.holder(tmp_path) is None


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path, "training")
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        lock.release()
        RunLock.acquire(tmp_path, "training").release()
    finally:
        child.communicate(timeout=60)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot lock .*nowhere/lock: No such file"):
        RunLock.acquire(tmp_path / "nowhere", "training")
