"""A local cluster of one run: a scheduler with the plugin and one worker a role, each in a process of its own.

    async with LibraLocalCluster({"rollout": 1, "tool": 1, "reward": 1, "train": 1}, asynchronous=True) as cluster:
        async with Client(cluster, asynchronous=True) as client: ...

Invariants: every port is bound to ``host`` and chosen by the system; when it has started, all workers are connected; a
worker that dies comes back under its name; when it is closed, or its process dies, none of its processes is left.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster

from libra.resources.cluster.devices import Gpu, environment_of
from libra.resources.cluster.processes import GUARD, Place, SchedulerProcess, WorkerProcess
from libra.resources.errors import ClusterError
from libra.resources.tags import ROLES, Role, capability

logger = logging.getLogger("distributed.libra")

TUNING = "libra.resources.cluster.tuning"
PRELOAD = "libra.scheduler_plugin.preload"
SLOTS: dict[Role, int] = {"rollout": 512, "tool": 64, "reward": 16, "train": 1}
"""Tasks that a worker of a role holds at once. Bodies are coroutines, so a slot costs next to nothing."""


class LibraLocalCluster(SpecCluster):
    """``workers``: how many of each role; they are called ``rollout-0``, ``rollout-1``, … ``slots``: tasks at once by
    role, where `SLOTS` shall not hold. ``gpus``: those that a worker gets, by its name; the others see what this
    process sees. ``logs``: folder for the processes' output (None: a temporary one, gone with the cluster).
    ``preload``: the module that registers the scheduler plugin. ``asynchronous`` as in Dask.

    Raises `ClusterError` with the end of the log of the process that did not start.
    """

    def __init__(
        self,
        workers: Mapping[Role, int],
        *,
        slots: Mapping[Role, int] | None = None,
        gpus: Mapping[str, Sequence[Gpu]] | None = None,
        host: str = "127.0.0.1",
        dashboard: bool = True,
        logs: Path | None = None,
        start_seconds: float = 60.0,
        stop_seconds: float = 10.0,
        preload: str = PRELOAD,
        asynchronous: bool = False,
    ) -> None:
        self._temporary = None if logs is not None else tempfile.TemporaryDirectory(prefix="libra-cluster-")
        folder = logs if logs is not None else Path(str(self._temporary and self._temporary.name))
        folder.mkdir(parents=True, exist_ok=True)
        self._place = Place(folder, start_seconds, stop_seconds)
        self._host = host
        options = {
            "host": host,
            "port": 0,
            "dashboard": dashboard,
            "dashboard_address": f"{host}:0",
            "preload": [GUARD, preload, TUNING],
        }
        specs = {
            f"{role}-{number}": self._worker(role, {**SLOTS, **(slots or {})}[role])
            for role in ROLES
            for number in range(workers.get(role, 0))
        }
        for name, dealt in (gpus or {}).items():
            specs[name]["options"]["environment"] = environment_of(dealt)
        super().__init__(
            workers=specs,
            scheduler={"cls": SchedulerProcess, "options": {"options": options, "place": self._place}},
            name="libra",
            asynchronous=asynchronous,
        )

    @property
    def logs(self) -> Path:
        """Folder of the processes' output."""
        return self._place.logs

    def _worker(self, role: Role, slots: int) -> dict[str, Any]:
        options = {
            "host": self._host,
            "dashboard": False,
            "dashboard_address": f"{self._host}:0",
            "nthreads": slots,
            "resources": {capability(role): slots},
            "memory_limit": 0,
            "death_timeout": self._place.start_seconds,
            "preload": [GUARD, TUNING],
        }
        process = {"options": options, "place": self._place, "lost": self._on_lost, "environment": {}}
        return {"cls": WorkerProcess, "options": process}

    async def _start(self) -> None:
        try:
            await super()._start()
        except RuntimeError as error:
            # Dask wraps whatever kept the scheduler from starting; ours says what to do.
            if isinstance(error.__cause__, ClusterError):
                raise error.__cause__ from None
            raise

    async def _correct_state_internal(self) -> None:
        await super()._correct_state_internal()
        if self.worker_spec:
            await self._until_connected()

    async def _until_connected(self) -> None:
        until = time.monotonic() + self._place.start_seconds
        while missing := set(self.worker_spec) - {w["name"] for w in self.scheduler_info["workers"].values()}:
            dead = [w.died for name, w in self.workers.items() if name in missing and w.died]
            if dead:
                raise ClusterError(f"{dead[0]}")
            if time.monotonic() > until:
                raise ClusterError(
                    f"{', '.join(sorted(missing))} did not connect to the scheduler within "
                    f"{self._place.start_seconds:g} s; see the logs in {self.logs}"
                )
            await asyncio.sleep(0.02)

    def _on_lost(self, name: str, reason: str) -> bool:
        """Whether to start a worker again: not without a scheduler, and not once the cluster closes."""
        scheduler = self.scheduler.process
        if self.status != Status.running or scheduler is None or scheduler.returncode is not None:
            return False
        logger.warning("worker %s %s and is started again; its log is in %s", name, reason, self.logs)
        return True

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # Not SpecCluster's own, which gives a lost worker up after a while: `WorkerProcess` brings it back.
        Cluster._update_worker_status(self, op, msg)

    async def _close(self) -> None:
        if isinstance(self.scheduler, SchedulerProcess) and self.scheduler.died:
            # Nobody answers: Dask would try to reach the scheduler for long, once to retire workers and once to end it.
            self.scheduler.status = Status.closed
            self.shutdown_scheduler = False
        await super()._close()
        if self._temporary is not None:
            self._temporary.cleanup()
