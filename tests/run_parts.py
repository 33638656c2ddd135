"""What whole runs in tests play: a script whose rewards a reader can tell, and parts that fail or die on demand.

Workers and engines load these by import path. Everything is a function of names (trajectory, turn), so that two runs of
one config train the same trajectories however often either is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from libra.resources.errors import InfraError, TaskError
from libra.resources.types import Tokens, ToolReturn, Trajectory, TrajectoryId, WeightVersion
from libra.tasks.algorithms.base import AlgorithmConfig
from libra.tasks.engines.base import EngineConfig, Generated
from libra.tasks.engines.scripted import ScriptedEngine
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment, HopSession
from libra.tasks.envs.hop_demo import script
from libra.tasks.envs.hop_text import END, answer_text, make_tokenizer, understand
from libra.tasks.trainers.base import BatchRef, Progress, TrainerConfig
from libra.tasks.trainers.scripted import ScriptedTrainer

NO_SPREAD_EVERY = 7
"""Groups 3, 10, 17, … of `half_right` have equal rewards."""


def half_right(sequence: str, context: Tokens, stream: int) -> Tokens:
    """Plays `hop` well, but odd members answer wrong; all are right in every seventh group."""
    ident = TrajectoryId.parse(sequence)
    right = ident.member % 2 == 0 or ident.group % NO_SPREAD_EVERY == 3
    return _answered(script(sequence, context, stream), right)


def all_right(sequence: str, context: Tokens, stream: int) -> Tokens:
    """Plays `hop` well: every reward is 1."""
    return script(sequence, context, stream)


class FaultyHop(HopEnvironment):
    """`hop` with ``options.faults``: {fault: [trajectory id, …]}. Faults of a tool call: ``infra`` and ``task`` raise
    at every try, ``once`` raises an `InfraError` at the first try on a worker, ``hang`` does not return before the file
    ``gate`` is there; ``judge`` raises in the reward. Members are also named for all groups: ``m3``."""

    def __init__(self, config: EnvironmentConfig, tokenizer_path: str, seed: int) -> None:
        options = dict(config.options)
        faults: dict[str, list[str]] = dict(options.pop("faults", {}))
        self.gate = Path(str(faults.pop("gate", "/nowhere")))
        super().__init__(config.model_copy(update={"options": options}), tokenizer_path, seed)
        self.faults = {fault: set(names) for fault, names in faults.items()}
        self.tries: Counter[str] = Counter()

    def open(self, task: dict[str, Any], trajectory: str, seed: int) -> FaultySession:
        return FaultySession(self, task, trajectory, seed)

    def reward(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        if self.has("judge", str(trajectory.id)):
            raise RuntimeError("the judge is ill")
        return super().reward(task, trajectory)

    def has(self, fault: str, trajectory: str) -> bool:
        """Whether a training trajectory has the fault."""
        named = self.faults.get(fault, ())
        return trajectory in named or (trajectory.startswith("g") and f"m{trajectory.partition('m')[2]}" in named)


class FaultySession(HopSession):
    """One trajectory's lookups, or their failure."""

    def __init__(self, environment: FaultyHop, task: dict[str, Any], trajectory: str, seed: int) -> None:
        super().__init__(environment, task, trajectory, seed)
        self._faulty, self._trajectory = environment, trajectory

    async def tool(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        env, name = self._faulty, self._trajectory
        env.tries[name] += 1
        if env.has("infra", name):
            raise InfraError(f"the store of {name} is on fire")
        if env.has("task", name):
            raise TaskError(f"the store of {name} has no keys")
        if env.has("once", name) and env.tries[name] == 1:
            raise InfraError(f"the store of {name} hiccuped")
        while env.has("hang", name) and not env.gate.exists():
            await asyncio.sleep(0.05)
        return await super().tool(turn, call)


class CountingHop(HopEnvironment):
    """`hop` whose sessions hand over how many calls they have answered."""

    artifacts = True

    def open(self, task: dict[str, Any], trajectory: str, seed: int) -> CountingSession:
        return CountingSession(self, task, trajectory, seed)


class CountingSession(HopSession):
    """One trajectory's lookups, counted."""

    calls = 0

    async def tool(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        self.calls += 1
        return await super().tool(turn, call)

    def artifact(self) -> dict[str, Any]:
        return {"calls": self.calls}


class ForgetfulHop(HopEnvironment):
    """`hop` whose sessions cannot be rebuilt."""

    replayable = False


class Deaths:
    """Ends this process with kill -9 at named points, at each once in a run: ``options.deaths`` = [point, …]."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._points, self._folder = set(options.pop("deaths", ())), Path(options.pop("graves", "/nowhere"))

    def at(self, point: str) -> None:
        """Die here if it is time."""
        grave = self._folder / point.replace(" ", "-")
        if point in self._points and not grave.exists():
            grave.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class FragileTrainer(ScriptedTrainer):
    """Dies at ``initialise``, ``restore``, and ``train V``, ``trained V``, ``publish V``, ``save V`` at version V."""

    def __init__(self, config: TrainerConfig, algorithm: AlgorithmConfig, **rest: Any) -> None:
        options = dict(config.options)
        self.deaths = Deaths(options)
        super().__init__(config.model_copy(update={"options": options}), algorithm, **rest)

    def initialise(self, progress: Progress) -> dict[str, Any]:
        self.deaths.at("initialise")
        return super().initialise(progress)

    def restore(self, directory: Path) -> None:
        self.deaths.at("restore")
        super().restore(directory)

    def train(self, batch: BatchRef) -> dict[str, float]:
        self.deaths.at(f"train {self.version}")
        measures = super().train(batch)
        self.deaths.at(f"trained {self.version}")
        return measures

    def publish(self, directory: Path) -> WeightVersion:
        published = super().publish(directory)
        self.deaths.at(f"publish {self.version}")
        return published

    def save(self, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        self.deaths.at(f"save {self.version}")
        super().save(directory)


class FragileEngine(ScriptedEngine):
    """Dies at ``load V``, and at ``step V`` in its tenth step with version V."""

    def __init__(self, config: EngineConfig, **rest: Any) -> None:
        options = dict(config.options)
        self.deaths = Deaths(options)
        super().__init__(config.model_copy(update={"options": options}), **rest)
        self.age = 0

    def load(self, weights: WeightVersion) -> None:
        self.deaths.at(f"load {weights.version}")
        super().load(weights)
        self.age = 0

    def step(self) -> list[Generated]:
        self.age += 1
        if self.age == 10:
            self.deaths.at(f"step {self.version}")
        return super().step()


@cache
def _tokenizer() -> Tokenizer:
    return make_tokenizer()


def _answered(turn: Tokens, right: bool) -> Tokens:
    """The turn, or another answer of the same length where it answers and shall be wrong."""
    tokenizer = _tokenizer()
    answer = understand(tokenizer.decode(turn[:-1].tolist(), skip_special_tokens=False)).answer
    if right or answer is None:
        return turn
    wrong = "-".join(reversed(answer.split("-")))
    if wrong == answer:
        wrong = "ash-bay"
    return np.asarray(tokenizer.encode(answer_text(wrong) + END, add_special_tokens=False).ids, np.int32)
