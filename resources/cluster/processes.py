"""One Dask process each for the scheduler and every worker of a local cluster.

distributed's own subprocess classes, with what a long run needs beside: output goes to a file (theirs reads the
scheduler's pipe only as it ends, so a talkative scheduler blocks), Ctrl-C reaches the driver alone (a session of their
own), ending is a request first and a kill after a grace, a worker that dies is started again, and a process that does
not start says why.

Workers run without a nanny: it would double the processes of a small machine, and what it is for (restarts) is done
here. Nothing outlives the launcher: see `libra.resources.cluster.guard`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from distributed.deploy.subprocess import SubprocessScheduler, SubprocessWorker

from libra.resources.cluster.guard import LAUNCHER
from libra.resources.dask_settings import inherited
from libra.resources.errors import ClusterError

logger = logging.getLogger("distributed.libra")

GUARD = "libra.resources.cluster.guard"
_ENVIRONMENT = {
    # What a nanny would set: one thread for libraries, and freed memory goes back to the system.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
_LOG_TAIL = 4000
_RESTARTS = 10
_STABLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how long: the folder of log files, seconds to start, seconds to end by itself."""

    logs: Path
    start_seconds: float
    stop_seconds: float


async def spawn(command: Sequence[str], log: Path, own: Mapping[str, str] = {}) -> asyncio.subprocess.Process:
    """Start a Dask process that writes to ``log`` and ends when this process does. ``own``: variables of its own."""
    environment = {**_ENVIRONMENT, **os.environ, **inherited(), **own, LAUNCHER: str(os.getpid())}
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


async def end(process: asyncio.subprocess.Process, grace: float) -> None:
    """Ask a process to end; after ``grace`` seconds kill it and everything below it."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace)
        except TimeoutError:
            logger.warning("process %d did not end within %g s: killed", process.pid, grace)
            try:
                below = psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                below = []
            for each in below:
                each.kill()
            process.kill()
            await process.wait()


def size(log: Path) -> int:
    """Bytes of a log so far: what a process that is started now adds comes after them."""
    return log.stat().st_size if log.exists() else 0


def tail(log: Path, start: int) -> str:
    """The end of a log, for messages: of what was added since it had ``start`` bytes."""
    text = log.read_bytes()[start:][-_LOG_TAIL:].decode(errors="replace").strip() if log.exists() else ""
    return f"its log ({log}) ends with:\n{text}" if text else f"it said nothing in its log ({log})"


def dask_spec(cls: str, options: dict[str, Any], *arguments: str) -> list[str]:
    """The command that runs one Dask server."""
    specification = json.dumps({"cls": cls, "opts": options})
    return [sys.executable, "-m", "dask", "spec", *arguments, "--spec", specification]


class SchedulerProcess(SubprocessScheduler):
    """The scheduler."""

    process: asyncio.subprocess.Process | None

    def __init__(self, options: dict[str, Any], place: Place) -> None:
        super().__init__({**options, "scheduler_file": str(place.logs / "scheduler.json")})
        self.place = place

    async def _start(self) -> None:
        log, written = self.place.logs / "scheduler.log", Path(self.scheduler_kwargs["scheduler_file"])
        written.unlink(missing_ok=True)
        start = size(log)
        self.process = await spawn(dask_spec("distributed.Scheduler", self.scheduler_kwargs), log)
        until = time.monotonic() + self.place.start_seconds
        while (identity := _read(written)) is None:
            if self.process.returncode is not None:
                code = self.process.returncode
                raise ClusterError(f"the scheduler exited with {code} as it started; {tail(log, start)}")
            if time.monotonic() > until:
                await end(self.process, 1.0)
                raise ClusterError(f"the scheduler was not up after {self.place.start_seconds:g} s; {tail(log, start)}")
            await asyncio.sleep(0.02)
        self.address = identity["address"]

    @property
    def died(self) -> bool:
        """Whether it was started and is not there any more."""
        return self.process is not None and self.process.returncode is not None

    async def close(self) -> None:
        """End the process."""
        if self.process is not None:
            await end(self.process, self.place.stop_seconds)
            self.process = None
        await super().close()


class WorkerProcess(SubprocessWorker):
    """One worker, with ``environment`` beside what it inherits. When it dies, ``lost(name, reason)`` says whether it is
    started again."""

    process: asyncio.subprocess.Process | None

    def __init__(
        self,
        scheduler: str,
        name: str,
        options: dict[str, Any],
        place: Place,
        lost: Callable[[str, str], bool],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(scheduler, "distributed.Worker", name, {**options, "name": name})
        self.place, self._lost, self._environment = place, lost, environment
        self.log = place.logs / f"{name}.log"
        self._log_start = 0
        self._watching: asyncio.Task[None] | None = None

    async def _start(self) -> None:
        await self._spawn()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the process for good."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self.process is not None:
            await end(self.process, self.place.stop_seconds)
            self.process = None
        await super().close()

    @property
    def died(self) -> str | None:
        """Why it is not there, if it is not."""
        if self.process is None or self.process.returncode is None:
            return None
        return f"worker {self.name} exited with {self.process.returncode}; {tail(self.log, self._log_start)}"

    async def _spawn(self) -> None:
        self._log_start = size(self.log)
        command = dask_spec(self.worker_class, self.worker_kwargs, self.scheduler)
        self.process = await spawn(command, self.log, self._environment)

    async def _watch(self) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            assert self.process is not None
            code = await self.process.wait()
            failures = 1 if time.monotonic() - started > _STABLE_SECONDS else failures + 1
            if not self._lost(str(self.name), f"exited with {code}") or failures > _RESTARTS:
                return
            await asyncio.sleep(min(0.1 * 2 ** (failures - 1), 5.0))
            await self._spawn()


def _read(scheduler_file: Path) -> dict[str, Any] | None:
    try:
        identity: dict[str, Any] = json.loads(scheduler_file.read_text())
    except (OSError, json.JSONDecodeError):  # not there yet, or half written
        return None
    return identity
