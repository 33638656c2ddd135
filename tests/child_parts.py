"""For tests of workers and their child processes: engines and an environment that misbehave on purpose (children and
workers load them by import path), and a decorator for tests that await."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np

from libra.resources.kv.layout import KVLayout
from libra.resources.types import Stream, Tokens, ToolReturn, ToolState, Trajectory
from libra.resources.types.run import RunSpec
from libra.tasks.engines.base import EngineConfig, Generated
from libra.tasks.engines.random import RandomEngine
from libra.tasks.envs.base import Action, Environment, EnvironmentConfig, Session

STOP = 0
CALL = 1
TEST_SECONDS = 120.0

P = ParamSpec("P")


def run_spec(folder: Path, **changes: Any) -> RunSpec:
    """The spec of a small run in ``folder`` with scripted parts and `CountingEnvironment`."""
    values: dict[str, Any] = {
        "run": "0badcafe",
        "name": "test",
        "run_dir": str(folder),
        "seed": 1,
        "eval_seed": 2,
        "deterministic": False,
        "engine": {
            "kind": "scripted",
            "slots": 4,
            "max_context": 500,
            "options": {"script": "child_parts:calls_then_stop"},
        },
        "trainer": {"kind": "scripted"},
        "algorithm": {},
        "environment": {"kind": "child_parts:CountingEnvironment", "options": {}},
        "tokenizer": str(folder / "tokenizer.json"),
        "buckets": [[1, None, 1]],
        "roles": {"rollout": 1, "tool": 1, "reward": 1, "train": 1},
        "temperature": 1.0,
        "eval_temperature": 0.5,
        "max_turn_tokens": 20,
        "max_context": 400,
        "bind_seconds": 10.0,
        "start_seconds": 60.0,
        "load_seconds": 30.0,
        "stop_seconds": 10.0,
    }
    return RunSpec(**(values | changes))


def awaited(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine, on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TEST_SECONDS))

    return run


class CrashingEngine(RandomEngine):
    """Raises in its third step."""

    def step(self) -> list[Generated]:
        if self.stats().steps == 2:
            raise RuntimeError("device-side assert: index 640 is out of bounds")
        return super().step()


class StagingEngine(RandomEngine):
    """Could stage KV of this layout."""

    kv_layout = KVLayout("float32", layers=2, kv_heads=2, head_dim=4, block_size=4, tp=1, page_format="test")


class DyingEngine(RandomEngine):
    """Ends the process in its third step, with a last word on stderr."""

    def step(self) -> list[Generated]:
        if self.stats().steps == 2:
            sys.stderr.write("double free or corruption (out)\n")
            os._exit(7)
        return super().step()


class StuckEngine(RandomEngine):
    """Computes for ever in its first step."""

    def step(self) -> list[Generated]:
        while True:
            pass


class UnbuildableEngine(RandomEngine):
    """Cannot be made."""

    def __init__(self, config: EngineConfig, **others: Any) -> None:
        sys.stderr.write("looking for the model\n")
        raise OSError("no file named config.json")


class SilentEngine(RandomEngine):
    """Takes for ever to start."""

    def __init__(self, config: EngineConfig, **others: Any) -> None:
        time.sleep(3600)


def endless(sequence: str, context: Tokens, stream: int) -> Tokens:
    """A script for the scripted engine: no stop id, as long as anybody may want."""
    return np.full(10_000, 5, np.int32)


def calls_then_stop(sequence: str, context: Tokens, stream: int) -> Tokens:
    """A script for `CountingEnvironment`: two calls, then the end."""
    turns = int((context == CALL).sum())
    return np.array([CALL, STOP] if turns < 2 else [7, STOP], np.int32)


class CountingEnvironment(Environment):
    """Its tool returns how many calls the session has had. ``options``: ``unstable`` (payloads depend on how often the
    session was opened), ``replayable``, ``slow`` (trajectories whose calls take for ever), ``broken`` (trajectories
    whose calls raise), ``reward``."""

    artifacts = True
    opened = 0

    def __init__(self, config: EnvironmentConfig, tokenizer_path: str, seed: int) -> None:
        self.options = config.options
        self.replayable = config.options.get("replayable", True)

    def prompts(self, stream: Stream) -> int | None:
        return None

    def task(self, stream: Stream, prompt: int) -> dict[str, Any]:
        return {"prompt": prompt}

    def reset(self, task: dict[str, Any]) -> Tokens:
        return np.array([9, 9], np.int32)

    @property
    def stop(self) -> tuple[int, ...]:
        return (STOP,)

    def parse(self, tokens: Tokens, finished: bool) -> Action:
        if not finished:
            return Action("final", end="malformed")
        return Action("call", {"name": "count"}) if CALL in tokens else Action("final", end="answer")

    def open(self, task: dict[str, Any], trajectory: str, seed: int) -> CountingSession:
        CountingEnvironment.opened += 1
        return CountingSession(self.options, trajectory, seed)

    def reward(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        if self.options.get("reward") == "raise":
            raise KeyError("answer")
        return float(self.options.get("reward", len(trajectory.tools) + trajectory.artifact.get("calls", 0)))

    def render(self, tokens: Tokens) -> str:
        return " ".join(map(str, tokens.tolist()))


class CountingSession(Session):
    """The state of `CountingEnvironment`."""

    def __init__(self, options: dict[str, Any], trajectory: str, seed: int) -> None:
        self.options, self.trajectory, self.seed = options, trajectory, seed
        self.calls = 0
        self.closed = False

    async def tool(self, turn: int, call: dict[str, Any]) -> ToolReturn:
        if self.trajectory in self.options.get("slow", ()):
            await asyncio.sleep(3600)
        if self.trajectory in self.options.get("broken", ()):
            raise ValueError("the tool has no battery")
        self.calls += 1
        salt = CountingEnvironment.opened if self.options.get("unstable") else 0
        payload = np.array([100 + self.calls, 200 + salt], np.int32)
        digest = hashlib.sha256(payload.tobytes()).hexdigest()
        return ToolReturn(turn, call, payload, ToolState("count", 0, "ok"), 0.0, digest)

    def artifact(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def close(self) -> None:
        self.closed = True
