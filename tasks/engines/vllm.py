"""vLLM as a rollout engine: our slots, queue and bookkeeping around one `Core`.

Invariants: those of the seam. At most ``slots`` requests are inside vLLM, one a sequence; the others wait here, so that
what is running and what waits is known without asking. KV between the requests of a sequence is vLLM's prefix cache:
whole blocks, kept while there is room, shared between sequences that begin alike. What `stats` calls resident is what
was computed under the present weights and not released, the most recent ``slots`` sequences of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from importlib.util import find_spec
from time import perf_counter

from libra.resources.errors import ConfigError, WeightError
from libra.resources.types import WeightVersion
from libra.tasks.engines.base import (
    ALONE,
    Engine,
    EngineConfig,
    EngineStats,
    Generated,
    GenerateRequest,
    Place,
    check_ids,
    nothing_sampled,
    parse_options,
)
from libra.tasks.engines.vllm_core import Core
from libra.tasks.engines.vllm_options import VllmOptions, temperature_problem, vllm_problems

STEP_SECONDS = 0.02
"""The longest that a step waits for EngineCore: new requests are looked at in between."""


@dataclass(slots=True)
class _Run:
    """A request, when it came, and how long it waited for a slot."""

    request: GenerateRequest
    submitted: float
    queued: float = 0.0


class VllmEngine(Engine):
    """vLLM in processes of its own; they come with the first `load`."""

    def __init__(
        self, config: EngineConfig, *, tokenizer_path: str | None, deterministic: bool, place: Place = ALONE
    ) -> None:
        if problems := vllm_problems(config, deterministic=deterministic, temperatures={}, head_dim=None):
            raise ConfigError("\n".join(problems))
        if find_spec("vllm") is None:
            raise ConfigError(
                "engine.kind = 'vllm' but vLLM is not installed here: make vllm (on CPUs), or use 'torch'"
            )
        self.version = -1
        self._config = config
        self._core = Core(config, parse_options(VllmOptions, config), tokenizer_path, place)
        self._waiting: deque[_Run] = deque()
        self._running: dict[str, _Run] = {}
        # Tokens of every idle sequence with KV, the longest idle first.
        self._idle: dict[str, int] = {}
        self._released: set[str] = set()
        self._ended: list[Generated] = []
        self._prefilled = self._reused = 0

    def load(self, weights: WeightVersion) -> None:
        if weights.version == self.version:
            return
        self._core.load(weights)
        self.version = weights.version
        self.kv_layout, self.kv_room = self._core.kv_layout, self._core.kv_room
        self._idle.clear()

    def submit(self, request: GenerateRequest) -> None:
        if self.version < 0:
            raise WeightError(f"request {request.id} came before any weights; load a version first")
        room = self._config.max_context - len(request.tokens)
        if request.max_new < 1 or room < 1 or not len(request.tokens):
            raise ValueError(
                f"request {request.id} has {len(request.tokens)} tokens of context and asks for {request.max_new} new "
                f"ones; the engine holds {self._config.max_context} tokens a sequence (engine.max_context)"
            )
        if request.id in self._running or any(run.request.id == request.id for run in self._waiting):
            raise ValueError(f"request {request.id} is running already; an id names one request")
        check_ids(request, self._core.vocabulary)
        if (problem := temperature_problem("temperature", request.temperature)) is not None:
            raise ValueError(f"request {request.id}: {problem}")
        self._waiting.append(_Run(replace(request, max_new=min(request.max_new, room)), perf_counter()))

    def abort(self, request: str) -> None:
        if request in self._running:
            self._core.abort(request)
            self._collect()
            return
        for run in self._waiting:
            if run.request.id == request:
                self._waiting.remove(run)
                self._ended.append(nothing_sampled(run.request, perf_counter() - run.submitted))
                return

    def release(self, sequence: str) -> None:
        self._idle.pop(sequence, None)
        if any(run.request.sequence == sequence for run in self._running.values()):
            self._released.add(sequence)

    def step(self) -> list[Generated]:
        self._admit()
        if self._running and not self._ended and not self._core.has_ended:
            self._core.wait(STEP_SECONDS)
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> EngineStats:
        running = sum(len(run.request.tokens) for run in self._running.values())
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            resident_sequences=len(self._running) + len(self._idle),
            resident_tokens=running + sum(self._idle.values()),
            sampled=self._core.meter.sampled,
            prefilled=self._prefilled,
            reused=self._reused,
            steps=self._core.meter.steps,
            kv_refused=dict(self._core.meter.kv_refused),
        )

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting or self._ended)

    def check(self) -> None:
        self._core.check()

    def close(self) -> None:
        self._core.close()

    def _admit(self) -> None:
        """Give slots to waiting requests, in order; one whose sequence is running lets others pass."""
        active = {run.request.sequence for run in self._running.values()}
        passed: list[_Run] = []
        while self._waiting and len(self._running) < self._config.slots:
            run = self._waiting.popleft()
            sequence = run.request.sequence
            if sequence in active:
                passed.append(run)
                continue
            active.add(sequence)
            self._idle.pop(sequence, None)
            while len(self._running) + len(self._idle) >= self._config.slots:
                del self._idle[next(iter(self._idle))]
            run.queued = perf_counter() - run.submitted
            self._running[run.request.id] = run
            self._core.submit(run.request)
        self._waiting.extendleft(reversed(passed))

    def _collect(self) -> None:
        """Take over what has ended inside vLLM."""
        for end in self._core.take():
            run = self._running.pop(end.id)
            context, sequence = len(run.request.tokens), run.request.sequence
            self._reused += end.cached
            self._prefilled += context - end.cached
            if sequence in self._released:
                self._released.discard(sequence)
            elif end.error is None:
                self._idle[sequence] = context + max(0, len(end.tokens) - 1)
            self._ended.append(replace(end, queued=run.queued))
