"""A worker in a process of its own: it never imports torch, and its children never outlive it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from child_parts import awaited
from worker_harness import cluster, run_spec, weights, worker_process

from libra.resources import wire
from libra.tasks.envs.hop import HopEnvironment

pytestmark = pytest.mark.cluster

GONE = 10.0


@pytest.mark.parametrize("worker_class", ["distributed.Worker", "distributed.Nanny"])
@awaited
async def test_a_killed_worker_takes_its_engine_with_it(tmp_path: Path, worker_class: str) -> None:
    async with cluster() as c, worker_process(c, worker_class) as address:
        start = {"role": "rollout", "epoch": 1, "spec": run_spec(tmp_path).to_wire(), "tp": 1}
        c.recorder.send(address, wire.START_ROLE, weights=weights(tmp_path), **start)
        await c.recorder.state(1, "ready")
        pids = await c.client.run(os.getpid, workers=[address])
        worker = psutil.Process(pids[address])
        (engine,) = [child for child in worker.children() if "libra.tasks.child.engine_host" in child.cmdline()]
        worker.kill()
        deadline = time.monotonic() + GONE
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the engine outlives its worker"
            await asyncio.sleep(0.05)


@awaited
async def test_no_role_makes_the_worker_import_torch(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(HopEnvironment.make_tokenizer(), encoding="utf-8")
    spec = run_spec(tmp_path, environment={"kind": "hop"}).to_wire()
    async with cluster() as c, worker_process(c, "distributed.Worker") as address:
        for epoch, role in enumerate(("rollout", "tool", "reward", "train")):
            published = weights(tmp_path) if role == "rollout" else None
            fields = {"role": role, "epoch": epoch, "spec": spec, "tp": 1, "weights": published}
            c.recorder.send(address, wire.START_ROLE, **fields)
            await c.recorder.state(epoch, "ready")
        loaded = await c.client.run(lambda: sorted(sys.modules), workers=[address])
        assert "libra.tasks.worker" in loaded[address]
        assert not {"torch", "transformers", "vllm"} & set(loaded[address])
