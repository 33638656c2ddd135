"""A worker's child processes: they answer, they die with their own words, and none outlives its parent."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from child_parts import awaited

from libra.resources.errors import ConfigError, DeadlineError, InfraError, LibraError, WeightError
from libra.resources.weights import publish_weights
from libra.tasks.child.parent import ChildProcess

ENGINE = "libra.tasks.child.engine_host"
START = 60.0
GONE = 10.0


class Events:
    """What a child said on its own, and how it ended."""

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.generated: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def on_event(self, name: str, fields: dict[str, Any]) -> None:
        for end in fields["ended"] if name == "generated" else ():
            self.generated.put_nowait(end)


def engine_config(kind: str, **options: Any) -> dict[str, Any]:
    engine = {"kind": kind, "slots": 2, "max_context": 10_000, "options": {"vocab": 50, **options}}
    return {"engine": engine, "tokenizer": None, "deterministic": False, "place": {}}


async def start(
    tmp_path: Path, kind: str = "random", events: Events | None = None, seconds: float = START, **options: Any
) -> ChildProcess:
    events = events or Events()
    return await ChildProcess.start(
        ENGINE,
        engine_config(kind, **options),
        name=f"engine {kind}",
        log=tmp_path / "logs" / f"{kind}.log",
        seconds=seconds,
        threads=1,
        on_event=events.on_event,
        on_exit=events.deaths.append,
    )


def submit(child: ChildProcess, identifier: str, max_new: int = 5) -> None:
    child.send(
        "submit",
        id=identifier,
        sequence=identifier,
        tokens=np.arange(3, dtype=np.int32),
        max_new=max_new,
        stop=[],
        temperature=1.0,
        stream=7,
    )


def weights(tmp_path: Path, version: int = 0) -> dict[str, Any]:
    published = publish_weights(tmp_path / "weights", version, {"w": np.ones(4)}, {})
    return {"version": published.version, "path": published.path, "digest": published.digest}


async def until_gone(pid: int) -> bool:
    deadline = time.monotonic() + GONE
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


@awaited
async def test_requests_are_answered_and_stop_leaves_nothing(tmp_path: Path) -> None:
    events = Events()
    child = await start(tmp_path, events=events)
    assert child.ready == {"slots": 2}
    loaded = await child.call("load", seconds=30, **weights(tmp_path))
    assert loaded == {"version": 0, "kv_layout": None, "kv_room": {"tokens": 2 * 10_000, "bytes_per_token": 0}}
    submit(child, "a")
    end = await asyncio.wait_for(events.generated.get(), 30)
    assert end["id"] == "a"
    assert end["finish"] == "length"
    assert end["tokens"].dtype == np.int32
    assert end["logprobs"] == pytest.approx(-np.log(50))
    assert end["versions"].tolist() == [0] * 5
    assert (await child.call("stats", seconds=30))["sampled"] == 5
    pid = child.pid
    await child.stop(grace=30)
    assert await until_gone(pid)
    assert events.deaths == []
    assert "exit code 0" in str(child.death)
    with pytest.raises(InfraError):
        await child.call("stats", seconds=1)


@awaited
async def test_an_error_of_one_request_keeps_its_type_and_the_child(tmp_path: Path) -> None:
    child = await start(tmp_path)
    try:
        with pytest.raises(WeightError, match="no published weights"):
            await child.call("load", seconds=30, version=3, path=str(tmp_path / "nowhere"), digest="")
        with pytest.raises(ConfigError, match="unknown request 'dance'"):
            await child.call("dance", seconds=30)
        assert (await child.call("stats", seconds=30))["steps"] == 0
    finally:
        await child.stop(grace=0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("child_parts:CrashingEngine", "exit code 1: RuntimeError: device-side assert: index 640 is out of bounds"),
        ("child_parts:DyingEngine", r"exit code 7: (.*\n)*double free or corruption \(out\)"),
    ],
)
@awaited
async def test_a_child_that_dies_says_why_in_its_own_words(tmp_path: Path, kind: str, words: str) -> None:
    events = Events()
    child = await start(tmp_path, kind, events)
    await child.call("load", seconds=30, **weights(tmp_path))
    submit(child, "a", max_new=100)
    with pytest.raises(InfraError, match=words):
        # The engine's thread is busy dying: this call ends with it.
        while True:
            await child.call("stats", seconds=30)
    assert len(events.deaths) == 1
    assert child.log.name in events.deaths[0]
    await child.stop(grace=0)


@awaited
async def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(LibraError, match=r"no file named config\.json"):
        await start(tmp_path, "child_parts:UnbuildableEngine")
    assert "looking for the model" in (tmp_path / "logs" / "child_parts:UnbuildableEngine.log").read_text()
    with pytest.raises(ConfigError, match=r"did you mean 'StuckEngine'\?"):
        await start(tmp_path, "child_parts:StukEngine")


@awaited
async def test_a_start_without_end_meets_its_deadline(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(DeadlineError, match="waited 2 s for engine child_parts:SilentEngine to be ready"):
        await start(tmp_path, "child_parts:SilentEngine", seconds=2)
    assert set(psutil.Process().children()) == before


@awaited
async def test_a_stuck_child_meets_the_deadline_of_a_call_and_is_stopped(tmp_path: Path) -> None:
    child = await start(tmp_path, "child_parts:StuckEngine")
    await child.call("load", seconds=30, **weights(tmp_path))
    submit(child, "a")
    with pytest.raises(DeadlineError, match=r"waited 0\.5 s for 'stats'"):
        while True:
            await child.call("stats", seconds=0.5)
    pid = child.pid
    await child.stop(grace=0.2)
    assert await until_gone(pid)


@awaited
async def test_ten_engines_at_once_do_not_clash(tmp_path: Path) -> None:
    events = [Events() for _ in range(10)]
    children = await asyncio.gather(*(start(tmp_path, events=one, seconds=120) for one in events))
    published = weights(tmp_path)
    await asyncio.gather(*(child.call("load", seconds=60, **published) for child in children))
    for number, child in enumerate(children):
        submit(child, f"request of {number}")
    ends = [await asyncio.wait_for(one.generated.get(), 60) for one in events]
    assert [end["id"] for end in ends] == [f"request of {number}" for number in range(10)]
    # Each child holds one socket: its own, none of a sibling's.
    assert [len(sockets(child.pid)) for child in children] == [1] * 10
    await asyncio.gather(*(child.stop(grace=5) for child in children))
    assert all([await until_gone(child.pid) for child in children])


def sockets(pid: int) -> list[str]:
    links = (link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir())
    return [link for link in links if link.startswith("socket:")]


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_child_process import start, submit, weights

async def main(folder):
    child = await start(folder, sys.argv[3])
    await child.call("load", seconds=30, **weights(folder))
    submit(child, "a", max_new=9000)
    print(child.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize(("kind", "stopped_first"), [("random", True), ("child_parts:StuckEngine", False)])
@awaited
async def test_a_killed_parent_takes_its_child_with_it(tmp_path: Path, kind: str, stopped_first: bool) -> None:
    here = Path(__file__).parent
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(here), kind],
        cwd=here.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        child = int(await asyncio.to_thread(parent.stdout.readline))
        assert psutil.pid_exists(child)
        if stopped_first:
            parent.send_signal(signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait(timeout=30)
    assert await until_gone(child)
