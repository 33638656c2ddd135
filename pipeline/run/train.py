"""A whole run: its folder, its cluster, its view, its session; and what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client

from libra.pipeline.config import RunConfig, to_plain
from libra.pipeline.run.cluster import connected
from libra.pipeline.run.session import Started, run_session
from libra.pipeline.run.state import MAY_DIFFER, RunState
from libra.pipeline.store.lock import RunLock
from libra.pipeline.store.run_folder import RunFolder
from libra.pipeline.view.display import Display
from libra.pipeline.view.events import RunEnded, RunStarted
from libra.pipeline.view.view import View
from libra.resources.handles import BatchHandle
from libra.resources.kv.ownership import reap_arenas
from libra.resources.weights import reap_weight_directories

TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a run: its folder, what ``summary.json`` says, and the batches on disk, by version."""

    run_dir: Path
    summary: dict[str, Any]
    batches: tuple[BatchHandle, ...]


async def train(
    config: RunConfig, *, client: Client | None, resume: bool, display: Display | None, started: Started
) -> RunResult:
    """Run ``config`` to its last step on ``client``'s cluster (None: the one that ``config.cluster`` asks for).

    ``started(loop, client, run id)`` is called when the loop is about to run. Raises the error that ended the run;
    whatever happens, the folder can be resumed and nothing of the run is left behind on the cluster.
    """
    reap_weight_directories()
    reap_arenas()
    plain = to_plain(config)
    folder = RunFolder.resume(config.run_dir, plain, MAY_DIFFER) if resume else RunFolder.create(config.run_dir, plain)
    # Before the view opens its files: a folder that another process is writing to is left alone.
    with RunLock.acquire(folder.path, "training"):
        return await _train(config, folder, client, resume, display, started)


async def _train(
    config: RunConfig, folder: RunFolder, client: Client | None, resume: bool, display: Display | None, started: Started
) -> RunResult:
    view = View(config.run_dir, display, resume)
    try:
        async with (
            opened(config, folder, resume, view) as state,
            connected(config, client, state.folder.logs) as cluster,
        ):
            version = state.books.ledger.version
            run_dir, dashboard = str(config.run_dir), cluster.dashboard
            view.emit(RunStarted(time.time(), config.name, run_dir, config.steps, version, dashboard))
            await run_session(config, state, cluster.client, view.emit, started)
            batches = tuple(BatchHandle(version, path, {}) for version, path in _stored(state.folder, config.steps))
        view.emit(RunEnded(time.time(), "finished"))
    except asyncio.CancelledError:
        view.emit(RunEnded(time.time(), "interrupted"))
        raise
    except BaseException as error:
        view.emit(RunEnded(time.time(), "failed", str(error)))
        raise
    finally:
        view.close()
    return RunResult(config.run_dir, view.monitor.summary(), batches)


@asynccontextmanager
async def opened(config: RunConfig, folder: RunFolder, resume: bool, view: View) -> AsyncIterator[RunState]:
    """The run's state, closed at the end; the view ticks meanwhile."""
    state = (RunState.resume if resume else RunState.create)(config, folder, view.emit)
    ticking = asyncio.create_task(_tick(view))
    try:
        yield state
    finally:
        ticking.cancel()
        state.close()


async def _tick(view: View) -> None:
    while True:
        view.tick()
        await asyncio.sleep(TICK_SECONDS)


def _stored(folder: RunFolder, steps: int) -> list[tuple[int, str]]:
    return [(v, str(path)) for v in range(steps) if (path := folder.batch(v)).exists()]
