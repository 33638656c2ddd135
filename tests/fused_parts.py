"""For tests of the fused form on real Dask processes: rollout workers that generate by a plan in the prompt, without an
engine, and an environment whose calls say which payload comes back."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from cluster_parts import LabelRollout, Play, spec
from distributed import Scheduler, Worker

from libra.pipeline.ledger.draft import Draft
from libra.pipeline.run.forms import Wire
from libra.pipeline.run.residences import Residences
from libra.resources import wire
from libra.resources.bootstrap import Bootstrap
from libra.resources.cluster.local import LibraLocalCluster
from libra.resources.codec import segment_from_wire, tool_return_from_wire
from libra.resources.errors import ResidenceLostError
from libra.resources.types import Migration, Segment, Stream, Tokens, ToolReturn, ToolState, Trajectory, TrajectoryId
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.plugin import LibraScheduler
from libra.tasks import worker as worker_side
from libra.tasks.envs.base import Action, BlockingSession, Environment, EnvironmentConfig, payload_digest
from libra.tasks.kv import NO_HINT, Hint
from libra.tasks.roles import make_environment
from libra.tasks.sessions import Sessions

STOP, RETURN, END = 0, 1, 2
PLAN = 1000
"""A prompt token of `PLAN` + n is a call to come, whose payload is of size class n."""


class PlannedRollout(LabelRollout):
    """Ready at once; every segment makes the next call of the plan, or ends. ``engine.options.seconds``: how long a
    segment takes."""

    async def start(self) -> None:
        self.environment = make_environment(self.spec)
        self.sessions = Sessions(self.environment, self.spec)
        self.seconds = float(self._config.options.get("seconds", 0))

    async def stop(self) -> None:
        assert self.sessions is not None
        self.sessions.close()

    def forget(self, trajectories: Any) -> None:
        assert self.sessions is not None
        self.sessions.forget(trajectories)

    async def generate(self, trajectory: TrajectoryId, context: Tokens, max_new: int, hint: Hint = NO_HINT) -> Segment:
        started = time.time()
        await asyncio.sleep(self.seconds)
        plan, made = context[context >= PLAN], int((context == RETURN).sum())
        token = int(plan[made]) if made < len(plan) else END
        tokens = np.array([-token if token >= PLAN else token, STOP], np.int32)
        versions, logprobs = np.full(2, self._loaded, np.int32), np.zeros(2, np.float32)
        place: dict[str, Any] = {"context": len(context), "cached": 0, "instance": self.setting.worker}
        if hint.sources:
            source, here = hint.sources[0].worker, self.setting.worker
            place["migration"] = Migration(
                "prefill", source, here, len(context), 0, 0.0, hint.fetching, hint.prefilling
            )
        return Segment(tokens, logprobs, versions, "stop", **place, started=started, ended=time.time())  # type: ignore[arg-type]


class PlannedWorker(worker_side.LibraWorker):
    """The real worker plugin with that rollout role."""

    def setup(self, worker: Worker) -> None:
        worker_side.ROLES["rollout"] = PlannedRollout
        super().setup(worker)


async def dask_setup(server: Any) -> None:
    """The preload of a scheduler with such workers."""
    if isinstance(server, Scheduler):
        plugin = LibraScheduler(Bootstrap("fused_parts:PlannedWorker"))
        await server.register_scheduler_plugin(plugin, idempotent=True)


class Errands(Environment):
    """A call's payload has the size class that the call names. ``options``: ``blocked`` (trajectories whose tools block
    their thread until the file ``gate`` is there)."""

    def __init__(self, config: EnvironmentConfig, tokenizer_path: str, seed: int) -> None:
        self.config = config
        self.blocked = set(config.options.get("blocked", ()))
        self.gate = Path(str(config.options.get("gate", "/nowhere")))

    def prompts(self, stream: Stream) -> int | None:
        return None

    def task(self, stream: Stream, prompt: int) -> dict[str, Any]:
        return {}

    def reset(self, task: dict[str, Any]) -> Tokens:
        return np.array([PLAN], np.int32)

    @property
    def stop(self) -> tuple[int, ...]:
        return (STOP,)

    def parse(self, tokens: Tokens, finished: bool) -> Action:
        size = -int(tokens[0]) - PLAN
        return Action("call", {"name": "get", "size": size}) if size >= 0 else Action("final", end="answer")

    def open(self, task: dict[str, Any], trajectory: str, seed: int) -> Errand:
        return Errand(self, trajectory)

    def reward(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        return 1.0

    def render(self, tokens: Tokens) -> str:
        return " ".join(map(str, tokens.tolist()))


class Errand(BlockingSession):
    """One trajectory's calls, numbered in the payload."""

    def __init__(self, environment: Errands, trajectory: str) -> None:
        self._environment, self._trajectory = environment, trajectory

    def call(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        environment = self._environment
        while self._trajectory in environment.blocked and not environment.gate.exists():
            time.sleep(0.02)
        payload = np.array([RETURN, 100 + turn], np.int32)
        return ToolReturn(turn, call, payload, ToolState("get", call["size"], "ok"), 0.0, payload_digest(payload))


def fused_spec(seconds: float = 0.0, options: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """A run over two planned rollout workers, TP 1 and TP 2, whose segments take ``seconds``."""
    environment = {"kind": "fused_parts:Errands", "inline": True, "options": options or {}}
    roles = {"rollout": 2, "tool": 0, "reward": 0, "train": 0}
    return spec(**{"environment": environment, "roles": roles, "engine": {"options": {"seconds": seconds}}, **changes})


def fused_cluster(rollout: int = 2, **options: Any) -> LibraLocalCluster:
    """A local cluster with planned rollout workers."""
    return LibraLocalCluster({"rollout": rollout}, preload="fused_parts", **options)


class Book:
    """What one trajectory has got, and how often its residences were lost."""

    def __init__(self, name: str, sizes: list[int]) -> None:
        self.sizes = sizes
        prompt = np.array([PLAN + size for size in sizes], np.int32)
        self.draft = Draft(TrajectoryId.parse(name), 0, 0, {}, prompt, oldest=0, max_turns=99, started=0.0)
        self.lost = 0

    def grow(self, tool: Wire | None, segment: Wire, action: Wire) -> None:
        """Raises `ValueError` if the segment does not continue exactly what the book holds."""
        returned = None if tool is None else tool_return_from_wire(tool)
        self.draft.grow(returned, segment_from_wire(segment), action)

    @property
    def instances(self) -> list[str]:
        """Where the segments were sampled."""
        return [segment.instance for _, segment in self.draft.steps]

    def assert_whole(self) -> None:
        """Every segment of the plan is there, once, with the returns between them."""
        assert self.draft.next == "reward"
        assert [tool.state.size for tool in self.draft.tools] == self.sizes
        assert [int(tool.payload[1]) for tool in self.draft.tools] == [100 + turn for turn in range(len(self.sizes))]
        assert len(self.draft.steps) == len(self.sizes) + 1


async def reside(play: Play, form: Residences, name: str, sizes: list[int]) -> Book:
    """Play one trajectory to its end, through the losses of its workers."""
    book = Book(name, sizes)
    try:
        while book.draft.next != "reward":
            try:
                await form.advance(book.draft, 0, book.grow)
            except ResidenceLostError:
                book.lost += 1
    finally:
        play.driver.end(name, None)
    return book


def form_of(play: Play) -> Residences:
    """The fused form through the driver of ``play``."""
    return Residences(play.driver, play.run, max_turn_tokens=8)


def residing(dask_worker: Any) -> tuple[int, int]:
    """For ``Client.run``: bodies and sessions on a worker."""
    plugin = dask_worker.extensions[wire.EXTENSION]
    sessions = getattr(plugin.role, "sessions", None)
    return len(plugin.bodies), 0 if sessions is None else len(sessions)


def process_of(dask_worker: Any) -> tuple[str, int]:
    """For ``Client.run``: a worker's name and process."""
    return str(dask_worker.name), os.getpid()


def deaf(dask_scheduler: Any, hears: bool) -> None:
    """For ``Client.run_on_scheduler``: the plugin does not hear questions, or hears them again."""
    handler = dask_scheduler.extensions[wire.EXTENSION].on_ask if hears else lambda **fields: None
    dask_scheduler.stream_handlers[wire.ASK] = handler
