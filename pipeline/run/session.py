"""One run on one cluster, from claim to release.

Invariants: a run holds its folder's lock and the cluster's claim while it works; however it ends, its tasks are
cancelled, its roles stopped, its weights' directory removed, and everything journaled is on disk, so that ``--resume``
goes on from there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from distributed import Client

from libra.pipeline.config import RunConfig
from libra.pipeline.driver import dask_private
from libra.pipeline.driver.dask_public import TopicTransport
from libra.pipeline.driver.driver import Driver
from libra.pipeline.driver.transport import Transport
from libra.pipeline.run.fleet import Fleet
from libra.pipeline.run.loop import Look, Parts, RunLoop, first_error
from libra.pipeline.run.play import Player, PlayRules
from libra.pipeline.run.prepare import Prepared
from libra.pipeline.run.spec import make_spec
from libra.pipeline.run.state import RunState
from libra.pipeline.run.training import TrainingSide
from libra.pipeline.run.waits import Emit, waiting
from libra.pipeline.view.events import Note, Progress
from libra.resources import wire
from libra.resources.batches import BatchReader
from libra.resources.errors import ClusterError
from libra.resources.types import WeightVersion
from libra.resources.types.run import RunSpec
from libra.resources.weights import prune_weights, release_weight_directory, weight_directory

Started = Callable[[RunLoop, Client, str], None]
"""Called with the loop, the client and the run's id once the loop is about to run."""
KEPT_VERSIONS = 3
"""Published versions kept for engines that are still loading one."""
ALIVE_SECONDS = 0.5
"""How often a run looks whether the scheduler is there."""
GONE = "the Dask scheduler is gone, and this run's hold on its cluster with it; start the run again with --resume"


class Scheduler:
    """The plugin's RPCs under one claim."""

    def __init__(self, client: Client, token: str) -> None:
        self._rpc, self._token = client.scheduler, token

    async def call(self, name: str, **fields: Any) -> dict[str, Any]:
        """One RPC of `libra.resources.wire`; `ClusterError` has the plugin's own words, or says that nobody answers."""
        try:
            reply: dict[str, Any] = await getattr(self._rpc, name)(token=self._token, **fields)
        except OSError as gone:
            raise ClusterError(f"{GONE} ({gone})") from gone
        if error := reply.get("error"):
            raise ClusterError(str(error))
        return reply


@asynccontextmanager
async def claimed(
    client: Client, spec: RunSpec, transport: Transport, emit: Emit
) -> AsyncIterator[tuple[Scheduler, str]]:
    """Hold the cluster for ``spec``; releases it at the end. `ClusterError` names another run that holds it."""
    claim = getattr(client.scheduler, wire.CLAIM)
    reply = await claim(spec=spec.to_wire(), client=client.id, answers=transport.answers)
    if error := reply.get("error"):
        raise ClusterError(str(error))
    for note in reply["notes"]:
        emit(Note(time.time(), str(note)))
    scheduler = Scheduler(client, reply["token"])
    try:
        yield scheduler, reply["token"]
    finally:
        if client.status == "running":
            releasing = asyncio.ensure_future(scheduler.call(wire.RELEASE))
            # A run that is ended meanwhile waits no longer; its cluster goes too, and nobody asks what became of this.
            releasing.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(releasing)


@asynccontextmanager
async def attended(client: Client) -> AsyncIterator[None]:
    """End the body with `ClusterError` as soon as ``client`` has lost its scheduler. A call in flight learns of it only
    after Dask has tried to reconnect, and a task's result never comes."""

    async def attend() -> None:
        while client.status == "running":
            await asyncio.sleep(ALIVE_SECONDS)
        raise ClusterError(GONE)

    try:
        async with asyncio.TaskGroup() as group:
            attending = group.create_task(attend())
            yield
            attending.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def make_transport(client: Client, public_api: bool) -> Transport:
    """The fast transport where it is known to work and not declined, the public one elsewhere."""
    fast = dask_private.available(client) and not public_api
    return dask_private.StreamTransport(client) if fast else TopicTransport(client)


async def run_session(
    config: RunConfig, state: RunState, prepared: Prepared, client: Client, emit: Emit, started: Started
) -> None:
    """Run ``state`` on ``client``'s cluster until its last step; ``started`` gets the loop once it is about to run.

    Raises the error that ended the run; the state stays open (its owner closes it).
    """
    environment = prepared.environment
    spec = make_spec(config, prepared.tokenizer, state.folder.path)
    weights_dir = weight_directory(state.folder.path, spec.run)
    async with AsyncExitStack() as stack:
        stack.callback(release_weight_directory, weights_dir)
        transport = make_transport(client, config.driver.public_api)
        scheduler, token = await stack.enter_async_context(claimed(client, spec, transport, emit))
        await stack.enter_async_context(attended(client))
        fleet = Fleet(emit, lambda key, error: driver.fail(key, error))
        driver = Driver(
            transport,
            token,
            window=config.driver.window,
            max_inflight=config.driver.max_inflight,
            on_event=fleet.on_event,
        )
        stack.callback(driver.close)
        retries = config.retries.infra
        training = TrainingSide(driver, fleet, spec.run, config.deadlines, retries, state.newest_checkpoint, emit)
        with waiting(emit, "rollout", "cold start" if state.fresh else "recovery", "a first version", "training", None):
            await begin(state, training, emit)

        async def set_weights(weights: WeightVersion) -> None:
            fields = {"version": weights.version, "path": weights.path, "digest": weights.digest}
            await scheduler.call(wire.SET_WEIGHTS, **fields)
            await asyncio.to_thread(prune_weights, weights_dir, KEPT_VERSIONS, {weights.version} | fleet.loading)

        async def post_batch(version: int, record: dict[str, Any]) -> None:
            await scheduler.call(wire.POST_BATCH, version=version, record=record)

        async def report_step(step: int, seconds: float, train_seconds: float, batch: Path) -> None:
            if config.planner.enabled:
                rows = await asyncio.to_thread(step_records, batch, config.environment.kind)
                fields = {"step": step, "seconds": seconds, "train_seconds": train_seconds, "records": rows}
                await scheduler.call(wire.REPORT_STEP, **fields)

        async def look() -> Look:
            status = await scheduler.call(wire.STATUS)
            return Look(busy_counts(status), status["policy"])

        limits = PlayRules(
            max_turn_tokens=config.environment.max_turn_tokens,
            wall_seconds=config.environment.wall_timeout,
            retries=retries,
            artifacts=environment.artifacts,
            inline=config.environment.inline,
        )
        loop = RunLoop(
            Parts(
                config=config,
                books=state.books,
                driver=driver,
                fleet=fleet,
                player=Player(driver, spec.run, limits, config.retries.consecutive_infra, emit),
                training=training,
                environment=environment,
                batch_path=state.folder.batch,
                weights_dir=weights_dir,
                set_weights=set_weights,
                post_batch=post_batch,
                report_step=report_step,
                save_checkpoint=lambda: state.save(training.save),
                look=look,
                emit=emit,
            )
        )
        started(loop, client, spec.run)
        await loop.run()


def step_records(batch: Path, kind: str) -> list[dict[str, Any]]:
    """What the trajectories of a committed batch of the environment ``kind`` took, as `wire.REPORT_STEP` carries it."""
    return [record.to_plain() for record in BatchReader(batch).records(kind)]


async def begin(state: RunState, training: TrainingSide, emit: Emit) -> None:
    """Bring the trainer to the ledger's version: by the cold start, or from the newest checkpoint and the batches
    closed after it."""
    if state.fresh:
        with waiting(emit, "train", "cold start", "version 0", "the trainer", None):
            made = await training.initialise()
        emit(Progress(time.time(), "ready", made))
        await state.save(training.save)
    else:
        with waiting(emit, "train", "recovery", "the newest checkpoint", "the trainer", None):
            await training.restore(state.books.ledger)


def busy_counts(status: dict[str, Any]) -> dict[str, int]:
    """Requests in every engine (as ``rollout/<instance>``), and running tool and reward tasks, from the plugin's
    status; as fresh as the workers' heartbeats."""
    counts: dict[str, int] = {}
    for name, worker in status["roles"].items():
        beat = worker["stats"] or {"bodies": 0, "stats": {}}
        if worker["role"] == "rollout":
            counts[f"rollout/{name}"] = int(beat["stats"].get("running", 0))
        elif worker["role"] in ("tool", "reward"):
            counts[worker["role"]] = counts.get(worker["role"], 0) + int(beat["bodies"])
    return counts
