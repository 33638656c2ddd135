"""kill -9 of whoever writes to an arena, or owns it: nothing half-written is readable, nothing leaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from kv_parts import SMALL, TESTS, check_published, get, put, start

from libra.resources.errors import DeadlineError
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Writing
from libra.resources.kv.ownership import OwnedArena, reap_arenas
from libra.resources.kv.segment import format_segment

pytestmark = pytest.mark.chaos

TOKENS = list(range(30))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    format_segment(tmp_path / "arena", SMALL, 3 << 20, slots=8)
    return tmp_path / "arena"


def process(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A child that runs ``code`` with what it usually needs imported; its arguments are ``args``."""
    head = (
        "import os, signal, sys, time\nimport numpy as np\nfrom pathlib import Path\nfrom kv_parts import *\n"
        "from libra.resources.kv.arena import Arena\nfrom libra.resources.kv.entries import Ticket\n"
        "from libra.resources.kv.segment import Segment\nfrom libra.resources.kv.ownership import OwnedArena\n"
        "args = sys.argv[1:]\n"
        "def say(text):\n    sys.stdout.write(text + '\\n')\n    sys.stdout.flush()\n"
    )
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


HALF = """
arena = Arena(Path(args[0]), writable=True)
writing = arena.begin("g0m0", 0, np.arange(30, dtype=np.int32))
arena.extents[writing.entry.table[:4]] = 7
say("half")
time.sleep(60)
"""


def test_a_writer_killed_in_mid_put_leaves_nothing_readable_and_nothing_behind(path: Path) -> None:
    with Arena(path, writable=True) as arena:
        child = process(HALF, path)
        try:
            assert said(child) == "half"
            assert get(arena, "g0m0", 0, TOKENS) == "absent"
            assert arena.reap() == 0, "a living writer keeps its entry"
            assert put(arena, "g0m0", 0, TOKENS) == "being_written"
        finally:
            child.kill()
        # Not waited for yet: the dead writer may still be a zombie of this process.
        assert _soon(lambda: arena.reap() == 1)
        child.communicate(timeout=60)
        assert get(arena, "g0m0", 0, TOKENS) == "absent"
        assert (arena.stats().used_bytes, arena.stats().writing, arena.audit()) == (0, 0, [])
        assert put(arena, "g0m0", 0, TOKENS) == "stored"
        assert get(arena, "g0m0", 0, TOKENS) == 30


def test_a_dead_writers_room_and_name_are_taken_without_being_asked_for(tmp_path: Path) -> None:
    format_segment(tmp_path / "arena", SMALL, (2 << 20) + 20 * SMALL.extent_bytes, slots=8)
    with Arena(tmp_path / "arena", writable=True) as arena:
        for name in ("g0m0", "g9m9"):  # its own name; another that needs its room
            child = process(HALF, tmp_path / "arena")
            assert said(child) == "half"
            assert put(arena, "g9m9", 0, TOKENS) == "no_room"
            child.kill()
            child.communicate(timeout=60)
            assert put(arena, name, 0, TOKENS) == "stored"
            arena.clear()
        assert arena.audit() == []


DIES_CHANGING = """
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
arena = Arena(Path(args[0]), writable=True)
setattr(Segment, args[1], die)
if args[2] == "begin":
    arena.begin("g1m0", 0, np.arange(8, dtype=np.int32))
elif args[2] == "publish":
    arena.begin("g1m0", 0, np.arange(8, dtype=np.int32)).publish()
elif args[2] == "extend":
    arena.begin("g0m0", 0, np.arange(40, dtype=np.int32))
else:
    arena.release("g0m0")
"""


@pytest.mark.parametrize(
    ("dies_in", "during", "survives"),
    [
        ("write_meta", "begin", True),
        ("tick", "begin", True),
        ("close_slot", "begin", True),
        ("close_slot", "extend", False),
        ("close_slot", "free", False),
    ],
)
def test_a_process_killed_while_it_changes_metadata_is_repaired(
    path: Path, dies_in: str, during: str, survives: bool
) -> None:
    """It dies holding the lock, its slot half changed: the lock comes free, so does the slot; the others stay."""
    with Arena(path, writable=True) as arena, Arena(path) as reader:
        put(arena, "g0m0", 0, TOKENS)
        put(arena, "g2m0", 0, TOKENS)
        process(DIES_CHANGING, path, dies_in, during).communicate(timeout=60)
        assert get(reader, "g1m0", 0, TOKENS) == "absent", "not readable even before the repair"
        assert get(reader, "g0m0", 0, TOKENS) == (30 if survives else "absent")
        assert arena.reap() == 0
        assert arena.stats().repaired == 1
        assert arena.audit() == []
        assert get(reader, "g2m0", 0, TOKENS) == 30
        assert arena.stats().entries == (2 if survives else 1)
        arena.clear()
        assert arena.stats().used_bytes == 0


STOPS = """
def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit()
arena = Arena(Path(args[0]), writable=True)
Segment.write_meta = stop
arena.begin("g1m0", 0, np.arange(8, dtype=np.int32))
"""


def test_a_process_stopped_in_a_change_is_named_instead_of_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = process(STOPS, path)
    try:
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        with Arena(path, writable=True) as arena:
            monkeypatch.setattr("libra.resources.kv.segment.LOCK_SECONDS", 0.05)
            with pytest.raises(DeadlineError, match=f"lock of the KV arena .*; unblocked by process {child.pid}"):
                put(arena, "g0m0", 0, TOKENS)
            child.kill()
            child.communicate(timeout=60)
            assert put(arena, "g0m0", 0, TOKENS) == "stored"
    finally:
        child.kill()
        child.communicate(timeout=60)


RANK = """
arena = Arena(Path(args[0]), writable=True)
part = arena.join(Ticket(int(args[1]), int(args[2])))
say("joined")
time.sleep(60)
"""


def test_an_entry_whose_rank_was_killed_is_not_published(path: Path) -> None:
    with Arena(path, writable=True) as arena:
        writing = arena.begin("g0m0", 0, np.array(TOKENS, np.int32))
        assert isinstance(writing, Writing)
        rank = process(RANK, path, writing.ticket.slot, writing.ticket.seq)
        assert said(rank) == "joined"
        rank.kill()
        rank.communicate(timeout=60)
        assert not writing.publish()
        arena.reap()
        assert (get(arena, "g0m0", 0, TOKENS), arena.stats().used_bytes) == ("absent", 0)


def test_a_process_killed_at_each_of_many_lines_of_every_change_leaves_a_sound_arena(tmp_path: Path) -> None:
    """Whatever is readable afterwards is whole and right, nothing leaks, nothing is left in writing."""
    format_segment(tmp_path / "arena", SMALL, (2 << 20) + 60 * SMALL.extent_bytes, slots=8)
    child = start("crash", tmp_path / "arena", 11)
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 0
    assert int(output) > 150, "lines at which it was killed"


def test_processes_killed_at_any_moment_leave_a_sound_arena(path: Path) -> None:
    rng = np.random.default_rng(3)
    with Arena(path, writable=True) as arena:
        for round_ in range(4):
            children = [start("churn", path, 10 * round_ + i) for i in range(2)]
            for child in children:
                assert said(child) == "ready"
            time.sleep(float(rng.uniform(0.02, 0.2)))
            for child in children:
                child.kill()
                child.communicate(timeout=60)
            arena.reap()
            assert arena.audit() == []
            assert arena.stats().writing == 0
            check_published(arena)
        arena.clear()
        assert arena.stats().used_bytes == 0


OWNER = """
owned = OwnedArena("r1", args[1], SMALL, 3 << 20, shared=Path(args[0]))
put(owned.arena, "g0m0", 0, list(range(30)))
say("owner")
time.sleep(60)
"""


def guard_of(child: subprocess.Popen[str]) -> psutil.Process:
    """The guard that the owner has hired."""
    (guard,) = psutil.Process(child.pid).children()
    assert "libra.resources.kv.guard" in guard.cmdline()
    return guard


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_arena_of_an_owner_that_dies_goes_with_it(tmp_path: Path, number: signal.Signals) -> None:
    dead, alive = process(OWNER, tmp_path, "w0"), process(OWNER, tmp_path, "w1")
    try:
        assert said(dead) == said(alive) == "owner"
        guard = guard_of(dead)
        dead.send_signal(number)
        dead.communicate(timeout=60)
        guard.wait(10)
        assert [path.name for path in tmp_path.iterdir()] == ["libra-r1-kv-w1"]
    finally:
        alive.kill()
        alive.communicate(timeout=60)


def test_where_the_guard_was_killed_too_the_arena_is_reaped_and_a_living_ones_is_not(tmp_path: Path) -> None:
    dead, alive = process(OWNER, tmp_path, "w0"), process(OWNER, tmp_path, "w1")
    try:
        assert said(dead) == said(alive) == "owner"
        assert reap_arenas(tmp_path) == []
        guard_of(dead).kill()
        dead.kill()
        dead.communicate(timeout=60)
        assert reap_arenas(tmp_path) == [tmp_path / "libra-r1-kv-w0"]
        assert [path.name for path in tmp_path.iterdir()] == ["libra-r1-kv-w1"]
        with Arena(tmp_path / "libra-r1-kv-w1" / "arena") as arena:
            assert get(arena, "g0m0", 0, TOKENS) == 30
    finally:
        alive.kill()
        alive.communicate(timeout=60)


def test_a_worker_started_again_under_its_name_takes_the_place_of_the_dead_one(tmp_path: Path) -> None:
    child = process(OWNER, tmp_path, "w0")
    assert said(child) == "owner"
    left = Arena(tmp_path / "libra-r1-kv-w0" / "arena")  # an engine that outlived its worker for a moment
    child.kill()
    child.communicate(timeout=60)
    owned = OwnedArena("r1", "w0", SMALL, 3 << 20, shared=tmp_path)
    assert owned.arena is not None
    assert get(owned.arena, "g0m0", 0, TOKENS) == "absent"
    assert get(left, "g0m0", 0, TOKENS) == 30, "it still maps the old memory, which is gone once it ends"
    left.close()
    owned.release()
    assert list(tmp_path.iterdir()) == []


def _soon(condition: object, seconds: float = 30.0) -> bool:
    """Whether ``condition()`` comes true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False
