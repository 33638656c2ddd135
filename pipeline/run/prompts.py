"""Which prompt a group gets.

Invariant: a function of the seed and the group's ordinal alone, so a resumed run asks for the same prompts; within an
epoch every prompt of a finite data set comes once.
"""

from __future__ import annotations

from functools import lru_cache

from libra.resources.errors import ConfigError
from libra.resources.rng import generator
from libra.tasks.envs import calls
from libra.tasks.envs.base import Environment


class PromptOrder:
    """Endless prompts for groups 0, 1, …: epochs over a finite set, each in its own order, or an endless stream."""

    def __init__(self, environment: Environment, seed: int) -> None:
        self._size, self._seed = calls.prompts(environment, "train"), seed
        if self._size is not None and self._size < 1:
            raise ConfigError(f"the environment has {self._size} training prompts; it needs at least 1")
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def place(self, ordinal: int) -> tuple[int, int]:
        """(epoch, prompt number) of a group."""
        if self._size is None:
            return 0, ordinal
        epoch, position = divmod(ordinal, self._size)
        return epoch, self._order(epoch)[position]

    def _shuffled(self, epoch: int) -> list[int]:
        assert self._size is not None
        order = list(range(self._size))
        generator(self._seed, "prompt order", epoch).shuffle(order)
        return order
