"""What the fused benchmark plays: a rollout role and an environment that do nothing but carry what real ones carry."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from cluster_parts import LabelRollout
from distributed import Scheduler, Worker

from libra.resources.bootstrap import Bootstrap
from libra.resources.types import (
    Bucket,
    RolloutInstance,
    Segment,
    Stream,
    Tokens,
    ToolReturn,
    ToolState,
    Trajectory,
    TrajectoryId,
)
from libra.scheduler_plugin.plugin import LibraScheduler
from libra.scheduler_plugin.policy import Placement, PlacementRequest
from libra.scheduler_plugin.policy.context_bounds import ContextBounds
from libra.tasks import worker as worker_side
from libra.tasks.envs.base import Action, Environment, EnvironmentConfig, Session
from libra.tasks.kv import NO_HINT, Hint
from libra.tasks.roles import make_environment
from libra.tasks.sessions import Sessions

GROWTH = 200
"""Token ids of one tool payload, and of one sampled segment."""
_TOKENS = np.arange(GROWTH, dtype=np.int32)
_LOGPROBS = np.zeros(GROWTH, np.float32)
_CALL = Action("call", {"key": "a"})


class NothingRollout(LabelRollout):
    """Segments of `GROWTH` tokens, at once."""

    async def start(self) -> None:
        self.environment = make_environment(self.spec)
        self.sessions = Sessions(self.environment, self.spec)

    def forget(self, trajectories: Any) -> None:
        assert self.sessions is not None
        self.sessions.forget(trajectories)

    async def generate(self, trajectory: TrajectoryId, context: Tokens, max_new: int, hint: Hint = NO_HINT) -> Segment:
        now = time.time()
        place = {"context": len(context), "cached": 0, "instance": self.setting.worker}
        return Segment(_TOKENS, _LOGPROBS, _TOKENS, "stop", **place, started=now, ended=now)  # type: ignore[arg-type]


class NothingWorker(worker_side.LibraWorker):
    """The real worker plugin with that rollout role."""

    def setup(self, worker: Worker) -> None:
        worker_side.ROLES["rollout"] = NothingRollout
        super().setup(worker)


async def dask_setup(server: Any) -> None:
    """The preload of a scheduler with such workers."""
    if isinstance(server, Scheduler):
        plugin = LibraScheduler(Bootstrap("benchmarks.fused_bodies:NothingWorker"))
        await server.register_scheduler_plugin(plugin, idempotent=True)


class Restless(ContextBounds):
    """Every third return moves its trajectory to the other instance."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__({"margin": 50})
        self._returns = itertools.count(1)

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        placed = super().place(request, instances, buckets)
        if request.history and placed.address == request.current and next(self._returns) % 3 == 0:
            return Placement(placed.tag, next(i.address for i in instances if i.address != request.current))
        return placed


class Nothing(Environment):
    """Every turn is a call; a call returns `GROWTH` tokens."""

    def __init__(self, config: EnvironmentConfig, tokenizer_path: str, seed: int) -> None:
        self.config = config

    def prompts(self, stream: Stream) -> int | None:
        return None

    def task(self, stream: Stream, prompt: int) -> dict[str, Any]:
        return {}

    def reset(self, task: dict[str, Any]) -> Tokens:
        return _TOKENS

    @property
    def stop(self) -> tuple[int, ...]:
        return (0,)

    def parse(self, tokens: Tokens, finished: bool) -> Action:
        return _CALL

    def open(self, task: dict[str, Any], trajectory: str, seed: int) -> Nothings:
        return Nothings()

    def reward(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        return 0.0

    def render(self, tokens: Tokens) -> str:
        return ""


class Nothings(Session):
    """One trajectory's calls."""

    async def tool(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        return ToolReturn(turn, call, _TOKENS, ToolState("search", turn % 3, "ok"), 0.0, "0123456789abcdef")
