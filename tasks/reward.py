"""The reward role and the body of reward tasks. A reward is a pure function of the task and the trajectory."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

from libra.resources.codec import trajectory_from_wire
from libra.resources.errors import LibraError, TaskError
from libra.resources.types import Trajectory
from libra.tasks.child.host import error_text
from libra.tasks.envs.base import Environment, EnvironmentConfig
from libra.tasks.roles import Role, Setting, make_environment
from libra.tasks.running import Request, run_body
from libra.tasks.threads import in_thread


async def reward(blob: bytes, artifact: dict[str, Any] | None = None) -> None:
    """Body of a reward task. ``blob`` packs ``key``, ``task`` and ``trajectory`` (as a dict); ``artifact`` is what the
    trajectory's session handed over. Leaves ``reward`` and ``artifact`` as the task's metadata. `TaskError` if the
    environment fails, its reward is not finite or takes longer than ``environment.wall_timeout``."""

    async def work(role: RewardRole, request: Request) -> tuple[dict[str, Any], None]:
        trajectory = trajectory_from_wire(request["trajectory"])
        if artifact is not None:
            trajectory = replace(trajectory, artifact=artifact)
        value = await judged_in_time(role.environment, request["task"], trajectory, role.seconds)
        return {"reward": value, "artifact": trajectory.artifact}, None

    await run_body(RewardRole, blob, work)


async def judged_in_time(
    environment: Environment, task: dict[str, Any], trajectory: Trajectory, seconds: float
) -> float:
    """`judge` within ``seconds``, in a thread: a reward may compute for long, and the worker has others to serve.
    `TaskError` if it takes longer; then its thread is left behind."""
    try:
        async with asyncio.timeout(seconds):
            return await in_thread(judge, environment, task, trajectory)
    except TimeoutError:
        raise TaskError(
            f"the reward of {trajectory.id} took longer than environment.wall_timeout = {seconds:g} s"
        ) from None


def judge(environment: Environment, task: dict[str, Any], trajectory: Trajectory) -> float:
    """The finite reward of ``trajectory``. `TaskError` with the environment's own text if there is none."""
    try:
        value = float(environment.reward(task, trajectory))
    except LibraError:
        raise
    except Exception as error:
        raise TaskError(f"the reward of {trajectory.id} failed: {error_text(error)}") from error
    if not math.isfinite(value):
        raise TaskError(f"the reward of {trajectory.id} is {value}; an environment's rewards must be finite numbers")
    return value


class RewardRole(Role):
    """Stateless: an environment."""

    name = "reward"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.environment: Environment
        self.seconds = EnvironmentConfig(**setting.spec.environment).wall_timeout

    async def start(self) -> None:
        self.environment = await asyncio.to_thread(make_environment, self.spec)
