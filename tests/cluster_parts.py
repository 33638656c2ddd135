"""For tests of the scheduler plugin on real Dask processes: workers whose roles are labels (no child processes), bodies
that report how they were placed, bucket policies that obey or fail, and a driver's side in a few lines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from distributed import Client, Scheduler, Worker, get_worker

from libra.pipeline.driver.dask_private import StreamTransport
from libra.pipeline.driver.driver import Driver
from libra.pipeline.driver.transport import Node, Opening
from libra.resources import wire
from libra.resources.bootstrap import Bootstrap
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.codec import pack
from libra.resources.errors import ResidenceLostError
from libra.resources.keys import TaskKey
from libra.resources.tags import Role as RoleName
from libra.resources.tags import capability
from libra.resources.types import Bucket, RolloutInstance, WeightVersion
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.plugin import LibraScheduler
from libra.scheduler_plugin.policy import BucketPolicy, Placement, PlacementRequest
from libra.tasks import worker as worker_side
from libra.tasks.reward import RewardRole
from libra.tasks.roles import Role
from libra.tasks.rollout import RolloutRole
from libra.tasks.running import run_body
from libra.tasks.tool import ToolRole
from libra.tasks.train import TrainRole

WEIGHTS = {"path": "/nowhere", "digest": "0"}


# The worker side: the real plugin, with roles that are labels.


class LabelRollout(RolloutRole):
    """Ready at once; weights named ``/broken`` do not load."""

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def load(self, weights: WeightVersion) -> None:
        if weights.path == "/broken":
            raise worker_side.LibraError("checksum of tensor 'embed' differs")
        self._loaded = weights.version

    def forget(self, trajectories: Any) -> None:
        pass


class LabelTool(ToolRole):
    """Ready at once, remembers whom to forget."""

    async def start(self) -> None:
        self.forgotten: list[str] = []

    async def stop(self) -> None:
        pass

    def forget(self, trajectories: Any) -> None:
        self.forgotten.extend(trajectories)

    def stats(self) -> dict[str, Any]:
        return {"forgotten": len(self.forgotten)}


class LabelReward(RewardRole):
    """Ready at once."""

    async def start(self) -> None:
        pass


class LabelTrain(TrainRole):
    """Ready at once."""

    async def start(self) -> None:
        pass


class LabelWorker(worker_side.LibraWorker):
    """The real worker plugin with these roles."""

    def setup(self, worker: Worker) -> None:
        labels: dict[RoleName, type[Role]] = {
            "rollout": LabelRollout,
            "tool": LabelTool,
            "reward": LabelReward,
            "train": LabelTrain,
        }
        worker_side.ROLES.update(labels)
        super().setup(worker)


async def dask_setup(server: Any) -> None:
    """The preload of a scheduler whose workers have label roles."""
    if isinstance(server, Scheduler):
        plugin = LibraScheduler(Bootstrap("cluster_parts:LabelWorker"))
        await server.register_scheduler_plugin(plugin, idempotent=True)


# Bucket policies.


class BySize(BucketPolicy):
    """Large payloads to TP 2, others to TP 1; whatever instance is there."""

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        return Placement(tag_of(request.history[-1].size if request.history else 0))


class FailsOn(BySize):
    """Raises on size class 3."""

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        if request.history and request.history[-1].size == 3:
            raise KeyError("no such bucket")
        return super().place(request, instances, buckets)


def tag_of(size: int) -> str:
    """The tag that `BySize` maps a payload's size class to."""
    return "rollout:tp2" if size == 1 else "rollout:tp1"


# Bodies.


def placement(key: str, role: Role) -> dict[str, Any]:
    """How the task of ``key`` finds itself placed, on its worker."""
    worker = get_worker()
    wants = worker.state.tasks[key].resource_restrictions
    (tag,) = wants
    own = f"rollout:tp{role.setting.tp}" if role.name == "rollout" else role.name
    return {
        "tag": tag,
        "offered": float(worker.state.total_resources.get(tag, 0)),
        "role": own,
        "worker": str(worker.name),
        "pid": os.getpid(),
    }


async def rollout(blob: bytes, tool: dict[str, Any] | None = None) -> None:
    """Sleeps ``seconds`` and leaves where it ran, and what the tool said."""

    async def work(role: LabelRollout, request: dict[str, Any]) -> tuple[dict[str, Any], None]:
        found = placement(request["key"], role)
        await asyncio.sleep(request["seconds"])
        return {**found, "size": None if tool is None else tool["size"]}, None

    await run_body(LabelRollout, blob, work)


async def tool(blob: bytes) -> dict[str, Any]:
    """Returns its worker and ``size``; leaves the tool state."""

    async def work(role: LabelTool, request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        await asyncio.sleep(request["seconds"])
        if request.get("silent"):
            return {}, {"size": request["size"]}
        state = {"state": ["search", request["size"], "ok"], "context": request["context"]}
        return state, {"size": request["size"], "worker": str(get_worker().name)}

    return await run_body(LabelTool, blob, work)


def where(_: int = 0) -> str:
    """A guest's task: the name of its worker."""
    return str(get_worker().name)


def running_bodies(dask_worker: Any) -> int:
    """For ``Client.run``: bodies of ours that run on a worker."""
    return len(dask_worker.extensions[wire.EXTENSION].bodies)


# The driver's side.


def label_cluster(workers: dict[RoleName, int], **options: Any) -> LibraLocalCluster:
    """A local cluster whose workers have label roles."""
    return LibraLocalCluster(workers, preload="cluster_parts", **options)


def spec(**changes: Any) -> RunSpec:
    """A run over two label-only rollout workers, TP 1 and TP 2."""
    values: dict[str, Any] = {
        "run": "0badcafe",
        "name": "test",
        "run_dir": str(Path.cwd()),
        "seed": 1,
        "eval_seed": 2,
        "deterministic": False,
        "engine": {},
        "trainer": {},
        "algorithm": {},
        "environment": {},
        "tokenizer": "",
        "buckets": [[1, None, 1], [2, None, 1]],
        "roles": {"rollout": 2, "tool": 1, "reward": 0, "train": 0},
        "temperature": 1.0,
        "eval_temperature": 1.0,
        "max_turn_tokens": 8,
        "max_context": 4096,
        "bind_seconds": 30.0,
        "start_seconds": 30.0,
        "load_seconds": 10.0,
        "stop_seconds": 10.0,
        "policy": {"kind": "cluster_parts:BySize"},
        "pool": {"backoff": 0.05},
    }
    return RunSpec(**(values | changes))


class Play:
    """A claim with a driver on top."""

    def __init__(self, client: Client, run: str, reply: dict[str, Any]) -> None:
        self.client, self.run, self.reply = client, run, reply
        self.token = str(reply["token"])
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self.driver = Driver(
            StreamTransport(client), self.token, window=0.005, max_inflight=8192, on_event=self._on_event
        )

    def _on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self._news.set()
        if event["event"] == "unbound":
            self.driver.fail(event["key"], RuntimeError(event["reason"]))
        elif event["event"] == "residence":
            self.driver.fail(event["key"], ResidenceLostError(event["reason"]))

    async def ask(self, name: str, **fields: Any) -> dict[str, Any]:
        """One request under the claim's token."""
        reply: dict[str, Any] = await getattr(self.client.scheduler, name)(token=self.token, **fields)
        assert "error" not in reply, reply
        return reply

    async def until(self, event: str, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """The events of that kind with those fields, once there are ``count``."""
        while True:
            found = [e for e in self.events if e["event"] == event and fields.items() <= e.items()]
            if len(found) >= count:
                return found
            self._news.clear()
            await self._news.wait()

    def key(self, kind: Any, trajectory: str, index: int = 0) -> str:
        """A key of this run."""
        return str(TaskKey(kind, 0, self.run, trajectory, index))

    async def first(self, trajectory: str, seconds: float = 0.0, context: int = 100) -> dict[str, Any]:
        """The first segment of a trajectory."""
        key = self.key("rollout", trajectory)
        node = Node(key, rollout, pack({"key": key, "seconds": seconds}))
        return await self.driver.submit([node], Opening(context, trajectory.partition("m")[0]))

    async def turn(self, trajectory: str, index: int, size: int, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        """Call number ``index`` and the segment that continues from it."""
        called, continued = self.key("tool", trajectory, index), self.key("rollout", trajectory, index + 1)
        request = {"key": called, "seconds": seconds, "size": size, "context": 100 + 10 * index, **fields}
        nodes = [
            Node(called, tool, pack(request)),
            Node(continued, rollout, pack({"key": continued, "seconds": seconds}), after=called),
        ]
        return await self.driver.submit(nodes)


@asynccontextmanager
async def playing(address: str, run: RunSpec, version: int | None = 0) -> AsyncIterator[Play]:
    """A client with a claim; its rollout workers have loaded weights ``version``."""
    async with Client(address, asynchronous=True, set_as_default=False) as client:
        reply = await getattr(client.scheduler, wire.CLAIM)(spec=run.to_wire(), client=client.id)
        assert "error" not in reply, reply
        play = Play(client, run.run, reply)
        try:
            if version is not None:
                await play.ask(wire.SET_WEIGHTS, version=version, **WEIGHTS)
                await play.until("role", count=run.roles["rollout"], role="rollout", state="ready")
            yield play
        finally:
            play.driver.close()
            if client.status == "running":
                await getattr(client.scheduler, wire.RELEASE)(token=play.token)


class AnyRoleCluster(LibraLocalCluster):
    """A cluster of label roles whose rollout and train workers may take each other's role."""

    def __init__(self, workers: dict[RoleName, int]) -> None:
        super().__init__(workers, preload="cluster_parts", dashboard=False, asynchronous=True)

    def _worker(self, role: RoleName, slots: int) -> dict[str, Any]:
        made = super()._worker(role, slots)
        if role in ("rollout", "train"):
            both: tuple[RoleName, ...] = ("rollout", "train")
            made["options"]["options"]["resources"] = {capability(each): slots for each in both}
        return made
