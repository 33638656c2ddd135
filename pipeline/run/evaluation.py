"""Held-out evaluation: a fixed set of tasks, played once each at one version.

Invariants: held-out trajectories never enter the ledger, a batch or a policy's statistics; their randomness does not
depend on the version, the round or the run's seed; no other version is installed while one runs (publishing waits).
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from libra.pipeline.ledger.draft import Draft
from libra.pipeline.ledger.events import Evaluated
from libra.pipeline.run.books import trajectory_ended
from libra.pipeline.run.play import Hooks, Player, grow_draft
from libra.pipeline.run.waits import Emit
from libra.pipeline.view.events import EvalFinished
from libra.resources.types import Trajectory, TrajectoryId
from libra.tasks.envs import calls
from libra.tasks.envs.base import Environment

When = Literal["before", "during", "after"]


async def evaluate(
    player: Player,
    environment: Environment,
    tasks: int,
    round_: int,
    version: int,
    when: When,
    max_turns: int,
    emit: Emit,
) -> Evaluated:
    """Play the held-out set at ``version`` and return its mean reward over the tasks that have one.

    Raises whatever stops the run; failures of single tasks are counted.
    """
    started = time.time()
    drafts = [_draft(environment, TrajectoryId("heldout", round_, task), version, max_turns) for task in range(tasks)]
    hooks = Hooks(grow=grow_draft, restart=lambda draft, reason: draft.restart(version))

    async def one(draft: Draft) -> Trajectory:
        verdict = await player.play(draft, version, hooks)
        trajectory = draft.finish(verdict.reward, verdict.failure, verdict.artifact, time.time())
        emit(trajectory_ended(trajectory, "heldout", time.time()))
        return trajectory

    async with asyncio.TaskGroup() as group:
        playing = [group.create_task(one(draft)) for draft in drafts]
    rewards = [t.reward for task in playing if (t := task.result()).reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    failures = tasks - len(rewards)
    now = time.time()
    emit(EvalFinished(now, version, when, mean, len(rewards), failures, now - started))
    return Evaluated(round_, version, mean, len(rewards), failures)


def _draft(environment: Environment, ident: TrajectoryId, version: int, max_turns: int) -> Draft:
    size = calls.prompts(environment, "heldout")
    prompt = ident.member if size is None else ident.member % size
    task, tokens = calls.opening(environment, "heldout", prompt)
    return Draft(
        id=ident,
        prompt=prompt,
        epoch=0,
        task=task,
        prompt_tokens=tokens,
        oldest=version,
        max_turns=max_turns,
        started=time.time(),
    )
