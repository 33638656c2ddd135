"""The seam of rollout engines: what every kind does, in the vocabulary of the engine host.

An engine lives in a child process of the rollout worker, is driven by one thread (the host's loop) and never blocks
longer than one step. Invariants: token ids in, token ids out; every sampled token carries the logprob of the
distribution it was sampled from and the weight version that sampled it; a sequence's KV is kept between its requests
while it stays, and is dropped when new weights are loaded; a request ends exactly once, as one `Generated`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from libra.resources.config import Bytes, Config
from libra.resources.config_errors import checked_options
from libra.resources.kv.layout import KVLayout
from libra.resources.types import Finish, KVRoom, Tokens, WeightVersion


class EngineConfig(Config):
    """How a rollout instance runs its model."""

    kind: str = "torch"
    """``torch``, ``vllm``, ``scripted``, ``random``, or the import path of an `Engine` (``my.module:Engine``)."""
    slots: int = Field(default=64, ge=1)
    """Sequences whose KV is resident at once; more requests than slots queue inside the engine."""
    max_context: int = Field(default=1024, ge=2)
    """Longest sequence in tokens, prompt included."""
    max_prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens prefilled in one step, padding included."""
    threads: int = Field(default=1, ge=1)
    """Threads of the engine process."""
    kv_arena: Bytes = Field(default=0, ge=0)
    """Bytes of shared memory on each rollout worker in which KV is staged, so that a trajectory that moves to another
    instance takes its KV along; 0: none is. Only engines that can stage (``vllm``)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the kind."""


Options = TypeVar("Options", bound=Config)


def parse_options(options: type[Options], config: EngineConfig) -> Options:
    """``config.options`` as the model ``options``. `ConfigError` names the kind and what is wrong."""
    return checked_options(options, "engine.options", config.kind, config.options)


@dataclass(frozen=True, slots=True)
class Place:
    """What an instance gets from its worker: the TP degree of its bucket (a label to engines that cannot split a model)
    and the KV arena that the worker owns (None: no KV is staged)."""

    tp: int = 1
    arena: str | None = None


ALONE = Place()
"""An engine outside a worker."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """Continue ``tokens`` (the whole context) by up to ``max_new`` tokens, ending at any id of ``stop`` (it is kept).

    ``id`` names the request, ``sequence`` the trajectory whose KV may be reused. ``temperature`` 0 is greedy (its
    logprobs are those of temperature 1). ``stream`` is the counter-RNG stream: the token at context position p is drawn
    with ``uniforms(stream, p)`` by inverting the distribution function over ascending token ids. (An engine that is not
    ours to that depth, vLLM, draws from a generator of its own, seeded by the stream and the context's length.)

    ``stage``: as the request ends, put the sequence's KV into the worker's arena, under the sequence and the version of
    the weights. ``arenas``: other arenas on this node where KV of the sequence may lie. Hints, which an engine without
    an arena does not take.
    """

    id: str
    sequence: str
    tokens: Tokens
    max_new: int
    stop: tuple[int, ...]
    temperature: float
    stream: int
    stage: bool = False
    arenas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """The end of a request: sampled ids, logprobs and versions of shape (n,), why it ended, context tokens whose KV was
    reused, and the seconds it queued for a slot. ``error`` is the engine's own text when this request failed.

    ``loaded``: of the reused tokens, those whose KV came from an arena; ``staged``: tokens whose KV goes into the
    worker's (known of requests that ended by themselves only); ``kv_seconds``: from when it was first scheduled until
    the KV of its context was there, loaded or computed (0: not measured)."""

    id: str
    sequence: str
    tokens: Tokens
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish
    cached: int
    queued: float
    error: str | None = None
    loaded: int = 0
    staged: int = 0
    kv_seconds: float = 0.0


def check_ids(request: GenerateRequest, vocabulary: int) -> None:
    """``ValueError`` if the context holds an id that the model does not know (of a tool's payload, as a rule)."""
    strange = request.tokens[(request.tokens < 0) | (request.tokens >= vocabulary)]
    if len(strange):
        raise ValueError(
            f"request {request.id} holds token id {strange[0]}, but the model's vocabulary has {vocabulary}"
        )


def nothing_sampled(request: GenerateRequest, queued: float = 0.0, error: str | None = None) -> Generated:
    """The end of a request that got no token: aborted as it waited, or failed with the engine's own text."""
    ids: NDArray[np.int32] = np.empty(0, np.int32)
    return Generated(request.id, request.sequence, ids, np.empty(0, np.float32), ids, "abort", 0, queued, error)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Load at this instant: running and waiting requests, resident sequences and their tokens, and totals since start
    (sampled tokens, prefilled tokens, reused tokens, steps)."""

    running: int
    waiting: int
    resident_sequences: int
    resident_tokens: int
    sampled: int
    prefilled: int
    reused: int
    steps: int
    kv_refused: dict[str, int] = field(default_factory=dict)
    """How often KV was not loaded or not staged, by reason."""


class Engine(ABC):
    """One rollout engine. Not thread-safe: the host calls everything from one thread."""

    version: int
    """Version of the loaded weights; -1 before the first `load`."""
    kv_layout: KVLayout | None = None
    """How KV lies in the engine, once it has weights, if it can stage it in an arena."""
    kv_room: KVRoom | None = None
    """What the KV cache holds, once there are weights; None: ``slots`` sequences of ``max_context`` tokens, whose bytes
    nobody knows."""

    @abstractmethod
    def __init__(
        self, config: EngineConfig, *, tokenizer_path: str | None, deterministic: bool, place: Place = ALONE
    ) -> None:
        """``deterministic``: the same requests give the same bits, whatever runs beside them."""

    @abstractmethod
    def load(self, weights: WeightVersion) -> None:
        """Load published weights; a second call with the loaded version does nothing. Drops every sequence's KV;
        running requests go on under the new version and are prefilled again lazily. Raises `WeightError` and keeps the
        old weights if a checksum does not match."""

    @abstractmethod
    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. `ValueError` if its context leaves no room for a token."""

    @abstractmethod
    def abort(self, request: str) -> None:
        """End a request now with finish ``abort`` (its tokens so far are kept); unknown ids are ignored."""

    @abstractmethod
    def release(self, sequence: str) -> None:
        """Drop the KV of a sequence that has ended; unknown ones are ignored."""

    @abstractmethod
    def step(self) -> list[Generated]:
        """Advance every running request by at most one token, admit waiting ones, return those that ended."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Load and totals."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether `step` has anything to do."""

    def check(self) -> None:  # noqa: B027 - most engines are one process with their host
        """Raise what has broken the engine since the last step. Called every second or so while it is idle."""

    def close(self) -> None:  # noqa: B027 - most engines hold nothing that outlives their process
        """Free what outlives the process."""
