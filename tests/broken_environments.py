"""Environments that are wrong in one way each, by import path (``broken_environments:Task``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from libra.resources.types import Stream, Tokens
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.envs.hop import HopEnvironment


class Boom(Exception):
    """What they raise: of two lines, with a terminal's control characters."""

    def __init__(self) -> None:
        super().__init__("boom \x1b[31mred\nsecond line")


class Init(HopEnvironment):
    """Cannot be made."""

    def __init__(self, config: EnvironmentConfig, tokenizer_path: str, seed: int) -> None:
        raise Boom


class Tokenizer(HopEnvironment):
    """Has no tokenizer."""

    @classmethod
    def make_tokenizer(cls) -> str:
        raise Boom


class NoText(HopEnvironment):
    """Its tokenizer is no text."""

    @classmethod
    def make_tokenizer(cls) -> str:
        return None  # type: ignore[return-value]


class Garbled(HopEnvironment):
    """Its tokenizer is no tokenizer."""

    @classmethod
    def make_tokenizer(cls) -> str:
        return "name: guess"


class Prompts(HopEnvironment):
    """Does not know how many prompts it has."""

    def prompts(self, stream: Stream) -> int | None:
        raise Boom


class Many(HopEnvironment):
    """Has a word for how many prompts it has."""

    def prompts(self, stream: Stream) -> int | None:
        return "many"  # type: ignore[return-value]


class Task(HopEnvironment):
    """Has no tasks."""

    def task(self, stream: Stream, prompt: int) -> dict[str, Any]:
        raise Boom


class Opaque(HopEnvironment):
    """Its tasks hold an object."""

    def task(self, stream: Stream, prompt: int) -> dict[str, Any]:
        return {"x": Boom}


class Reset(HopEnvironment):
    """Has no prompt."""

    def reset(self, task: dict[str, Any]) -> Tokens:
        raise Boom


class Nothing(HopEnvironment):
    """Its prompt is nothing."""

    def reset(self, task: dict[str, Any]) -> Tokens:
        return None  # type: ignore[return-value]


class Fractions(HopEnvironment):
    """Its prompt is no row of token ids."""

    def reset(self, task: dict[str, Any]) -> Tokens:
        return np.array([0.5])  # type: ignore[return-value]
