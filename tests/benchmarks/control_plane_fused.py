"""What one segment costs the control plane in the fused form: the real body of a residence, an engine, a tool and an
environment that do nothing, the policy asked at every return, every segment journaled as a run does, real scheduler and
worker processes, the dashboard on. In the rows named ``moves`` a third of the returns moves its trajectory.

Process CPU is what to compare between machines and days; wall time depends on what else runs.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cluster_parts import Play, playing, spec

from benchmarks.control_plane import Cpu
from benchmarks.rows import Row, Rows
from libra.pipeline.ledger.draft import Draft
from libra.pipeline.ledger.events import Segmented, to_record
from libra.pipeline.run.forms import Wire
from libra.pipeline.run.residences import Residences
from libra.pipeline.store.journal import Journal
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.cluster.tuning import tune
from libra.resources.codec import segment_from_wire, tool_return_from_wire
from libra.resources.types import TrajectoryId

STAYS: dict[str, Any] = {"kind": "context_bounds", "margin": 50}
MOVES: dict[str, Any] = {"kind": "benchmarks.fused_bodies:Restless"}
SIZES = {"2048x8": (2048, 8, STAYS), "8192x4": (8192, 4, STAYS), "2048x8_moves": (2048, 8, MOVES)}
"""Name → trajectories, segments of each, policy. Prompts have 200 tokens, and so has every segment and payload."""
LIMIT_SEGMENTS, LIMIT_MICROSECONDS = 6000.0, 60.0


@asynccontextmanager
async def bench_cluster(policy: dict[str, Any]) -> AsyncIterator[tuple[Play, Cpu]]:
    """Two rollout workers of one bucket, claimed."""
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    run = spec(
        environment={"kind": "benchmarks.fused_bodies:Nothing", "inline": True},
        buckets=[[1, None, 2]],
        roles={"rollout": 2, "tool": 0, "reward": 0, "train": 0},
        policy=policy,
        max_context=1 << 20,
        engine={"max_context": 1 << 20},
    )
    preload = "benchmarks.fused_bodies"
    async with (
        LibraLocalCluster({"rollout": 2}, slots={"rollout": 8192}, preload=preload, asynchronous=True) as cluster,
        playing(cluster.scheduler_address, run) as play,
    ):
        yield play, Cpu.of_cluster()


async def trajectory(play: Play, form: Residences, journal: Journal, name: str, segments: int) -> None:
    """One trajectory, its segments journaled and added to its draft as a run does."""
    prompt = np.arange(200, dtype=np.int32)
    ident = TrajectoryId.parse(name)
    draft = Draft(ident, 0, 0, {}, prompt, oldest=0, max_turns=segments - 1, started=0.0)

    def grow(tool: Wire | None, segment: Wire, action: Wire) -> None:
        journal.append(to_record(Segmented(name, tool, segment, action)))
        draft.grow(None if tool is None else tool_return_from_wire(tool), segment_from_wire(segment), action)

    await form.advance(draft, 0, grow)
    play.driver.end(name, None)
    assert len(draft.steps) == segments


async def measure(play: Play, cpu: Cpu, run: int, trajectories: int, segments: int) -> dict[str, float]:
    """Play ``trajectories`` at once; figures per segment."""
    form = Residences(play.driver, play.run, max_turn_tokens=256)
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as folder, Journal(Path(folder)) as journal:
        cpu.begin()
        started = time.perf_counter()
        names = [f"g{number}m{run}" for number in range(trajectories)]
        await asyncio.gather(*(trajectory(play, form, journal, name, segments) for name in names))
        await journal.durable()
        wall, total = time.perf_counter() - started, trajectories * segments
        parts = {part: cpu.used(part) / total * 1e6 for part in ("scheduler", "worker", "driver")}
    return {"segments_per_s": total / wall, **{f"{part}_us_per_segment": value for part, value in parts.items()}}


async def rows_of(name: str, repeats: int) -> Rows:
    trajectories, segments, policy = SIZES[name]
    limits = {"segments_per_s": LIMIT_SEGMENTS, "scheduler_us_per_segment": LIMIT_MICROSECONDS}
    rows: Rows = {}
    async with bench_cluster(policy) as (play, cpu):
        await measure(play, cpu, 0, 64, 2)  # warm
        runs = [await measure(play, cpu, 1 + repeat, trajectories, segments) for repeat in range(repeats)]
    for figure in runs[0]:
        median = float(np.median([run[figure] for run in runs]))
        unit = "segments/s" if figure == "segments_per_s" else "µs CPU"
        limit = limits.get(figure) if policy is STAYS else None
        rows[f"control_plane.fused.{name}.{figure}"] = Row(median, unit, limit, f"median of {repeats}")
    return rows


def run() -> Rows:
    tune()  # as `libra train` does
    rows: Rows = {}
    for name in SIZES:
        rows |= asyncio.run(rows_of(name, repeats=3))
    return rows
