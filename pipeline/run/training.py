"""The training side as the driver sees it: one trainer, driven by Dask tasks on the train worker.

Invariants: the trainer's version equals the ledger's when `train` returns; after the loss of the trainer the newest
checkpoint is restored and the batches closed since are trained again in order, so the weights are those that would have
been; a checkpoint holds the trainer's files and the books of the same version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from libra.pipeline.config import DeadlinesConfig
from libra.pipeline.driver.driver import Driver
from libra.pipeline.driver.transport import Node
from libra.pipeline.ledger.ledger import Ledger
from libra.pipeline.run.books import step_trained
from libra.pipeline.run.fleet import Fleet
from libra.pipeline.run.waits import Emit, bounded
from libra.pipeline.view.events import Failed, Note
from libra.resources.batches import BatchReader
from libra.resources.codec import pack
from libra.resources.errors import ClusterError, InfraError
from libra.resources.keys import Kind, TaskKey
from libra.resources.types import WeightVersion
from libra.tasks import train as bodies

Measures = dict[str, Any]


class TrainingSide:
    """Calls the trainer; recovers it from ``newest_checkpoint()`` (None: from version 0) when it is lost, at most
    ``retries`` times a call."""

    def __init__(
        self,
        driver: Driver,
        fleet: Fleet,
        run: str,
        deadlines: DeadlinesConfig,
        retries: int,
        newest_checkpoint: Callable[[], tuple[int, Path] | None],
        emit: Emit,
    ) -> None:
        self._driver, self._fleet, self._run = driver, fleet, run
        self._deadlines, self._retries = deadlines, retries
        self._newest_checkpoint, self._emit = newest_checkpoint, emit
        self._attempts = count()

    async def initialise(self) -> Measures:
        """Bring up version 0 (a checkpoint directory of the user, the cold start's cache, or the cold start)."""
        return await self._persist(self._initialise, self._ready)

    async def restore(self, ledger: Ledger) -> None:
        """Load the newest checkpoint and train the batches closed after it again, up to the ledger's version."""
        await self._persist(lambda: self._restore(ledger), self._ready)

    async def train(self, ledger: Ledger, path: Path) -> Measures:
        """One optimizer step on the batch at ``path`` for the ledger's version."""
        return await self._persist(lambda: self._train_once(ledger.version, path), lambda: self._restore(ledger))

    async def publish(self, ledger: Ledger, directory: Path) -> WeightVersion:
        """Write the weights of the ledger's version."""
        fields, seconds = {"directory": str(directory)}, self._deadlines.publish
        call = partial(self._call, "publish", bodies.publish, ledger.version, fields, seconds)
        result = await self._persist(call, lambda: self._restore(ledger))
        return WeightVersion(int(result["version"]), str(result["path"]), str(result["digest"]))

    async def save(self, ledger: Ledger, directory: Path) -> None:
        """Write the trainer's checkpoint files of the ledger's version into ``directory``."""
        fields, seconds = {"directory": str(directory)}, self._deadlines.train
        call = partial(self._call, "checkpoint", bodies.checkpoint, ledger.version, fields, seconds)
        await self._persist(call, lambda: self._restore(ledger))

    async def _initialise(self) -> Measures:
        await self._ready()
        return await self._call("initialise", bodies.initialise, 0, {}, self._deadlines.initialise)

    async def _restore(self, ledger: Ledger) -> Measures:
        if (newest := self._newest_checkpoint()) is None:
            return await self._initialise()
        await self._ready()
        version, directory = newest
        fields = {"directory": str(directory)}
        restored = await self._call("restore", bodies.restore, version, fields, self._deadlines.train)
        for replayed in range(version, ledger.version):
            path = ledger.closed.get(replayed)
            if path is None:
                raise ClusterError(
                    f"batch {replayed} lies between the checkpoint of version {version} and version {ledger.version}, "
                    "but its trajectories are not on disk; resume from a copy of the run folder, or start anew"
                )
            measures = await self._train_once(replayed, Path(path))
            # The view may not have been told before the run was killed.
            self._emit(await asyncio.to_thread(step_trained, replayed, Path(path), measures, replayed=True))
            self._emit(Note(time.time(), f"step {replayed + 1} trained again from the journal"))
        return restored

    async def _train_once(self, version: int, path: Path) -> Measures:
        fields = {"version": version, "path": str(path), "rows": list(range(len(BatchReader(path))))}
        return await self._call("train", bodies.train, version, fields, self._deadlines.train)

    async def _persist(
        self, call: Callable[[], Awaitable[Measures]], recover: Callable[[], Awaitable[object]]
    ) -> Measures:
        """What ``call`` returns; when the trainer is lost, ``recover`` it and call again."""
        failures = 0
        while True:
            try:
                if failures:
                    await recover()
                return await call()
            except InfraError as error:
                failures += 1
                retried = failures <= self._retries
                self._emit(Failed(time.time(), "worker", "trainer", str(error), retried))
                if not retried:
                    raise

    async def _ready(self) -> None:
        seconds = self._deadlines.start
        await bounded(
            self._fleet.until_ready("train"),
            seconds,
            f"a ready train worker ({self._fleet.describe('train')})",
            "the scheduler plugin, which starts the trainer process on it",
            "Raise deadlines.start if the machine is slow; see the run folder's logs/ for the trainer's own words.",
        )

    async def _call(self, kind: Kind, body: Any, version: int, fields: Measures, seconds: float) -> Measures:
        key = str(TaskKey(kind, version, self._run, "rank0", 0, next(self._attempts)))
        blob = pack({"key": key, "seconds": seconds, **fields})
        submitted = self._driver.submit([Node(key, body, blob)])
        # The body has the same deadline and says more; this one is for a body that never starts.
        return await bounded(
            submitted, seconds + self._deadlines.start, f"{key} ({self._fleet.describe('train')})", "the train worker"
        )
