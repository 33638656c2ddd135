"""The engine that samples uniformly: load, lengths and randomness of a policy without a model.

Invariant: a token is uniform over ``options.vocab`` ids, drawn from the counter RNG as an engine with a model draws
(``uniforms(stream, position)``, inverted over ascending ids), and its logprob is −log(vocab). Temperature 0 takes the
first of equally likely ids, 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from libra.resources.rng import uniforms
from libra.resources.types import Tokens
from libra.tasks.engines.base import ALONE, EngineConfig, GenerateRequest, Place, parse_options
from libra.tasks.engines.scripted import PacedEngine, PaceOptions


class RandomOptions(PaceOptions):
    """Options of the kind ``random``."""

    vocab: int = Field(ge=1)
    """Number of token ids."""


class RandomEngine(PacedEngine):
    """Uniform over the vocabulary."""

    def __init__(
        self, config: EngineConfig, *, tokenizer_path: str | None, deterministic: bool, place: Place = ALONE
    ) -> None:
        options = parse_options(RandomOptions, config)
        super().__init__(config, options)
        self._vocab = options.vocab

    def plan(self, request: GenerateRequest) -> tuple[Tokens, NDArray[np.float32]]:
        positions = len(request.tokens) + np.arange(request.max_new)
        draws = uniforms(np.array([request.stream], np.uint64), positions) if request.temperature else positions * 0.0
        tokens = np.minimum((draws * self._vocab).astype(np.int32), self._vocab - 1)
        return tokens, np.full(len(tokens), -np.log(self._vocab), np.float32)
