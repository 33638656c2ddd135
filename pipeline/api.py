"""The public API: load a config, run it, compose its steps.

Invariants: `Run.fit` and `Run.step` drive the same loop, which goes on in the background between steps (rollouts run up
to α steps ahead); closing a run releases its cluster and leaves a folder that can be resumed.

    >>> from libra import Run, load_config                      # doctest: +SKIP
    >>> result = Run(load_config("scripted")).fit()             # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from distributed import Client, Future
from distributed.utils import LoopRunner

from libra.pipeline.config import RunConfig, load_config
from libra.pipeline.run.loop import RunLoop
from libra.pipeline.run.train import RunResult, train
from libra.pipeline.view.display import Display
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.codec import pack
from libra.resources.errors import ClusterError
from libra.resources.handles import BatchHandle
from libra.resources.keys import TaskKey
from libra.tasks.step import step as step_body

__all__ = ["BatchHandle", "LibraLocalCluster", "Run", "RunResult", "load_config"]


@dataclass(frozen=True, slots=True)
class _Started:
    loop: RunLoop
    client: Client
    run: str


class Run:
    """One training run.

    ``config``: a `RunConfig`, or what `load_config` takes. ``client``: a Dask client whose scheduler has the plugin;
    None: the cluster that ``config.cluster`` asks for. ``resume``: go on with the run in ``config.run_dir``.
    ``display``: where to show the run (None: nowhere). Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        config: RunConfig | str | Path,
        *,
        client: Client | None = None,
        resume: bool = False,
        display: Display | None = None,
    ) -> None:
        self.config = config if isinstance(config, RunConfig) else load_config(config)
        self._client, self._resume, self._display = client, resume, display
        self._started: ConcurrentFuture[_Started] = ConcurrentFuture()
        self._result: ConcurrentFuture[RunResult] | None = None
        self._task: asyncio.Task[RunResult] | None = None
        self._ended = threading.Event()
        self._runner: LoopRunner | None = None
        self._steps = 0

    def fit(self) -> RunResult:
        """Train every step that is left, and return what came of it. Raises the error that ended the run."""
        result = self._start()
        if (started := self._until_started()) is not None:
            self._steps = self.config.steps - started.loop.begins_at
            self._allow(started, self.config.steps)
        return result.result()

    def step(self) -> Future:
        """Let one more step train; a Dask future of its `BatchHandle` (trajectories as collections, measures).

        The future is an edge like any other: pass it to ``client.submit``. Raises `ClusterError` after the last step.
        """
        self._start()
        started = self._until_started()
        version = self.config.steps if started is None else started.loop.begins_at + self._steps
        if started is None or version >= self.config.steps:
            raise ClusterError(
                f"the run has {self.config.steps} steps and all are asked for; raise steps, or stop here"
            )
        self._steps += 1
        self._allow(started, version + 1)
        key = str(TaskKey("step", version, started.run, "batch"))
        blob = pack({"run": started.run, "version": version})
        return started.client.submit(step_body, blob, key=key, pure=False)

    def close(self) -> None:
        """End the run where it is; `fit` with ``resume=True`` goes on from there."""
        if self._task is not None and not self._ended.is_set():
            self._event_loop().call_soon_threadsafe(self._task.cancel)
            self._ended.wait()
        if self._runner is not None:
            self._runner.stop()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> ConcurrentFuture[RunResult]:
        if self._result is None:
            self._result = asyncio.run_coroutine_threadsafe(self._run(), self._event_loop())
        return self._result

    async def _run(self) -> RunResult:
        self._task = asyncio.current_task()
        try:
            return await train(
                self.config,
                client=self._client,
                resume=self._resume,
                display=self._display,
                started=self._on_started,
            )
        finally:
            self._ended.set()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the run lives on: the client's, or one of its own in the background."""
        if self._client is not None:
            return self._client.loop.asyncio_loop
        if self._runner is None:
            self._runner = LoopRunner(asynchronous=False)
            self._runner.start()
        return self._runner.loop.asyncio_loop

    def _on_started(self, loop: RunLoop, client: Client, run: str) -> None:
        if self._steps == 0:
            loop.allow(loop.begins_at)
        self._started.set_result(_Started(loop, client, run))

    def _until_started(self) -> _Started | None:
        """The running loop; None if a resumed run had nothing left to do; the error of a run that did not begin."""
        assert self._result is not None
        while not self._started.done():
            if self._result.done():
                self._result.result()
                return None
            threading.Event().wait(0.02)
        return self._started.result()

    def _allow(self, started: _Started, version: int) -> None:
        self._event_loop().call_soon_threadsafe(started.loop.allow, version)
