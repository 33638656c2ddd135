"""Memory of the scheduler after 20 steps of 2,048 trajectories × 8 segments, against after 5: it must stay flat."""

from __future__ import annotations

import asyncio

from benchmarks.control_plane import bench_cluster, measure
from benchmarks.rows import Row, Rows

EARLY, LATE = 5, 20
LIMIT = 1.05


async def ratios() -> Rows:
    rows: Rows = {}
    async with bench_cluster() as (play, cpu):
        at: dict[str, int] = {}
        for step in range(1, LATE + 1):
            await measure(play, cpu, step, 2048, 8, 200)
            if step == EARLY:
                at = {name: process.memory_info().rss for name, process in cpu.processes.items()}
        for name, process in cpu.processes.items():
            ratio = process.memory_info().rss / at[name]
            rows[f"control_plane.memory.{name}.rss_{LATE}_over_{EARLY}"] = Row(ratio, "ratio", LIMIT)
    return rows


def run() -> Rows:
    return asyncio.run(ratios())
