"""A real scheduler and real workers in one process; a recorder stands in for the scheduler plugin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from child_parts import run_spec
from dask import config
from distributed import Client, Future, Scheduler, SchedulerPlugin, Worker
from distributed.deploy.subprocess import SubprocessWorker
from distributed.protocol.pickle import dumps

from libra.resources import wire
from libra.resources.bootstrap import Bootstrap
from libra.resources.codec import pack
from libra.resources.types.run import RunSpec
from libra.resources.weights import publish_weights
from libra.tasks.worker import LibraWorker

WAIT = 60.0


class Recorder(SchedulerPlugin):
    """Sends what the scheduler plugin would send and keeps what workers answer."""

    name = "recorder"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.answers: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self.heartbeats: dict[str, Any] = {}
        for op in (wire.ROLE_STATE, wire.WEIGHTS_LOADED, wire.PROGRESS):
            scheduler.stream_handlers[op] = lambda op=op, **fields: self.answers.append({"op": op, **fields})
        scheduler.extensions[wire.EXTENSION] = self

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "memory" and kwargs.get("metadata"):
            self.results[key] = kwargs["metadata"][wire.METADATA]

    def heartbeat(self, worker: Any, data: Any) -> None:
        self.heartbeats[worker.name] = data

    def send(self, worker: str, op: str, **fields: Any) -> None:
        self.scheduler.worker_send(worker, {"op": op, **fields})

    def states(self) -> list[tuple[int, str]]:
        return [(a["epoch"], a["state"]) for a in self.answers if a["op"] == wire.ROLE_STATE]

    async def state(self, epoch: int, state: str, seconds: float = WAIT) -> dict[str, Any]:
        """The report that the role of ``epoch`` is in ``state``; any other end of it is a failure of the test."""

        def find() -> dict[str, Any] | None:
            for answer in self.answers:
                if answer["op"] == wire.ROLE_STATE and answer["epoch"] == epoch:
                    if answer["state"] == state:
                        return answer
                    assert answer["state"] != "failed", answer
            return None

        await until(lambda: find() is not None, f"epoch {epoch} to be {state}; seen: {self.answers}", seconds)
        found = find()
        assert found is not None
        return found


class Cluster:
    """Workers ``a``, ``b``, …, each with its plugin."""

    def __init__(self, scheduler: Scheduler, workers: list[Worker], client: Client, recorder: Recorder) -> None:
        self.scheduler, self.workers, self.client, self.recorder = scheduler, workers, client, recorder
        self._epoch = 0

    def send(self, index: int, op: str, **fields: Any) -> None:
        """Send a message to a worker."""
        self.recorder.send(self.workers[index].address, op, **fields)

    def plugin(self, index: int = 0) -> LibraWorker:
        plugin: LibraWorker = self.workers[index].extensions[wire.EXTENSION]
        return plugin

    def start(self, index: int, role: str, spec: RunSpec, weights: dict[str, Any] | None = None) -> int:
        """Ask for a role; returns the epoch."""
        self._epoch += 1
        fields = {"role": role, "epoch": self._epoch, "spec": spec.to_wire(), "tp": 1, "weights": weights}
        self.send(index, wire.START_ROLE, **fields)
        return self._epoch

    async def ready(self, index: int, role: str, spec: RunSpec, weights: dict[str, Any] | None = None) -> int:
        """Ask for a role and wait until it is ready; returns the epoch."""
        epoch = self.start(index, role, spec, weights)
        await self.recorder.state(epoch, "ready")
        return epoch

    def submit(self, index: int, body: Any, request: dict[str, Any], *after: Future) -> Future:
        """A task on one worker; ``request`` holds its key."""
        address = self.workers[index].address
        return self.client.submit(body, pack(request), *after, key=request["key"], workers=[address], pure=False)

    async def run(self, index: int, body: Any, request: dict[str, Any], *after: Future) -> dict[str, Any]:
        """Run a task and return what it left as its result."""
        await asyncio.wait_for(self.submit(index, body, request, *after), WAIT)
        result: dict[str, Any] = self.recorder.results[request["key"]]
        return result


@asynccontextmanager
async def cluster(workers: int = 1, **worker_options: Any) -> AsyncIterator[Cluster]:
    """A scheduler, ``workers`` workers with 8 task slots each, and a client."""
    options = {"nthreads": 8, "heartbeat_interval": "200ms"} | worker_options
    quiet = {"distributed.worker.profile.enabled": False, "distributed.scheduler.work-stealing": False}
    with config.set(quiet):
        async with AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(
                Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0")
            )
            recorder = Recorder(scheduler)
            scheduler.add_plugin(recorder)
            await scheduler.register_worker_plugin(comm=None, plugin=dumps(Bootstrap()), name="libra", idempotent=True)
            started = [
                await stack.enter_async_context(Worker(scheduler.address, name=name, host="127.0.0.1", **options))
                for name in "abcdef"[:workers]
            ]
            client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
            yield Cluster(scheduler, started, client, recorder)


async def until(condition: Callable[[], Any], what: str, seconds: float = WAIT) -> None:
    """Wait for a condition. The test fails, naming ``what``, if it does not come true."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {seconds:g} s for {what}") from None


@asynccontextmanager
async def worker_process(c: Cluster, worker_class: str) -> AsyncIterator[str]:
    """A worker in a process of its own, with or without a nanny, beside the cluster's own; its address."""
    options = {"nthreads": 4, "name": "own", "host": "127.0.0.1", "dashboard": False}
    worker = SubprocessWorker(c.scheduler.address, worker_class=worker_class, name="own", worker_kwargs=options)
    async with worker:
        await asyncio.wait_for(c.client.wait_for_workers(len(c.workers) + 1), WAIT)
        yield next(ws.address for ws in c.scheduler.workers.values() if ws.name == "own")


def weights(folder: Path, version: int = 0) -> dict[str, Any]:
    """Published weights as they travel."""
    published = publish_weights(folder / "weights", version, {"w": np.full(4, float(version))}, {})
    return {"version": published.version, "path": published.path, "digest": published.digest}


__all__ = ["Cluster", "Recorder", "cluster", "run_spec", "until", "weights", "worker_process"]
