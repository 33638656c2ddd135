"""The whole of training in one process, step after step, with no Dask: what a run must equal.

Groups are admitted in order, every trajectory is played turn by turn, groups without spread are skipped and replaced by
the next, and a batch is the first B groups with spread, sorted by trajectory id. With ``alpha`` = 0 a deterministic run
equals this loop bit for bit; with ``alpha`` > 0 a batch is sampled whole from the weights of ``alpha`` versions ago,
which is how a recipe is tuned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libra.pipeline.config import RunConfig
from libra.resources import rng
from libra.resources.batches import write_batch
from libra.resources.types import NOT_SAMPLED, Stream, Tokens, ToolReturn, Trajectory, TrajectoryId
from libra.tasks.engines.base import Engine, Generated, GenerateRequest
from libra.tasks.envs.base import Environment, Session
from libra.tasks.registry import engine_class, environment_class, trainer_class
from libra.tasks.trainers.base import BatchRef, Trainer

SMALL_RUN = [
    "deterministic=true",
    "staleness.alpha=0",
    "steps=5",
    "batch_groups=2",
    "algorithm.group_size=4",
    "engine.slots=8",
    "engine.max_context=128",
    "environment.max_turns=4",
    "environment.options={max_hops: 1, busy: [0.2]}",
    "eval.tasks=8",
    "trainer.options={cold_start: {hidden_size: 64, intermediate_size: 128, batch: 24, drill_steps: 40, "
    "mixed_steps: 15, decay_steps: 5, gate: 0.001, required_copy: 0.001}}",
]
"""Overrides of the quick start: a cold start of seconds, yet a model whose groups have spread."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A batch sorted by id, and the groups without spread that were played on the way."""

    trajectories: list[Trajectory]
    skipped: list[list[Trajectory]]


@dataclass(frozen=True, slots=True)
class Step:
    """A batch, the version it was trained at and that it was sampled with, what training measured, and the groups that
    were skipped for it."""

    trained: int
    sampled: int
    trajectories: list[Trajectory]
    measures: dict[str, float]
    skipped: list[list[Trajectory]]

    @property
    def reward(self) -> float:
        """Mean reward of everything that was played, skipped groups included."""
        return float(np.mean([t.reward for t in self.trajectories + [t for group in self.skipped for t in group]]))


@dataclass(slots=True)
class Game:
    """One trajectory in play."""

    id: TrajectoryId
    prompt: int
    task: dict[str, Any]
    session: Session
    stream: int
    temperature: float
    tokens: Tokens
    prompt_tokens: int
    parts: list[Generated] = field(default_factory=list)
    tools: list[ToolReturn] = field(default_factory=list)
    end: str = ""

    def finish(self, environment: Environment) -> Trajectory:
        """The trajectory with its reward."""
        n = len(self.tokens)
        mask, logprobs = np.zeros(n, np.int8), np.zeros(n, np.float32)
        versions = np.full(n, NOT_SAMPLED, np.int32)
        at = self.prompt_tokens
        for turn, part in enumerate(self.parts):
            at += len(self.tools[turn - 1].payload) if turn else 0
            here = slice(at, at + len(part.tokens))
            mask[here], logprobs[here], versions[here] = 1, part.logprobs, part.versions
            at += len(part.tokens)
        fields = {"epoch": 0, "task": self.task, "prompt_tokens": self.prompt_tokens, "tools": tuple(self.tools)}
        fields |= {"tokens": self.tokens, "mask": mask, "logprobs": logprobs, "versions": versions}
        draft = Trajectory(id=self.id, prompt=self.prompt, turns=len(self.parts), end=self.end, reward=0.0, **fields)
        reward = environment.reward(self.task, draft)
        return Trajectory(id=self.id, prompt=self.prompt, turns=len(self.parts), end=self.end, reward=reward, **fields)


class ReferenceLoop:
    """Engine, trainer and environment of one config, in this process."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = folder / "tokenizer.json"
        env_class = environment_class(config.environment.kind)
        tokenizer.write_text(env_class.make_tokenizer(), encoding="utf-8")
        self.environment: Environment = env_class(config.environment, str(tokenizer), config.seed)
        self.engine: Engine = engine_class(config.engine.kind)(
            config.engine, tokenizer_path=str(tokenizer), deterministic=config.deterministic
        )
        self.trainer: Trainer = trainer_class(config.trainer.kind)(
            config.trainer,
            config.algorithm,
            environment=self.environment,
            tokenizer_path=str(tokenizer),
            seed=config.seed,
            cache_dir=folder / "cache",
            deterministic=config.deterministic,
        )
        self.admitted = 0
        self._tools = asyncio.new_event_loop()

    def initialise(self, progress: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
        """Bring up version 0 in trainer and engine."""
        started = self.trainer.initialise(progress)
        self.load()
        return started

    def load(self) -> None:
        """Load the trainer's weights into the engine."""
        self.engine.load(self.trainer.publish(self.folder / "weights"))

    def steps(
        self, alpha: int = 0, train: Callable[[list[Trajectory]], dict[str, float]] | None = None
    ) -> Iterator[Step]:
        """``config.steps`` optimizer steps."""
        queue: list[tuple[int, Sampled]] = []
        sampled = 0
        for version in range(self.config.steps):
            while sampled < min(self.config.steps, version + alpha + 1):
                queue.append((self.engine.version, self.sample_batch()))
                sampled += 1
            sampled_with, batch = queue.pop(0)
            measures = self.train(version, batch.trajectories)
            self.load()
            yield Step(version, sampled_with, batch.trajectories, measures, batch.skipped)

    def train(self, version: int, batch: list[Trajectory]) -> dict[str, float]:
        """One optimizer step on a batch written as a run writes it."""
        path = self.folder / "batches" / f"{version:06d}"
        write_batch(path, batch, {})
        return self.trainer.train(BatchRef(str(path), tuple(range(len(batch)))))

    def sample_batch(self) -> Sampled:
        """The next batch, and the groups that were skipped for it."""
        wanted, size = self.config.batch_groups, self.config.algorithm.group_size
        kept: list[list[Trajectory]] = []
        skipped: list[list[Trajectory]] = []
        while missing := wanted - len(kept):
            ordinals = range(self.admitted, self.admitted + missing)
            self.admitted += missing
            played = self.play(
                [self.open("train", TrajectoryId("train", o, m), o) for o in ordinals for m in range(size)]
            )
            for group in (played[i : i + size] for i in range(0, len(played), size)):
                (kept if len({t.reward for t in group}) > 1 else skipped).append(group)
        return Sampled(sorted((t for group in kept for t in group), key=lambda t: t.id), skipped)

    def evaluate(self) -> list[Trajectory]:
        """The held-out set, played once."""
        tasks = range(self.config.eval.tasks)
        return self.play([self.open("heldout", TrajectoryId("heldout", 0, n), n) for n in tasks])

    def open(self, stream: Stream, name: TrajectoryId, prompt: int) -> Game:
        """A trajectory before its first turn."""
        config, train = self.config, stream == "train"
        task = self.environment.task(stream, prompt)
        seed = config.seed if train else config.eval.seed
        tokens = self.environment.reset(task)
        return Game(
            id=name,
            prompt=prompt,
            task=task,
            session=self.environment.open(task, str(name) if train else f"heldout/{name.member}", seed),
            stream=rng.stream(seed, "sample", *([str(name)] if train else ["heldout", name.member])),
            temperature=config.algorithm.temperature if train else config.eval.temperature,
            tokens=tokens,
            prompt_tokens=len(tokens),
        )

    def play(self, games: list[Game]) -> list[Trajectory]:
        """Play games to their ends, all at once through the engine."""
        playing = {str(game.id): game for game in games}
        for game in games:
            self._ask(game)
        while self.engine.busy:
            for part in self.engine.step():
                game = playing[part.sequence]
                self._take(game, part)
                if game.end:
                    self.engine.release(part.sequence)
                else:
                    self._ask(game)
        return [game.finish(self.environment) for game in games]

    def _room(self, game: Game) -> int:
        return self.config.engine.max_context - len(game.tokens)

    def _ask(self, game: Game) -> None:
        self.engine.submit(
            GenerateRequest(
                id=f"{game.id}/{len(game.parts)}",
                sequence=str(game.id),
                tokens=game.tokens,
                max_new=min(self.config.environment.max_turn_tokens, self._room(game)),
                stop=self.environment.stop,
                temperature=game.temperature,
                stream=game.stream,
            )
        )

    def _take(self, game: Game, part: Generated) -> None:
        """Add a turn and the return of its call; set ``end`` when the trajectory is over."""
        room = self._room(game)
        game.parts.append(part)
        game.tokens = np.concatenate([game.tokens, part.tokens])
        if part.finish != "stop" and len(part.tokens) >= room:
            game.end = "tokens"
            return
        action = self.environment.parse(part.tokens, part.finish == "stop")
        if action.kind == "final":
            game.end = action.end
        elif len(game.tools) == self.config.environment.max_turns:
            game.end = "turns"
        else:
            result = self._tools.run_until_complete(game.session.tool(len(game.tools), action.call))
            game.tools.append(result)
            game.tokens = np.concatenate([game.tokens, result.payload])
            if self._room(game) < 1:
                game.parts.append(_nothing(game))
                game.end = "tokens"


def _nothing(game: Game) -> Generated:
    """The turn of a trajectory that has no room for a token."""
    empty = np.empty(0, np.int32)
    return Generated("", str(game.id), empty, empty.astype(np.float32), empty, "length", cached=0, queued=0.0)
