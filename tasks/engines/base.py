"""The seam of rollout engines: what every kind does, in the vocabulary of the engine host.

An engine lives in a child process of the rollout worker, is driven by one thread (the host's loop) and never blocks
longer than one step. Invariants: token ids in, token ids out; every sampled token carries the logprob of the
distribution it was sampled from and the weight version that sampled it; a sequence's KV is kept between its requests
while it stays, and is dropped when new weights are loaded; a request ends exactly once, as one `Generated`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from libra.resources.config import Config
from libra.resources.types import Finish, Tokens, WeightVersion


class EngineConfig(Config):
    """How a rollout instance runs its model."""

    kind: str = "torch"
    """``torch``, ``scripted``, ``random``, or the import path of an `Engine` (``my.module:Engine``)."""
    slots: int = Field(default=64, ge=1)
    """Sequences whose KV is resident at once; more requests than slots queue inside the engine."""
    max_context: int = Field(default=1024, ge=2)
    """Longest sequence in tokens, prompt included."""
    max_prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens prefilled in one step, padding included."""
    threads: int = Field(default=1, ge=1)
    """Threads of the engine process."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the kind."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """Continue ``tokens`` (the whole context) by up to ``max_new`` tokens, ending at any id of ``stop`` (it is kept).

    ``id`` names the request, ``sequence`` the trajectory whose KV may be reused. ``temperature`` 0 is greedy (its
    logprobs are those of temperature 1). ``stream`` is the counter-RNG stream: the token at context position p is drawn
    with ``uniforms(stream, p)`` by inverting the distribution function over ascending token ids.
    """

    id: str
    sequence: str
    tokens: Tokens
    max_new: int
    stop: tuple[int, ...]
    temperature: float
    stream: int


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """The end of a request: sampled ids, logprobs and versions of shape (n,), why it ended, context tokens whose KV was
    reused, and the seconds it queued for a slot. ``error`` is the engine's own text when this request failed."""

    id: str
    sequence: str
    tokens: Tokens
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: Finish
    cached: int
    queued: float
    error: str | None = None


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


class Engine(ABC):
    """One rollout engine. Not thread-safe: the host calls everything from one thread."""

    version: int
    """Version of the loaded weights; -1 before the first `load`."""

    @abstractmethod
    def __init__(self, config: EngineConfig, *, tokenizer_path: str | None, deterministic: bool) -> None:
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

    def close(self) -> None:  # noqa: B027 - most engines hold nothing that outlives their process
        """Free what outlives the process."""
