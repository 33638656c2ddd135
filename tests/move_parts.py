"""For tests of migration on real vLLM engines: `hop` as an untrained model can play it, a policy that moves a third of
the trajectories back and forth, and trajectories played to their reward without a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cluster_parts import Play, spec
from tiny_models import publish, tiny_model
from vllm_parts import SIZES

from libra.pipeline.ledger.draft import Draft
from libra.pipeline.run.forms import Form
from libra.pipeline.run.pairs import Pairs
from libra.pipeline.run.play import grow_draft
from libra.pipeline.run.residences import Residences
from libra.resources.tags import rollout_tag
from libra.resources.types import Bucket, RolloutInstance, Tokens, Trajectory, TrajectoryId, WeightVersion
from libra.resources.types.run import RunSpec
from libra.scheduler_plugin.policy import BucketPolicy, Placement, PlacementRequest
from libra.tasks.envs.base import Action, EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment, write_tokenizer

VOCABULARY = 480
MAX_TURNS = 4
START_SECONDS = 300.0


class RamblingHop(HopEnvironment):
    """`hop` for a model that has learned nothing: one id in eight ends a turn, and a turn is a lookup of the key that
    its last id names, or (one in seven) the answer. The reward is a fingerprint of all that was sampled."""

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(range(0, VOCABULARY, 8))

    def parse(self, tokens: Tokens, finished: bool) -> Action:
        last = int(tokens[-1])
        if last % 7 == 0:
            return Action("final", end="answer")
        return Action("call", {"name": "get", "arguments": {"key": f"k{last}"}})

    def reward(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        sampled = trajectory.tokens[trajectory.mask == 1].astype(np.int64)
        return float((sampled * np.arange(1, len(sampled) + 1)).sum())


class MovesAThird(BucketPolicy):
    """Trajectories of every third group change between TP 1 and TP 2 at each return; the others stay where they began,
    at either degree. While there is no instance of a degree, they go to the other."""

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        group = int(request.prompt.removeprefix("train"))
        turn = len(request.history) if group % 3 == 0 else 0
        degree = 1 + (group + turn) % 2
        there = {each.tp for each in instances}
        return Placement(rollout_tag(degree if degree in there or not there else 3 - degree))


class AtHome(BucketPolicy):
    """Trajectories of group n live on the instance ``rollout-{n % 3}``, and while that is away on the first one."""

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        home = f"rollout-{int(request.prompt.removeprefix('train')) % 3}"
        ordered = sorted(instances, key=lambda each: (each.name != home, each.name))
        return Placement(rollout_tag(1), ordered[0].address if ordered else None)


def moves_spec(folder: Path, inline: bool, **changes: Any) -> RunSpec:
    """A run on a vLLM instance of TP 1 and one of TP 2, which stage KV."""
    tokenizer = folder / "tokenizer.json"
    write_tokenizer(tokenizer)
    environment = {"kind": "move_parts:RamblingHop", "inline": inline, "max_turns": MAX_TURNS, "max_turn_tokens": 20}
    values: dict[str, Any] = {
        "run_dir": str(folder),
        "engine": {"kind": "vllm", "slots": 32, "max_context": 240, "kv_arena": 64 * 2**20},
        "environment": environment,
        "tokenizer": str(tokenizer),
        "roles": {"rollout": 2, "tool": 0 if inline else 1, "reward": 0, "train": 0},
        "temperature": 0.0,
        "max_turn_tokens": 20,
        "max_context": 240,
        "start_seconds": START_SECONDS,
        "load_seconds": START_SECONDS,
        "stop_seconds": 30.0,
        "policy": {"kind": "move_parts:MovesAThird"},
    }
    return spec(**(values | changes))


def rambling_weights(folder: Path) -> WeightVersion:
    """An untrained model of `hop`'s vocabulary, published as version 0."""
    return publish(tiny_model("qwen3", seed=7, vocabulary=VOCABULARY, **SIZES), folder / "weights", 0)


def environment_of(run: RunSpec) -> RamblingHop:
    """The run's environment, here."""
    return RamblingHop(EnvironmentConfig(**run.environment), run.tokenizer, run.seed)


def form_of(play: Play, run: RunSpec) -> Form:
    """The form that the spec asks for."""
    return (Residences if run.inline else Pairs)(play.driver, play.run, run.max_turn_tokens)


Pause = Callable[[Draft], Awaitable[None]]


async def no_pause(draft: Draft) -> None:
    """Go on at once."""


async def play_one(
    play: Play,
    run: RunSpec,
    form: Form,
    environment: RamblingHop,
    number: int,
    member: int = 0,
    pause: Pause = no_pause,
) -> Draft:
    """One trajectory to its last segment. ``pause`` is awaited before each call of a tool."""
    task = environment.task("train", number)
    prompt, ident = environment.reset(task), TrajectoryId.parse(f"g{number}m{member}")
    draft = Draft(ident, number, 0, task, prompt, oldest=0, max_turns=MAX_TURNS, started=0.0)
    final = None
    try:
        while draft.next != "reward":
            await form.advance(draft, 0, lambda tool, segment, action: grow_draft(draft, tool, segment, action))
            if draft.next == "tool":
                await pause(draft)
        final = draft.length
    finally:
        play.driver.end(str(ident), final)
    return draft


async def play_all(play: Play, run: RunSpec, count: int, first: int = 0) -> list[Draft]:
    """That many trajectories at once, from number ``first`` on."""
    environment, form = environment_of(run), form_of(play, run)
    numbers = range(first, first + count)
    return await asyncio.gather(*(play_one(play, run, form, environment, number) for number in numbers))


def rewards(run: RunSpec, drafts: Sequence[Draft]) -> list[float]:
    """The reward of each."""
    environment = environment_of(run)
    return [environment.reward(draft.task, draft.finish(None, None, {}, 0.0)) for draft in drafts]
