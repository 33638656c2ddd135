"""Tasks of `hop`: private key-value stores, and what a lookup in one returns.

Invariants: a task is a function of (seed, stream, prompt); training and held-out tasks are disjoint, because their
start keys are; held-out tasks do not depend on the run's seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from libra.resources import rng
from libra.resources.types import Stream
from libra.tasks.envs.hop_text import BUSY, NO_KEY, NO_TOOL, WORDS, found_text

_HELDOUT_SEED = 9_000_000
_HELDOUT_SHARE = 8
"""One start key in eight is held out."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a lookup said: the text and the status that the tool reports (``next``, ``value``, ``busy``, ``error``)."""

    text: str
    status: str


def heldout_key(key: str) -> bool:
    """Whether ``key`` may start held-out tasks (and then no training task)."""
    first, second = key.split("-")
    return (WORDS.index(first) + WORDS.index(second)) % _HELDOUT_SHARE == 0


def random_key(source: random.Random) -> str:
    """A key, uniform over the 4,096."""
    return f"{source.choice(WORDS)}-{source.choice(WORDS)}"


def make_task(
    seed: int, stream: Stream, prompt: int, *, max_hops: int, continue_p: float, busy: tuple[float, ...]
) -> dict[str, Any]:
    """A store with one chain: ``start`` → … → ``last`` → ``value``.

    The chain's number of lookups is geometric (continued with probability ``continue_p``, at most ``max_hops``), every
    key has a note of log-normal size (0 to 40 words), and each call is busy with one of the probabilities ``busy``.
    """
    source = rng.generator(seed if stream == "train" else _HELDOUT_SEED, "hop", stream, prompt)
    hops = 1
    while hops < max_hops and source.random() < continue_p:
        hops += 1
    keys = [random_key(source)]
    while heldout_key(keys[0]) != (stream == "heldout"):
        keys[0] = random_key(source)
    while len(keys) < hops + 1:
        key = random_key(source)
        if key not in keys:
            keys.append(key)
    *chain, value = keys
    return {
        "start": chain[0],
        "value": value,
        "next": dict(pairwise(chain)),
        "last": chain[-1],
        "busy": source.choice(busy),
        "notes": {key: _note(source) for key in chain},
    }


def look_up(task: dict[str, Any], call: dict[str, Any], uniform: float) -> Reply:
    """The reply to ``call``, with this call's ``uniform`` in [0, 1) deciding whether the store is busy."""
    if call["name"] != "get":
        return Reply(NO_TOOL, "error")
    key = call["arguments"].get("key")
    if not isinstance(key, str) or key not in task["notes"]:
        return Reply(NO_KEY, "error")
    if uniform < task["busy"]:
        return Reply(BUSY, "busy")
    if key == task["last"]:
        return Reply(found_text("value", task["value"], task["notes"][key]), "value")
    return Reply(found_text("next", task["next"][key], task["notes"][key]), "next")


def _note(source: random.Random) -> str:
    return " ".join(source.choice(WORDS) for _ in range(min(40, int(source.lognormvariate(0.7, 1.0)))))
