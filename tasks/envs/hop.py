"""`hop`: find a value by following keys through a private store, with a flaky lookup tool.

A task is a random store that only the tool can read. ``get(key)`` returns the next key, the value at the chain's end,
or ``busy``; notes of varying size come with both. How many calls a task needs, only the returns tell. The reward is 1
when the last turn answers with the value after at least one call, else 0.

Invariants: a reply depends on the task, the call and the counter draw of (seed, trajectory, turn) alone, so a session
holds no state and replays exactly; a return's ids start where the turn's stop token ended.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator
from tokenizers import Tokenizer

from libra.resources import rng
from libra.resources.config import Config, Seconds
from libra.resources.config_errors import checked_options
from libra.resources.errors import ConfigError
from libra.resources.types import Stream, Tokens, ToolReturn, ToolState, Trajectory
from libra.tasks.envs.base import Action, Demonstrator, Environment, EnvironmentConfig, Session, payload_digest
from libra.tasks.envs.hop_task import Reply, look_up, make_task
from libra.tasks.envs.hop_text import END, make_tokenizer, prompt_text, return_text, understand


class HopOptions(Config):
    """``environment.options`` of `hop`."""

    prompts: int | None = Field(default=None, ge=1)
    """Training prompts in the data set; None: endless."""
    max_hops: int = Field(default=6, ge=1)
    """Longest chain of lookups."""
    continue_p: float = Field(default=0.7, ge=0, le=1)
    """Probability that a chain goes on after a lookup."""
    busy: tuple[float, ...] = Field(default=(0.0, 0.1, 0.2, 0.35), min_length=1)
    """A task's calls are busy with one of these probabilities."""
    latency: Seconds = 0.0
    """Time of a lookup."""
    slow_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the trajectories whose lookups take ``slow_latency`` instead."""
    slow_latency: Seconds = 0.0
    """Time of a lookup in a slow trajectory."""

    @model_validator(mode="after")
    def _busy_are_probabilities(self) -> Self:
        if bad := [p for p in self.busy if not 0 <= p < 1]:
            raise ValueError(f"busy holds {bad[0]}; each is a probability in [0, 1)")
        return self


class HopEnvironment(Environment):
    """The quick start's environment; needs ``tokenizers`` and nothing heavier."""

    replayable = True
    artifacts = False
    size_bounds = (10, 16, 28)

    def __init__(self, config: EnvironmentConfig, tokenizer_path: str, seed: int) -> None:
        self.options = checked_options(HopOptions, "environment.options", "hop", config.options)
        self.config, self.seed = config, seed
        self.tokenizer = Tokenizer.from_file(tokenizer_path)
        end = self.tokenizer.token_to_id(END)
        if end is None:
            raise ConfigError(
                f"the tokenizer {tokenizer_path} has no token {END!r}, which ends a turn of hop; "
                "use a model with the ChatML protocol (Qwen3, SmolLM2), or no model for the cold start"
            )
        self._stop = (end,)

    @classmethod
    def make_tokenizer(cls) -> str:
        return make_tokenizer().to_str(pretty=True)

    def demonstrator(self) -> Demonstrator:
        # Imported here: workers that only play need no demonstrations.
        from libra.tasks.envs.hop_demo import HopDemonstrator

        return HopDemonstrator(self)

    def prompts(self, stream: Stream) -> int | None:
        return self.options.prompts if stream == "train" else None

    def task(self, stream: Stream, prompt: int) -> dict[str, Any]:
        o = self.options
        return make_task(self.seed, stream, prompt, max_hops=o.max_hops, continue_p=o.continue_p, busy=o.busy)

    def reset(self, task: dict[str, Any]) -> Tokens:
        return self.encode(prompt_text(task["start"]))

    @property
    def stop(self) -> tuple[int, ...]:
        return self._stop

    def parse(self, tokens: Tokens, finished: bool) -> Action:
        if not finished:
            return Action("final", end="malformed")
        said = understand(self.render(tokens[:-1]))
        if said.call is not None:
            return Action("call", call=said.call)
        return Action("final", end="malformed" if said.answer is None else "answer")

    def open(self, task: dict[str, Any], trajectory: str, seed: int) -> HopSession:
        return HopSession(self, task, trajectory, seed)

    def reward(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        turn = last_turn(trajectory)
        if not trajectory.tools or not len(turn) or int(turn[-1]) not in self._stop:
            return 0.0
        return float(understand(self.render(turn[:-1])).answer == task["value"])

    def render(self, tokens: Tokens) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    def encode(self, text: str) -> Tokens:
        """Token ids of ``text``, special tokens recognised, nothing added."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


class HopSession(Session):
    """One trajectory's lookups."""

    def __init__(self, environment: HopEnvironment, task: dict[str, Any], trajectory: str, seed: int) -> None:
        self._environment, self._task = environment, task
        self._busy = np.array([rng.stream(seed, "busy", trajectory)], np.uint64)
        options = environment.options
        slow = rng.generator(seed, "slow", trajectory).random() < options.slow_share
        self._latency = options.slow_latency if slow else options.latency

    async def tool(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        began = time.perf_counter()
        if self._latency:
            await asyncio.sleep(self._latency)
        reply = self.reply(turn, call)
        payload = self._environment.encode(return_text(reply.text))
        state = ToolState(str(call["name"]), self._environment.size_class(len(payload)), reply.status)
        return ToolReturn(turn, call, payload, state, time.perf_counter() - began, payload_digest(payload))

    def reply(self, turn: int, call: dict[str, Any]) -> Reply:
        """The reply to call number ``turn``."""
        return look_up(self._task, call, float(rng.uniforms(self._busy, np.array([turn]))[0]))


def last_turn(trajectory: Trajectory) -> Tokens:
    """The tokens sampled since the last that were not (the prompt or a tool return)."""
    given = np.flatnonzero(trajectory.mask == 0)
    return trajectory.tokens[int(given[-1]) + 1 if len(given) else 0 :]


def write_tokenizer(path: Path) -> None:
    """Write `hop`'s own ``tokenizer.json`` to ``path``."""
    path.write_text(HopEnvironment.make_tokenizer(), encoding="utf-8")
