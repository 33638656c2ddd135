"""Baseline ``embedding_like``: the final context guessed from the prompt, once, by a regressor fitted offline.

What an embedding tells of a prompt is stood for by the prompt's identity, hashed into ``width`` indicator features, and
its length; the regressor is ridge regression of the logarithm of the final context. It sees no tool return and learns
nothing after the fit. Invariant: the guess depends on the prompt's key and its length alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from libra.resources.config import Config
from libra.scheduler_plugin.policy.base import FinishedTrajectory, PlacementRequest
from libra.scheduler_plugin.policy.options import parsed
from libra.scheduler_plugin.policy.static import StaticPolicy


@dataclass(frozen=True, slots=True)
class PromptSample:
    """What an offline fit sees of a finished trajectory: its prompt's key and tokens, and its final context."""

    prompt: str
    prompt_tokens: int
    final: int


class EmbeddingLikeConfig(Config):
    """Options of ``embedding_like``: what `fit` gives."""

    intercept: float
    slope: float
    """Of the logarithm of the prompt's tokens."""
    weights: list[float] = Field(min_length=1)
    """One an indicator feature."""

    @classmethod
    def fit(cls, samples: Iterable[PromptSample], width: int = 256, ridge: float = 1.0) -> Self:
        """Least squares on log(final) with an L2 penalty ``ridge`` on the indicators' weights."""
        seen = list(samples)
        x = np.zeros((len(seen), width + 2))
        y = np.array([math.log(max(1, sample.final)) for sample in seen])
        for row, sample in zip(x, seen, strict=True):
            row[0], row[1] = 1.0, math.log(max(1, sample.prompt_tokens))
            row[2 + feature(sample.prompt, width)] = 1.0
        penalty = np.diag([1e-9, 1e-9] + [ridge] * width)
        beta: NDArray[np.float64] = np.linalg.solve(x.T @ x + penalty, x.T @ y)
        return cls(intercept=float(beta[0]), slope=float(beta[1]), weights=beta[2:].tolist())


def feature(prompt: str, width: int) -> int:
    """Which indicator stands for ``prompt``."""
    return zlib.crc32(prompt.encode()) % width


class EmbeddingLike(StaticPolicy):
    """Guesses at the first segment and keeps the guess."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._config = parsed(EmbeddingLikeConfig, "embedding_like", options)
        self._guesses: dict[str, float] = {}

    def final_context(self, request: PlacementRequest) -> float:
        if not request.history:
            self._guesses[request.trajectory] = self.guess(request.prompt, request.context)
        return self._guesses.get(request.trajectory, float(request.context))

    def guess(self, prompt: str, prompt_tokens: int) -> float:
        """The final context in tokens that the fit expects."""
        c = self._config
        indicator = c.weights[feature(prompt, len(c.weights))]
        return math.exp(c.intercept + c.slope * math.log(max(1, prompt_tokens)) + indicator)

    def observe(self, finished: FinishedTrajectory) -> None:
        self._guesses.pop(finished.trajectory, None)
