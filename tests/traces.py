"""Traces: what trajectories did, without what they said. Synthetic ones, and those of finished trajectories.

The synthetic workload is a Markov chain over tool states with hidden kinds of work. A kind has a typical final length,
a number of turns and a chain of tool states; a trajectory may turn into another kind on the way (which its next returns
show), and a state may be misreported. Prompts lean to kinds, persistently. The policy's drift is an exponential tilt of
the kinds' weights towards long ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np

from libra.resources.types import ToolState, Trajectory


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens ``generated``, then a tool call of ``seconds`` that returned ``payload`` tokens and ``state``; the last
    turn has no tool."""

    generated: int
    state: ToolState | None = None
    payload: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory. Names of one prompt's members differ in what follows the last ``m`` only."""

    name: str
    prompt_tokens: int
    turns: tuple[Turn, ...]
    final: int = field(init=False)

    def __post_init__(self) -> None:
        grown = sum(turn.generated + turn.payload for turn in self.turns)
        object.__setattr__(self, "final", self.prompt_tokens + grown)

    @property
    def prompt(self) -> str:
        """Its prompt's key, from its name: what its members in every step have in common."""
        return self.name[1:].partition("s" if "s" in self.name else "e")[0]

    @property
    def states(self) -> tuple[ToolState, ...]:
        """The states of its tool returns."""
        return tuple(turn.state for turn in self.turns if turn.state is not None)


def contexts(trace: Trace) -> tuple[int, ...]:
    """Its context at the prompt and at each tool return."""
    found = [trace.prompt_tokens]
    for turn in trace.turns:
        if turn.state is not None:
            found.append(found[-1] + turn.generated + turn.payload)
    return tuple(found)


def trace_of(trajectory: Trajectory) -> Trace:
    """What a finished trajectory did."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trajectory.mask, [0]])))
    sampled = [int(end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    turns = []
    for index, generated in enumerate(sampled):
        tool = trajectory.tools[index] if index < len(trajectory.tools) else None
        if tool is None:
            turns.append(Turn(generated))
        else:
            turns.append(Turn(generated, tool.state, len(tool.payload), tool.seconds))
    return Trace(
        f"p{trajectory.prompt}e{trajectory.epoch}m{trajectory.id.member}", trajectory.prompt_tokens, tuple(turns)
    )


@dataclass(frozen=True)
class Kind:
    """A kind of work: typical ``final`` tokens, its range of ``turns``, and its states: the first one is entered, then
    each follows itself with ``stay`` and else the next."""

    final: float
    turns: tuple[int, int]
    states: tuple[ToolState, ...]
    stay: float = 0.7


VIEW = ToolState("view", 0, "ok")
EDIT = ToolState("edit", 1, "ok")
BASH = ToolState("bash", 2, "ok")
FAIL = ToolState("test", 1, "failure")
SLOW = ToolState("test", 2, "timeout")
PASS = ToolState("test", 0, "ok")
KINDS = (
    Kind(1_500, (1, 2), (VIEW, PASS)),
    Kind(4_200, (3, 4), (EDIT, VIEW, PASS)),
    Kind(9_500, (3, 5), (BASH, EDIT)),
    Kind(19_000, (7, 10), (FAIL, EDIT, FAIL)),
    Kind(33_000, (10, 15), (SLOW, BASH, SLOW)),
)
PAYLOAD = (160.0, 700.0, 2_400.0)
"""Typical tokens of a payload by size class."""
SECONDS = {"view": 1.0, "edit": 1.0, "bash": 4.0, "test": 10.0}
_WEIGHTS = np.array([0.46, 0.26, 0.13, 0.09, 0.06])
_FINALS = np.array([kind.final for kind in KINDS])
_STATES = (VIEW, EDIT, BASH, FAIL, SLOW, PASS)


@dataclass(frozen=True)
class Workload:
    """``switch``: probability a turn that the kind changes; ``misreport``: that a state is another; ``spread``: sigma
    of the logarithm of a kind's length; ``lean``: how much prompts differ; ``limit``: longest context."""

    seed: int
    prompts: int = 128
    switch: float = 0.03
    misreport: float = 0.03
    spread: float = 0.13
    lean: float = 0.4
    limit: int = 40_960

    def step(self, number: int, mean: float, groups: int, members: int) -> list[Trace]:
        """The traces of one RL step whose kinds are tilted to ``mean`` tokens; equal arguments give equal traces."""
        random = np.random.default_rng([self.seed, number])
        leans = np.random.default_rng([self.seed, 1 << 20]).gumbel(size=(self.prompts, len(KINDS))) * self.lean
        base = _tilted(mean)
        chosen = random.choice(self.prompts, groups, replace=groups > self.prompts)
        found = []
        for place, prompt in enumerate(chosen):
            weights = base * np.exp(leans[prompt])
            tokens = 300 + 50 * (int(prompt) % 11)
            for member in range(members):
                turns = tuple(self._turns(random, weights / weights.sum(), tokens))
                found.append(Trace(f"p{prompt}s{number}g{place}m{member}", tokens, turns))
        return found

    def _turns(self, random: np.random.Generator, weights: np.ndarray, prompt_tokens: int) -> Iterator[Turn]:
        kind = int(random.choice(len(KINDS), p=weights))
        goal, left = self._goal(random, kind, prompt_tokens)
        context, state = prompt_tokens, 0
        while left > 0:
            if context > prompt_tokens and random.random() < self.switch:
                kind = min(len(KINDS) - 1, kind + 1) if random.random() < 0.6 else max(0, kind - 1)
                goal, left = self._goal(random, kind, context)
                state = 0
            states = KINDS[kind].states
            true = states[state]
            shown = true if random.random() >= self.misreport else _STATES[int(random.integers(len(_STATES)))]
            slot = (goal - context) / (left + 1)
            payload = int(min(PAYLOAD[true.size] * np.exp(random.normal(0, 0.25)), 0.75 * slot))
            generated = int(max(20.0, (slot - payload) * np.exp(random.normal(0, 0.2))))
            if context + generated + payload >= self.limit - 100:
                break
            yield Turn(generated, shown, payload, float(SECONDS[true.type] * np.exp(random.normal(0, 0.5))))
            context += generated + payload
            left -= 1
            if random.random() >= KINDS[kind].stay:
                state = (state + 1) % len(states)
        yield Turn(int(min(max(40.0, goal - context), self.limit - context)))

    def _goal(self, random: np.random.Generator, kind: int, context: int) -> tuple[float, int]:
        goal = max(KINDS[kind].final * np.exp(random.normal(0, self.spread)), context + 250.0)
        low, high = KINDS[kind].turns
        return min(goal, self.limit - 50.0), int(random.integers(low, high + 1))


def _tilted(mean: float) -> np.ndarray:
    """The kinds' weights, tilted exponentially so that their mean length is ``mean``."""
    low, high = -1e-3, 1e-3
    for _ in range(60):
        tilt = (low + high) / 2
        weights = _WEIGHTS * np.exp(tilt * _FINALS)
        weights /= weights.sum()
        low, high = (tilt, high) if weights @ _FINALS < mean else (low, tilt)
    return weights


def drifting(
    workload: Workload, steps: int, means: tuple[float, float], groups: int, members: int
) -> list[list[Trace]]:
    """Steps whose mean length goes from the first of ``means`` to the second."""
    return [workload.step(n, float(mean), groups, members) for n, mean in enumerate(np.linspace(*means, steps))]


def quantile_bounds(traces: Sequence[Trace], shares: Sequence[float]) -> list[int]:
    """Final contexts below which the given shares of ``traces`` end."""
    return [int(value) for value in np.quantile([trace.final for trace in traces], shares)]


RECORDED = Path(__file__).with_name("data") / "hop_traces.json"
"""Recorded trajectories of `hop` (`record_traces` makes it)."""


def write(path: Path, traces: Sequence[Trace]) -> None:
    """One trace a line: name, prompt tokens, and a turn's tokens, tool state, payload and seconds."""
    lines = []
    for trace in traces:
        turns = [
            [t.generated] if t.state is None else [t.generated, *astuple(t.state), t.payload, t.seconds]
            for t in trace.turns
        ]
        lines.append(json.dumps([trace.name, trace.prompt_tokens, turns], separators=(",", ":")))
    path.parent.mkdir(exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read(path: Path = RECORDED) -> list[Trace]:
    """What `write` wrote."""
    return [
        Trace(name, tokens, tuple(Turn(t[0], ToolState(*t[1:4]), *t[4:]) if t[1:] else Turn(t[0]) for t in turns))
        for name, tokens, turns in json.loads(path.read_text())
    ]


def scaled(traces: Sequence[Trace], factor: int) -> list[Trace]:
    """``traces`` with ``factor`` times the tokens: recordings of small models in the sizes of large ones."""
    return [
        Trace(
            t.name,
            t.prompt_tokens * factor,
            tuple(Turn(u.generated * factor, u.state, u.payload * factor, u.seconds) for u in t.turns),
        )
        for t in traces
    ]


def epochs(traces: Sequence[Trace], members: int, seed: int | None = None) -> list[list[Trace]]:
    """Recorded ``traces`` as steps that see every prompt anew, ``members`` of its trajectories at a time. ``seed``:
    which of them come in which step, and the order in which a step's prompts arrive; None: as recorded."""
    prompts: dict[str, list[Trace]] = {}
    for trace in traces:
        prompts.setdefault(trace.prompt, []).append(trace)
    groups = list(prompts.values())
    random = np.random.default_rng(seed)
    if seed is not None:
        groups = [[group[i] for i in random.permutation(len(group))] for group in groups]
    found = []
    for first in range(0, max(map(len, groups)), members):
        order = range(len(groups)) if seed is None else random.permutation(len(groups))
        found.append([trace for i in order for trace in groups[i][first : first + members]])
    return found
