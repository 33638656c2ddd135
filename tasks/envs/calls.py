"""The calls of an environment outside its trajectories: making it, its tokenizer, its prompts.

Invariants: whatever an environment raises here becomes a `BrokenEnvironmentError` that names it, the method and its own
words (a `LibraError` of it passes unchanged); what comes back is what the seam promises: plain tasks, token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from libra.resources.codec import pack
from libra.resources.errors import BrokenEnvironmentError, LibraError
from libra.resources.types import Stream, Tokens
from libra.tasks.envs.base import Environment, EnvironmentConfig
from libra.tasks.registry import environment_class


def make_environment(config: EnvironmentConfig, tokenizer_path: str, seed: int) -> Environment:
    """The environment that ``config`` names. `ConfigError` if there is no such kind or its options are wrong."""
    kind = environment_class(config.kind)
    with _calling(config.kind, "__init__()"):
        return kind(config, tokenizer_path, seed)


def own_tokenizer(config: EnvironmentConfig) -> str:
    """The text of the environment's own ``tokenizer.json``. `ConfigError` when it has none."""
    kind = environment_class(config.kind)
    with _calling(config.kind, "make_tokenizer()"):
        text = kind.make_tokenizer()
    if not isinstance(text, str):
        raise _wrong(config.kind, "make_tokenizer()", repr(text), "the text of a tokenizer.json")
    return text


def prompts(environment: Environment, stream: Stream) -> int | None:
    """How many prompts the data set has; None: endless."""
    name = name_of(environment)
    with _calling(name, "prompts()"):
        size = environment.prompts(stream)
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer))):
        raise _wrong(name, "prompts()", repr(size), "a whole number, or None for an endless data set")
    return None if size is None else int(size)


def opening(environment: Environment, stream: Stream, prompt: int) -> tuple[dict[str, Any], Tokens]:
    """A task and the token ids of its prompt."""
    name = name_of(environment)
    with _calling(name, f"task({stream!r}, {prompt})"):
        task = environment.task(stream, prompt)
    if not isinstance(task, dict):
        raise _wrong(name, f"task({stream!r}, {prompt})", repr(task), "a dict of plain values")
    try:
        pack(task)
    except (TypeError, ValueError, OverflowError) as error:
        raise _wrong(name, f"task({stream!r}, {prompt})", repr(task), f"plain values ({_one_line(error)})") from error
    with _calling(name, "reset()"):
        tokens = np.asarray(environment.reset(task))
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        found = f"an array of shape {tokens.shape} and dtype {tokens.dtype}" if tokens.ndim else repr(tokens.item())
        raise _wrong(name, "reset()", found, "the prompt's token ids, a row of whole numbers")
    return task, tokens.astype(np.int32)


def name_of(environment: Environment) -> str:
    """What errors call an environment: its ``kind``, else its class."""
    config = getattr(environment, "config", None)
    return config.kind if isinstance(config, EnvironmentConfig) else type(environment).__qualname__


@contextmanager
def _calling(name: str, method: str) -> Iterator[None]:
    try:
        yield
    except LibraError:
        raise
    except Exception as error:
        raise BrokenEnvironmentError(
            f"environment {name}: {method} raised {type(error).__name__}: {_one_line(error)}; "
            "mend it (--debug shows where)"
        ) from error


def _wrong(name: str, method: str, found: str, wanted: str) -> BrokenEnvironmentError:
    shown = _one_line(found)
    shown = shown if len(shown) <= 100 else f"{shown[:99]}…"
    return BrokenEnvironmentError(f"environment {name}: {method} returned {shown}; it must return {wanted}")


def _one_line(said: object) -> str:
    return " ".join(str(said).split())
