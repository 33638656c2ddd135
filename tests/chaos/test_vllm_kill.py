"""Whichever of an engine's processes are killed: the role hears of it at once, and all else is gone, with what it had
in shared memory and on disk."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from child_parts import run_spec
from tiny_models import publish, tiny_model
from vllm_parts import SIZES, VLLM, publish_model
from worker_harness import cluster, worker_process

from libra.resources import wire
from libra.resources.errors import InfraError
from libra.resources.kv.ownership import arena_path
from libra.resources.types import WeightVersion
from libra.tasks.child.parent import ChildProcess
from libra.tasks.envs.hop import write_tokenizer

pytestmark = [*VLLM, pytest.mark.chaos]
START = 280.0
NOTICED = 5.0
GONE = 10.0
RUN = secrets.token_hex(4)


def engine_config(tp: int) -> dict[str, Any]:
    engine = {"kind": "vllm", "slots": 4, "max_context": 200, "options": {}}
    return {"engine": engine, "tokenizer": None, "deterministic": False, "place": {"tp": tp}}


async def started(folder: Path, tp: int, deaths: list[str]) -> ChildProcess:
    """An engine's process that has loaded a model."""
    child = await ChildProcess.start(
        "libra.tasks.child.engine_host",
        engine_config(tp),
        name="engine under test",
        log=folder / "engine.log",
        seconds=START,
        threads=1,
        on_event=lambda name, fields: None,
        on_exit=deaths.append,
    )
    weights = publish_model(folder / "weights", 0)
    loaded = await child.call("load", seconds=START, **asdict(weights))
    assert (loaded["version"], loaded["kv_layout"]) == (0, None)
    return child


def family(pid: int) -> dict[str, psutil.Process]:
    """The processes of an engine by what they are called."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        found[" ".join(process.cmdline())] = process
    return found


def named(pid: int, word: str) -> psutil.Process:
    return next(process for name, process in family(pid).items() if word in name)


def belongings(parts: list[psutil.Process]) -> set[Path]:
    """What these processes have in shared memory, and the engine's scratch folder."""
    shared = {
        Path(mapped.path) for part in parts for mapped in part.memory_maps() if mapped.path.startswith("/dev/shm")
    }
    (folder,) = {Path(part.cmdline()[-1]) for part in parts if "libra.tasks.engines.vllm_scratch" in part.cmdline()}
    assert folder.is_dir()
    assert shared
    return shared | {folder}


def assert_cleared(parts: list[psutil.Process], had: set[Path]) -> None:
    """All are gone, with all they had, within `GONE` seconds."""
    until(lambda: gone(parts), GONE, lambda: f"still there: {parts}")
    until(lambda: not any(path.exists() for path in had), GONE, lambda: f"left: {[p for p in had if p.exists()]}")


def until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def gone(processes: list[psutil.Process]) -> bool:
    return not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("doing", ["sampling", "loading"])
def test_the_death_of_a_part_is_the_engines(tmp_path: Path, doing: str) -> None:
    """EngineCore, as it samples; one rank of two, as it loads new weights."""

    async def kill() -> None:
        deaths: list[str] = []
        child = await started(tmp_path, 1 if doing == "sampling" else 2, deaths)
        parts = list(family(child.pid).values())
        assert len(parts) >= 3
        had = belongings(parts)
        load = None
        if doing == "sampling":
            fields = {"max_new": 150, "stop": [], "temperature": 1.0, "stream": 7}
            for name in "abcdef":
                child.send("submit", id=name, sequence=name, tokens=np.arange(9, dtype=np.int32), **fields)
            named(child.pid, "EngineCore").kill()
        else:
            rank = named(child.pid, "Worker")
            rank.suspend()
            weights = publish_model(tmp_path / "weights", 1)
            load = asyncio.create_task(child.call("load", seconds=START, **asdict(weights)))
            await asyncio.sleep(1)
            rank.kill()
        async with asyncio.timeout(NOTICED):
            while not deaths:
                await asyncio.sleep(0.02)
        assert "vLLM is dead" in deaths[0]
        with pytest.raises(InfraError):
            await (load or child.call("stats", seconds=1))
        assert_cleared(parts, had)

    asyncio.run(asyncio.wait_for(kill(), 2 * START))


@pytest.mark.parametrize("victims", ["worker", "nanny, worker and host"])
def test_no_part_outlives_its_worker(tmp_path: Path, victims: str) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    weights = publish(tiny_model("qwen3", vocabulary=480, **SIZES), tmp_path / "weights", 0)
    asyncio.run(asyncio.wait_for(_kill_worker(tmp_path, weights, victims), 2 * START))


async def _kill_worker(tmp_path: Path, weights: WeightVersion, victims: str) -> None:
    """A Dask worker under a nanny, with an engine and its arena. While the engine starts, the worker answers others."""
    tp = 1 if victims == "worker" else 2
    engine = {"kind": "vllm", "slots": 4, "max_context": 200, "kv_arena": 4 * 2**20}
    spec = run_spec(tmp_path, run=RUN, engine=engine, start_seconds=START, load_seconds=START)
    async with cluster() as c, worker_process(c, "distributed.Nanny") as address:
        fields = {"role": "rollout", "epoch": 1, "spec": spec.to_wire(), "tp": tp}
        c.recorder.send(address, wire.START_ROLE, weights=asdict(weights), **fields)
        ready = asyncio.create_task(c.recorder.state(1, "ready", START))
        answers = 0
        while not ready.done():
            pids = await c.client.run(os.getpid, workers=[address])
            answers += 1
            await asyncio.sleep(0.1)
        await ready
        assert answers > 10
        worker = psutil.Process(pids[address])
        nanny = worker.parent()
        assert nanny is not None
        (host,) = [child for child in worker.children() if "libra.tasks.child.engine_host" in child.cmdline()]
        parts = [host, *family(host.pid).values()]
        assert len(parts) >= 3 + tp
        arena = arena_path(RUN, "own").parent
        assert arena.is_dir()
        had = belongings(parts) | {arena}
        for victim in (worker,) if victims == "worker" else (nanny, worker, host):
            victim.kill()
        await asyncio.to_thread(assert_cleared, parts, had)
