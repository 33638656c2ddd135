"""After the loss of a tool worker: the longest time without a finished segment while trajectories are runnable."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import psutil
from cluster_parts import Play

from benchmarks.control_plane import bench_cluster, chain
from benchmarks.rows import Row, Rows

TRAJECTORIES, SEGMENTS, RUNS = 128, 40, 3
LIMIT_SECONDS = 5.0


async def longest_gap() -> float:
    """Kill -9 of one of two tool workers a third of the way; seconds of the longest gap between results after it."""
    async with bench_cluster(tools=2) as (play, _):
        await asyncio.gather(*(chain(play, "0", n, 2, 200) for n in range(16)))  # warm
        times: list[float] = []
        chains = [asyncio.create_task(chain(play, "1", n, SEGMENTS, 200)) for n in range(TRAJECTORIES)]
        watching = asyncio.create_task(_note_results(play, times))
        while len(times) < TRAJECTORIES * SEGMENTS / 3:
            await asyncio.sleep(0.05)
        os.kill(_tool_worker(), signal.SIGKILL)
        killed = time.perf_counter()
        await asyncio.gather(*chains)
        watching.cancel()
        after = [killed, *(t for t in times if t > killed)]
        return float(np.diff(after).max())


async def _note_results(play: Play, times: list[float]) -> None:
    seen = play.driver.results
    while True:
        await asyncio.sleep(0.005)
        now = time.perf_counter()
        times.extend([now] * (play.driver.results - seen))
        seen = play.driver.results


def _tool_worker() -> int:
    for process in psutil.Process().children(recursive=True):
        if "capable:tool" in " ".join(process.cmdline()):
            return int(process.pid)
    raise RuntimeError("no tool worker among the children of this process")


def run() -> Rows:
    gaps = [asyncio.run(longest_gap()) for _ in range(RUNS)]
    note = f"worst of {RUNS}: {max(gaps):.2f} s"
    return {"recovery.tool_worker_lost.longest_gap_s": Row(float(np.median(gaps)), "s", LIMIT_SECONDS, note)}
