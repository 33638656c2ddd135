"""The seam of environments: tasks, what an action means, tools, and rewards.

An environment object is stateless between trajectories and is made once in every process that needs it; what changes
during a trajectory lives in a `Session` on one worker. Invariants: all randomness comes from names (seed,
trajectory, turn), so a session can be rebuilt by replaying its calls; `reward` is a pure function of the task and the
trajectory and never sees the session; a tool's payload is token ids that continue the context exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from libra.resources.config import Config, Seconds
from libra.resources.errors import ConfigError
from libra.resources.types import Stream, Tokens, ToolReturn, Trajectory


class EnvironmentConfig(Config):
    """Which environment, and its limits."""

    kind: str = "hop"
    """``hop``, or the import path of an `Environment` (``my.module:Env``)."""
    inline: bool = False
    """Whether tools run inside the rollout task, one task a residence: for tools that are cheap and safe in the rollout
    worker's process, of an environment that is replayable."""
    max_turns: int = Field(default=20, ge=1)
    """Tool calls of one trajectory at most."""
    max_turn_tokens: int = Field(default=48, ge=1)
    """Sampled tokens of one turn at most; a turn cut there is malformed."""
    tool_timeout: Seconds = 30.0
    """Wall time of one tool call; past it the call is an infrastructure failure."""
    wall_timeout: Seconds = 300.0
    """Wall time of one trajectory; past it the trajectory is dropped and counted."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the kind."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a turn's tokens mean. ``call``: run the tool with ``call``; ``final``: the trajectory ends (``end`` says
    how: ``answer``, ``malformed``); ``cut`` (never an environment's word): the turn goes on on another instance."""

    kind: Literal["call", "final", "cut"]
    call: dict[str, Any] = field(default_factory=dict)
    end: str = ""


def payload_digest(payload: Tokens) -> str:
    """The digest of a tool's payload that `ToolReturn.digest` holds."""
    return hashlib.blake2b(np.ascontiguousarray(payload, np.int32).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """Token ids that a cold start imitates where ``mask`` is 1. ``copies`` is 1 where an imitated token repeats what
    the context says: the skill that everything hangs on, so the cold start goes on until it is there. All (n,)."""

    tokens: Tokens
    mask: NDArray[np.int8]
    copies: NDArray[np.int8]


class Demonstrator(ABC):
    """What a cold start learns from: imperfect episodes, and a drill of the one skill that they need.

    All randomness comes from ``source``.
    """

    @abstractmethod
    def trace(self, source: random.Random) -> Demonstration:
        """One episode of a training task, played by a demonstrator that is wrong often enough to be improved on."""

    @abstractmethod
    def drill(self, source: random.Random, copies: int) -> Demonstration:
        """``copies`` repetitions of the skill in one short row."""


class Session(ABC):
    """The state of one trajectory's tools, on one tool worker (on its rollout worker, where tools are inline)."""

    @abstractmethod
    async def tool(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        """Run call number ``turn`` (0, 1, …). Raises `InfraError` (retry elsewhere) or `TaskError` (drop)."""

    def artifact(self) -> dict[str, Any]:
        """What the trajectory carries to the reward (a patch, a file): plain values."""
        return {}

    def close(self) -> None:  # noqa: B027 - most sessions hold nothing
        """Free what the session holds."""


class BlockingSession(Session):
    """A session whose tool is no coroutine: it runs in a thread, so that it holds nobody else up."""

    @abstractmethod
    def call(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        """What `tool` does. Calls of one session never overlap, unless one went on past its time-out."""

    async def tool(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        return await asyncio.to_thread(self.call, turn, call)


class Environment(ABC):
    """One kind of environment."""

    replayable: bool = True
    """Whether a lost session may be rebuilt by replaying its calls."""
    artifacts: bool = False
    """Whether a session hands over an artifact at its end (`Session.artifact`), which the trajectory carries to the
    reward."""
    size_bounds: Sequence[int] = (32, 128, 512)
    """Upper bounds (tokens) of the payload size classes 0, 1, 2; longer payloads are class 3."""

    config: EnvironmentConfig

    @abstractmethod
    def __init__(self, config: EnvironmentConfig, tokenizer_path: str, seed: int) -> None:
        """``seed`` names the run's randomness; ``tokenizer_path`` is the run's ``tokenizer.json``. Keeps ``config``."""

    @classmethod
    def make_tokenizer(cls) -> str:
        """The text of the environment's own ``tokenizer.json``, for runs that start without a checkpoint.
        `ConfigError` when it has none."""
        raise ConfigError(f"{cls.__name__} has no tokenizer of its own: name a checkpoint directory in trainer.model")

    def demonstrator(self) -> Demonstrator:
        """What the cold start imitates. `ConfigError` when the environment has no cold start."""
        raise ConfigError(f"{type(self).__name__} has no cold start: name a checkpoint directory in trainer.model")

    @abstractmethod
    def prompts(self, stream: Stream) -> int | None:
        """How many prompts the data set has; None: endless."""

    @abstractmethod
    def task(self, stream: Stream, prompt: int) -> dict[str, Any]:
        """The plain spec of a task, answer included: what `open` and `reward` need."""

    @abstractmethod
    def reset(self, task: dict[str, Any]) -> Tokens:
        """The prompt's token ids, up to where the policy's first turn begins."""

    @property
    @abstractmethod
    def stop(self) -> tuple[int, ...]:
        """Token ids that end a turn."""

    @abstractmethod
    def parse(self, tokens: Tokens, finished: bool) -> Action:
        """What this turn's sampled tokens mean; ``finished``: they end with a stop id."""

    @abstractmethod
    def open(self, task: dict[str, Any], trajectory: str, seed: int) -> Session:
        """A new session for a trajectory."""

    @abstractmethod
    def reward(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        """The reward, finite. Pure."""

    @abstractmethod
    def render(self, tokens: Tokens) -> str:
        """Text for people (reports); never used by the system."""

    def size_class(self, tokens: int) -> int:
        """The payload size class of ``tokens`` tokens."""
        return sum(tokens > bound for bound in self.size_bounds)
