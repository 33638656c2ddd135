"""kill -9 at random instants: what a journal or a checkpoint store had acknowledged is there afterwards."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from libra.pipeline.store.checkpoints import CheckpointStore
from libra.pipeline.store.journal import Journal, read_journal

pytestmark = pytest.mark.chaos

APPEND = """
import os, sys
from pathlib import Path
from libra.pipeline.store.journal import Journal, read_journal
folder = Path(sys.argv[1])
number = len(read_journal(folder).records)
journal = Journal(folder, sync_seconds=0.01)
while True:
    journal.append({"number": number, "tokens": b"x" * (number % 5000)})
    os.write(1, b"%d\\n" % number)
    number += 1
    if number % 500 == 0:
        journal.rotate()
"""

COMMIT = """
import os, sys
from pathlib import Path
from libra.pipeline.store.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
latest = store.latest().checkpoint
step = 0 if latest is None else latest.step
while True:
    step += 1
    directory = store.begin(step)
    for part in range(4):
        (directory / f"part{part}").write_bytes(b"%d" % step * 5000)
    store.commit(step, {"step": step})
    os.write(1, b"%d\\n" % step)
"""


def last_acknowledged_before_a_kill(program: str, folder: Path, seconds: float) -> int:
    """Run ``program`` on ``folder``, kill -9 it ``seconds`` after its first word, and return its last whole one."""
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(seconds)
        process.kill()
        words = (first + process.communicate(timeout=60)[0]).rpartition("\n")[0]
    finally:
        process.kill()
        process.wait(timeout=60)
    return int(words.split()[-1])


def test_the_journal_holds_every_acknowledged_record_once_and_in_order(tmp_path: Path) -> None:
    instants = random.Random(1)
    for _ in range(8):
        last = last_acknowledged_before_a_kill(APPEND, tmp_path, instants.uniform(0, 0.1))

        numbers = [record["number"] for record in read_journal(tmp_path).records]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > last
        with Journal(tmp_path) as journal:
            journal.append({"number": len(numbers)})
        assert len(read_journal(tmp_path).records) == len(numbers) + 1


def test_the_last_acknowledged_checkpoint_or_a_newer_one_can_be_read(tmp_path: Path) -> None:
    instants = random.Random(2)
    for _ in range(8):
        last = last_acknowledged_before_a_kill(COMMIT, tmp_path, instants.uniform(0, 0.1))

        latest = CheckpointStore(tmp_path, keep=2).latest()
        assert latest.checkpoint is not None and latest.checkpoint.step in (last, last + 1)
        assert latest.checkpoint.state() == {"step": latest.checkpoint.step}
        for part in range(4):
            assert (latest.checkpoint.path / f"part{part}").read_bytes() == b"%d" % latest.checkpoint.step * 5000
        assert all("half-written, removed" in message for message in latest.messages)
        assert not [path for path in tmp_path.iterdir() if not path.name[5:].isdigit()]
