"""Synthetic agentic workloads: a Markov chain over tool states with hidden kinds of work, and drift.

A kind of work has a typical final length, a number of turns and a chain of tool states. A trajectory may turn into
another kind on the way, which only its next returns show, and a state may be misreported. Prompts lean to kinds,
persistently. The drift of the policy is an exponential tilt of the kinds' weights towards a mean length. Invariant:
equal arguments give equal traces, whatever was drawn before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pydantic import ConfigDict, Field

from libra.resources.config import Config
from libra.resources.types import ToolState
from libra.scheduler_plugin.simulation.traces import Trace, Turn


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of work: typical ``final`` tokens, least and most ``turns``, its chain of ``states``."""

    final: float
    turns: tuple[int, int]
    states: tuple[ToolState, ...]


VIEW = ToolState("view", 0, "ok")
EDIT = ToolState("edit", 1, "ok")
BASH = ToolState("bash", 2, "ok")
FAIL = ToolState("test", 1, "failure")
SLOW = ToolState("test", 2, "timeout")
PASS = ToolState("test", 0, "ok")
STATES = (VIEW, EDIT, BASH, FAIL, SLOW, PASS)
KINDS = (
    Kind(1_500, (1, 2), (VIEW, PASS)),
    Kind(4_200, (3, 4), (EDIT, VIEW, PASS)),
    Kind(9_500, (3, 5), (BASH, EDIT)),
    Kind(19_000, (7, 10), (FAIL, EDIT, FAIL)),
    Kind(33_000, (10, 15), (SLOW, BASH, SLOW)),
)
WEIGHTS = np.array([0.46, 0.26, 0.13, 0.09, 0.06])
PAYLOAD = (160.0, 700.0, 2_400.0)
"""Typical tokens of a payload by size class."""
TOOL_SECONDS = {"view": 1.0, "edit": 1.0, "bash": 4.0, "test": 10.0}


class WorkloadConfig(Config):
    """The workload of a scenario."""

    model_config = ConfigDict(allow_inf_nan=False)

    mean_from: float = Field(default=2500, gt=0)
    """Mean final context of the first step, tokens."""
    mean_to: float = Field(default=11_500, gt=0)
    """Of the last step; the published drift is 2.5K to 11.5K."""
    jump_at: int | None = Field(default=None, ge=0)
    """Step at which the mean jumps from the first to the last value; None: it goes there evenly."""
    prompts: int = Field(default=512, ge=1)
    """Prompts that epochs repeat."""
    switch: float = Field(default=0.032, ge=0, le=1)
    """Probability a turn that the kind of work changes."""
    misreport: float = Field(default=0.032, ge=0, le=1)
    """Probability that a tool state is another."""
    spread: float = Field(default=0.13, ge=0)
    """Sigma of the logarithm of a kind's length."""
    lean: float = Field(default=0.4, ge=0)
    """How much prompts differ."""
    stay: float = Field(default=0.7, ge=0, le=1)
    """Probability that a tool state repeats."""
    limit: int = Field(default=40_960, ge=1000)
    """Longest context."""
    tool_scale: float = Field(default=1.0, ge=0)
    """Factor on tool seconds."""


class Workload:
    """Groups of traces for a run of ``steps`` steps of ``groups`` groups of ``members`` trajectories."""

    def __init__(self, config: WorkloadConfig, seed: int, steps: int, groups: int, members: int) -> None:
        self.config, self.seed = config, seed
        self.steps, self.groups, self.members = steps, groups, members
        random = np.random.default_rng([seed, 1 << 20])
        self._leans = random.gumbel(size=(config.prompts, len(KINDS))) * config.lean
        self._order = random.permutation(config.prompts)
        self._weights: dict[float, np.ndarray] = {}
        self._finals = np.array([kind.final for kind in KINDS])

    def mean_at(self, step: int) -> float:
        """Mean final context that the kinds are tilted to at a step."""
        c = self.config
        if c.jump_at is not None:
            return c.mean_from if step < c.jump_at else c.mean_to
        share = step / max(1, self.steps - 1)
        return c.mean_from + (c.mean_to - c.mean_from) * min(1.0, share)

    def group(self, number: int) -> list[Trace]:
        """The traces of the n-th group admitted."""
        prompt = int(self._order[number % self.config.prompts])
        epoch = number // self.config.prompts
        random = np.random.default_rng([self.seed, number])
        weights = self._tilted(self.mean_at(number // self.groups)) * np.exp(self._leans[prompt])
        weights = weights / weights.sum()
        tokens = 300 + 50 * (prompt % 11)
        return [
            Trace(f"p{prompt}e{epoch}m{member}", tokens, tuple(self._turns(random, weights, tokens)))
            for member in range(self.members)
        ]

    def batch(self, step: int) -> list[Trace]:
        """All traces of one step's groups."""
        return [trace for n in range(self.groups) for trace in self.group(step * self.groups + n)]

    def _turns(self, random: np.random.Generator, weights: np.ndarray, prompt_tokens: int) -> Iterator[Turn]:
        c = self.config
        kind = int(np.searchsorted(np.cumsum(weights), random.random()))
        kind = min(kind, len(KINDS) - 1)
        goal, left = self._goal(random, kind, prompt_tokens)
        context, state = prompt_tokens, 0
        while left > 0:
            if context > prompt_tokens and random.random() < c.switch:
                kind = min(len(KINDS) - 1, kind + 1) if random.random() < 0.6 else max(0, kind - 1)
                goal, left = self._goal(random, kind, context)
                state = 0
            true = KINDS[kind].states[state]
            shown = true if random.random() >= c.misreport else STATES[int(random.integers(len(STATES)))]
            slot = (goal - context) / (left + 1)
            payload = int(min(PAYLOAD[true.size] * np.exp(random.normal(0, 0.25)), 0.75 * slot))
            generated = int(max(20.0, (slot - payload) * np.exp(random.normal(0, 0.2))))
            if context + generated + payload >= c.limit - 100:
                break
            seconds = c.tool_scale * TOOL_SECONDS[true.type] * float(np.exp(random.normal(0, 0.5)))
            yield Turn(generated, shown, payload, seconds)
            context += generated + payload
            left -= 1
            if random.random() >= c.stay:
                state = (state + 1) % len(KINDS[kind].states)
        yield Turn(int(min(max(40.0, goal - context), c.limit - context)))

    def _goal(self, random: np.random.Generator, kind: int, context: int) -> tuple[float, int]:
        goal = max(KINDS[kind].final * np.exp(random.normal(0, self.config.spread)), context + 250.0)
        low, high = KINDS[kind].turns
        return min(goal, self.config.limit - 50.0), int(random.integers(low, high + 1))

    def _tilted(self, mean: float) -> np.ndarray:
        if mean not in self._weights:
            low, high = -1e-3, 1e-3
            for _ in range(60):
                tilt = (low + high) / 2
                weights = WEIGHTS * np.exp(tilt * self._finals)
                weights = weights / weights.sum()
                low, high = (tilt, high) if weights @ self._finals < mean else (low, tilt)
            self._weights[mean] = weights
        return self._weights[mean]
