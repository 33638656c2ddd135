"""Engines without a model: the paced base, and the one that replays given tokens.

A `PacedEngine` knows a request's tokens as it is submitted and hands them out in virtual steps. Invariants: slots,
queueing, prefix reuse, abort, release and versions behave as in an engine with a model: at most ``slots`` sequences are
resident, a waiting request takes the slot of the sequence that has been idle longest, one request a sequence runs at a
time, and each token carries the version that was loaded when it was handed out.
"""

from __future__ import annotations

import json
import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from libra.resources import rng
from libra.resources.config import Config, Seconds
from libra.resources.errors import ConfigError
from libra.resources.types import Finish, Tokens, WeightVersion
from libra.resources.weights import load_weights
from libra.tasks.engines.base import (
    ALONE,
    Engine,
    EngineConfig,
    EngineStats,
    Generated,
    GenerateRequest,
    Place,
    parse_options,
)
from libra.tasks.registry import load_object

Script = Callable[[str, Tokens, int], Tokens]
"""(sequence, context, stream) → the ids of the next turn, its stop id included."""


class PaceOptions(Config):
    """How fast a `PacedEngine` hands its tokens out."""

    tokens_per_step: int = Field(default=1, ge=1)
    """Tokens that each running request gets in one step."""
    step_seconds: Seconds = Field(default=0.0, ge=0)
    """How long a step takes."""
    slow_share: float = Field(default=0.0, ge=0, le=1)
    """Share of sequences that are slow: the long tail."""
    slow_factor: float = Field(default=10.0, ge=1)
    """Times as many steps that a slow sequence takes."""


class ScriptedOptions(PaceOptions):
    """Options of the kind ``scripted``: one of ``script`` and ``file``."""

    script: str | None = None
    """Import path of a function (sequence, context, stream) → token ids of the next turn."""
    file: Path | None = None
    """JSON {sequence: [[ids of segment 0], [ids of segment 1], …]}."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.script is None) == (self.file is None):
            raise ValueError("give one of 'script' (an import path) and 'file' (a JSON file)")
        return self


@dataclass(slots=True)
class _Run:
    """A request, its planned output, and how much of it has been handed out."""

    request: GenerateRequest
    tokens: Tokens
    logprobs: NDArray[np.float32]
    rate: float
    submitted: float
    queued: float = 0.0
    cached: int = 0
    steps: int = 0
    done: int = 0
    versions: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def resident(self) -> int:
        """Tokens with KV: the last sampled token has none until it is fed."""
        return len(self.request.tokens) + max(0, self.done - 1)


class PacedEngine(Engine):
    """The semantics of an engine around outputs that are known in advance."""

    def __init__(self, config: EngineConfig, options: PaceOptions) -> None:
        self.version = -1
        self._config, self._options = config, options
        self._waiting: deque[_Run] = deque()
        self._running: dict[str, _Run] = {}
        # Context of every idle sequence with KV, the longest idle first.
        self._idle: dict[str, Tokens] = {}
        self._aborted: list[Generated] = []
        self._sampled = self._prefilled = self._reused = self._steps = 0

    @abstractmethod
    def plan(self, request: GenerateRequest) -> tuple[Tokens, NDArray[np.float32]]:
        """The ids and logprobs that the request will get if nothing ends it before; cut at ``max_new`` and at the first
        stop id by the caller. `ValueError` if there are none."""

    def load(self, weights: WeightVersion) -> None:
        if weights.version == self.version:
            return
        load_weights(weights)
        self.version = weights.version
        self._idle.clear()
        # The contexts of running requests are prefilled again.
        self._prefilled += sum(run.resident for run in self._running.values())

    def submit(self, request: GenerateRequest) -> None:
        room = self._config.max_context - len(request.tokens)
        if room < 1 or request.max_new < 1:
            raise ValueError(
                f"request {request.id}: a context of {len(request.tokens)} tokens with max_new {request.max_new} "
                f"leaves no room for a token (engine.max_context is {self._config.max_context})"
            )
        tokens, logprobs = self.plan(request)
        stops = np.flatnonzero(np.isin(tokens, request.stop))
        length = min(len(tokens), request.max_new, room, *(stops[:1] + 1).tolist())
        if length == 0:
            raise ValueError(f"request {request.id}: there are no tokens for sequence {request.sequence!r} here")
        rate = float(self._options.tokens_per_step)
        if self._is_slow(request.sequence):
            rate /= self._options.slow_factor
        now = time.monotonic()
        self._waiting.append(_Run(request, tokens[:length].astype(np.int32), logprobs[:length], rate, now))

    def abort(self, request: str) -> None:
        run = self._running.get(request)
        if run is None:
            run = next((waiting for waiting in self._waiting if waiting.request.id == request), None)
            if run is None:
                return
            self._waiting.remove(run)
            run.queued = time.monotonic() - run.submitted
            self._aborted.append(_generated(run, "abort"))
        else:
            self._aborted.append(self._end(run, "abort"))

    def release(self, sequence: str) -> None:
        self._idle.pop(sequence, None)

    def step(self) -> list[Generated]:
        ended, self._aborted = self._aborted, []
        self._admit()
        if self._running:
            self._steps += 1
            if self._options.step_seconds:
                time.sleep(self._options.step_seconds)
        for run in list(self._running.values()):
            self._advance(run)
            if run.done == len(run.tokens):
                ended.append(self._end(run, "stop" if int(run.tokens[-1]) in run.request.stop else "length"))
        return ended

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            resident_sequences=len(self._running) + len(self._idle),
            resident_tokens=sum(run.resident for run in self._running.values()) + sum(map(len, self._idle.values())),
            sampled=self._sampled,
            prefilled=self._prefilled,
            reused=self._reused,
            steps=self._steps,
        )

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting or self._aborted)

    def _is_slow(self, sequence: str) -> bool:
        stream = np.array([rng.stream(0, "slow", sequence)], np.uint64)
        return bool(rng.uniforms(stream, np.array([0]))[0] < self._options.slow_share)

    def _admit(self) -> None:
        """Give slots to waiting requests, in order; one whose sequence is running lets others pass."""
        active = {run.request.sequence for run in self._running.values()}
        passed: list[_Run] = []
        while self._waiting:
            sequence = self._waiting[0].request.sequence
            if sequence in active:
                passed.append(self._waiting.popleft())
            elif sequence in self._idle or self._free_slot():
                active.add(sequence)
                self._start(self._waiting.popleft())
            else:
                break
        self._waiting.extendleft(reversed(passed))

    def _free_slot(self) -> bool:
        """Whether a slot is free, if need be by dropping the sequence that has been idle longest."""
        if len(self._running) + len(self._idle) < self._config.slots:
            return True
        if not self._idle:
            return False
        del self._idle[next(iter(self._idle))]
        return True

    def _start(self, run: _Run) -> None:
        context = run.request.tokens
        run.queued = time.monotonic() - run.submitted
        # The last token of a context is always fed: its output is what the first new token is drawn from.
        run.cached = min(_common_prefix(self._idle.pop(run.request.sequence, context[:0]), context), len(context) - 1)
        run.cached = max(run.cached, 0)
        self._reused += run.cached
        self._prefilled += len(context) - run.cached
        self._running[run.request.id] = run

    def _advance(self, run: _Run) -> None:
        run.steps += 1
        # Counted from the start, so that rates such as 1/10 do not drift; the margin is for their rounding.
        reached = min(math.floor(run.steps * run.rate + 1e-9), len(run.tokens))
        count = reached - run.done
        run.done = reached
        self._sampled += count
        run.versions.append(np.full(count, self.version, np.int32))

    def _end(self, run: _Run, finish: Finish) -> Generated:
        del self._running[run.request.id]
        self._idle[run.request.sequence] = np.concatenate([run.request.tokens, run.tokens[: max(0, run.done - 1)]])
        return _generated(run, finish)


class ScriptedEngine(PacedEngine):
    """Replays given tokens; their logprob is 0 (a script is certain of what it says).

    A segment that does not end with a stop id has finish ``length``.
    """

    def __init__(
        self, config: EngineConfig, *, tokenizer_path: str | None, deterministic: bool, place: Place = ALONE
    ) -> None:
        options = parse_options(ScriptedOptions, config)
        super().__init__(config, options)
        if options.script is not None:
            self._script = cast(Script, load_object(options.script, "engine.options.script"))
        else:
            assert options.file is not None
            self._script = _Recording(options.file)

    def plan(self, request: GenerateRequest) -> tuple[Tokens, NDArray[np.float32]]:
        tokens = np.asarray(self._script(request.sequence, request.tokens, request.stream), np.int32)
        return tokens, np.zeros(len(tokens), np.float32)


class _Recording:
    """Segments from a file. Which one comes next follows from the context alone, so that a trajectory may restart on
    any engine: the first whose predecessors all stand in the context, in order."""

    def __init__(self, path: Path) -> None:
        try:
            data: dict[str, list[list[int]]] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"engine.options.file = {str(path)!r} cannot be read: {error}") from error
        self._segments = {sequence: [np.asarray(ids, np.int32) for ids in rows] for sequence, rows in data.items()}

    def __call__(self, sequence: str, context: Tokens, stream: int) -> Tokens:
        after = 0
        for segment in self._segments.get(sequence, ()):
            found = _find(context, segment, after)
            if found is None:
                return segment
            after = found + len(segment)
        return np.empty(0, np.int32)


def _generated(run: _Run, finish: Finish) -> Generated:
    return Generated(
        run.request.id,
        run.request.sequence,
        run.tokens[: run.done],
        run.logprobs[: run.done],
        np.concatenate([np.empty(0, np.int32), *run.versions]),
        finish,
        run.cached,
        run.queued,
    )


def _common_prefix(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _find(context: Tokens, segment: Tokens, start: int) -> int | None:
    """Where ``segment`` first stands in ``context`` from ``start`` on."""
    last = len(context) - len(segment)
    if last < start or not len(segment):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(context[start:], len(segment))
    hits: NDArray[Any] = np.flatnonzero((windows == segment).all(axis=1))
    return start + int(hits[0]) if len(hits) else None
