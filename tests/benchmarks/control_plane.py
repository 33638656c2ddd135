"""What one segment costs the control plane: a tool task and the rollout task that continues from it, bodies that do
nothing, the whole context as the rollout's argument, real scheduler and worker processes, the dashboard on.

Process CPU is what to compare between machines and days; wall time depends on what else runs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import psutil
from cluster_parts import Play, label_cluster, playing, spec

from benchmarks import control_bodies as bodies
from benchmarks.rows import Row, Rows
from libra.pipeline.driver.transport import Node, Opening
from libra.resources.codec import pack

SIZES = {"2048x8": (2048, 8, 200), "8192x4": (8192, 4, 200), "512x8_context2k_8k": (512, 8, 2000)}
"""Name → trajectories, segments of each, prompt tokens. In the last one a segment's context grows from 2 K to 8 K
tokens by larger steps."""
LIMIT_SEGMENTS, LIMIT_MICROSECONDS = 700.0, 400.0


@dataclass(slots=True)
class Cpu:
    """CPU seconds by part of the system."""

    processes: dict[str, psutil.Process]
    start: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_cluster(cls) -> Self:
        """This process, and the scheduler and the workers that it has started."""
        found = {"driver": psutil.Process()}
        for process in psutil.Process().children(recursive=True):
            try:
                line = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue  # what an earlier benchmark has left unreaped
            if "distributed.Scheduler" in line:
                found["scheduler"] = process
            elif "distributed.Worker" in line:
                found[f"worker{len(found)}"] = process
        return cls(found)

    def begin(self) -> None:
        self.start = {name: self._seconds(name) for name in self.processes}

    def used(self, part: str) -> float:
        return sum(self._seconds(n) - self.start[n] for n in self.processes if n.startswith(part))

    def _seconds(self, name: str) -> float:
        times = self.processes[name].cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def bench_cluster(tools: int = 1) -> AsyncIterator[tuple[Play, Cpu]]:
    """Two rollout workers and ``tools`` tool workers, claimed; their bodies are importable."""
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    workers = {"rollout": 2, "tool": tools}
    slots = {"rollout": 8192, "tool": 8192}
    run = spec(roles={"rollout": 2, "tool": tools, "reward": 0, "train": 0}, policy={"kind": "context_bounds"})
    async with (
        label_cluster(workers, slots=slots, asynchronous=True) as cluster,  # type: ignore[arg-type]
        playing(cluster.scheduler_address, run) as play,
    ):
        yield play, Cpu.of_cluster()


async def chain(play: Play, run: str, number: int, segments: int, prompt: int) -> None:
    """One trajectory: its context grows by a payload and a segment at a time (more in the long row)."""
    growth = 2 * bodies.GROWTH if prompt <= 200 else 6000 // segments
    name = f"g{number}m{run}"
    for index in range(segments):
        context = np.zeros(prompt + index * growth, np.int32)
        key = play.key("rollout", name, index)
        node = {"key": key, "tokens": context, "trajectory": name, "turn": index, "max_new": 48, "heldout": False}
        if index == 0:
            await play.driver.submit([Node(key, bodies.rollout, pack(node))], Opening(len(context), name))
            continue
        called = play.key("tool", name, index - 1)
        call = {"key": called, "trajectory": name, "turn": index - 1, "call": {"key": "a"}, "context": len(context)}
        tool = Node(called, bodies.tool, pack(call))
        await play.driver.submit([tool, Node(key, bodies.rollout, pack(node), called)])
    play.driver.end(name, None)


async def measure(play: Play, cpu: Cpu, run: int, trajectories: int, segments: int, prompt: int) -> dict[str, float]:
    """Run ``trajectories`` chains at once; figures per segment."""
    cpu.begin()
    started = time.perf_counter()
    await asyncio.gather(*(chain(play, str(run), n, segments, prompt) for n in range(trajectories)))
    wall, total = time.perf_counter() - started, trajectories * segments
    parts = {part: cpu.used(part) / total * 1e6 for part in ("scheduler", "worker", "driver")}
    return {"segments_per_s": total / wall, **{f"{part}_us_per_segment": value for part, value in parts.items()}}


async def everything(repeats: int) -> Rows:
    rows: Rows = {}
    async with bench_cluster() as (play, cpu):
        await measure(play, cpu, 0, 64, 2, 200)  # warm
        for name, size in SIZES.items():
            runs = [await measure(play, cpu, 1 + repeat, *size) for repeat in range(repeats)]
            for figure in runs[0]:
                limit = {"segments_per_s": LIMIT_SEGMENTS, "scheduler_us_per_segment": LIMIT_MICROSECONDS}.get(figure)
                median = float(np.median([run[figure] for run in runs]))
                unit = "segments/s" if figure == "segments_per_s" else "µs CPU"
                rows[f"control_plane.pair.{name}.{figure}"] = Row(median, unit, limit, f"median of {repeats}")
    return rows


def run() -> Rows:
    return asyncio.run(everything(repeats=3))
