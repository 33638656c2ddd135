"""Players of `hop` that need no model: a competent one, a sloppy one, and the demonstrator of the cold start.

`script` and `sloppy` are pure functions from a trajectory's context to the ids of its next turn; the scripted engine
takes their import path. The demonstrator plays the sloppy one on purpose: it answers too early, gives up when busy,
tries wrong keys and breaks its JSON, so that the policy that imitates it can be improved on.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

import numpy as np
from tokenizers import Tokenizer

from libra.resources import rng
from libra.resources.types import Tokens
from libra.tasks.envs.base import Demonstration, Demonstrator
from libra.tasks.envs.hop import HopEnvironment
from libra.tasks.envs.hop_task import random_key
from libra.tasks.envs.hop_text import (
    BROKEN_CLOSE,
    BUSY,
    CALL_OPEN,
    END,
    WORDS,
    answer_text,
    call_text,
    found_text,
    make_tokenizer,
    return_text,
    understand,
)

_STARTED = re.compile(r"find ([a-z]+-[a-z]+)")
_FOUND = re.compile(r'\{"(next|value)": "([a-z]+-[a-z]+)"')
_MAX_TURNS = 12

_GIVES_UP = 0.65
"""Probability of a guessed answer after a failed call."""
_ANSWERS_EARLY = 0.42
"""Probability of answering with a key that only leads on."""
_BREAKS_JSON, _WRONG_KEY = 0.04, 0.02
_SLOPS = (0.8, 1.0, 1.2)
"""A trace multiplies these probabilities by one of them."""
_DRILL_BUSY = 0.45
"""Share of busy replies in a drill: repeating a key across one is what a model learns last."""


def script(sequence: str, context: Tokens, stream: int) -> Tokens:
    """A competent next turn: follow the last key, retry when busy, answer the value."""
    return _encode(_play(_read(context), random.Random(stream), slop=0.0))


def sloppy(sequence: str, context: Tokens, stream: int) -> Tokens:
    """A next turn of the demonstrator; its mistakes depend on ``stream`` and the context's length alone."""
    return _encode(_play(_read(context), rng.generator(stream, len(context)), slop=1.0))


class HopDemonstrator(Demonstrator):
    """Episodes of the sloppy player on training tasks, and drills of *repeat the last key*."""

    def __init__(self, environment: HopEnvironment) -> None:
        self._environment = environment

    def trace(self, source: random.Random) -> Demonstration:
        env = self._environment
        slop = source.choice(_SLOPS)
        task = env.task("train", source.getrandbits(40))
        session = env.open(task, f"demo{source.getrandbits(40)}", env.seed)
        parts = [_given(env.reset(task))]
        seen = _Seen(key=task["start"])
        for turn in range(_MAX_TURNS):
            text = _play(seen, source, slop)
            parts.append(self._said(text, seen.key, END))
            call = understand(text).call
            if call is None:
                break
            reply = session.reply(turn, call).text
            parts.append(_given(env.encode(return_text(reply))))
            seen = seen.after(reply)
        return _join(parts)

    def drill(self, source: random.Random, copies: int) -> Demonstration:
        """The protocol without its framing: two copied tokens in about eight, which forms the copying circuit fast."""
        key, parts = "", []
        for _ in range(copies):
            if key and source.random() < _DRILL_BUSY:
                reply = BUSY
            else:
                key = random_key(source)
                words = source.randint(1, 3) if source.random() < 0.3 else 0
                reply = found_text(source.choice(("next", "value")), key, " ".join(source.choices(WORDS, k=words)))
            parts.append(_given(self._environment.encode(f"{reply}\n</tool_response>")))
            parts.append(self._said(call_text(key) if source.random() < 0.8 else answer_text(key), key))
        return _join(parts)

    def _said(self, text: str, key: str, end: str = "") -> Demonstration:
        """A turn; where it names ``key``, that is a copy."""
        before, found, after = text.partition(key)
        ids = [self._environment.encode(part) for part in (before, found, after + end)]
        tokens = np.concatenate(ids)
        copies = np.repeat(np.array([0, 1, 0], np.int8), [len(part) for part in ids])
        return Demonstration(tokens, np.ones(len(tokens), np.int8), copies)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a player knows: the last key or value it saw, and whether that was the value or the last reply an error."""

    key: str
    value: bool = False
    failed: bool = False
    began: bool = True

    def after(self, reply: str) -> _Seen:
        if match := _FOUND.match(reply):
            return _Seen(match[2], value=match[1] == "value", began=False)
        return _Seen(self.key, failed=True, began=False)


def _play(seen: _Seen, source: random.Random, slop: float) -> str:
    """The next turn's text, without its stop token. ``slop`` scales the probability of every mistake."""
    if seen.value:
        return answer_text(seen.key)
    if seen.failed and source.random() < _GIVES_UP * slop:
        return answer_text(random_key(source))
    if not (seen.began or seen.failed) and source.random() < _ANSWERS_EARLY * slop:
        return answer_text(seen.key)
    if source.random() < _BREAKS_JSON * slop:
        return f"{CALL_OPEN}{seen.key}{BROKEN_CLOSE}"
    return call_text(random_key(source) if source.random() < _WRONG_KEY * slop else seen.key)


@cache
def _tokenizer() -> Tokenizer:
    return make_tokenizer()


def _encode(text: str) -> Tokens:
    return np.asarray(_tokenizer().encode(text + END, add_special_tokens=False).ids, np.int32)


def _read(context: Tokens) -> _Seen:
    text = _tokenizer().decode(context.tolist(), skip_special_tokens=False)
    started = _STARTED.search(text)
    seen = _Seen(key=started[1] if started else "-".join(WORDS[:2]))
    for part in text.split("<tool_response>\n")[1:]:
        seen = seen.after(part)
    return seen


def _given(tokens: Tokens) -> Demonstration:
    nothing = np.zeros(len(tokens), np.int8)
    return Demonstration(tokens, nothing, nothing)


def _join(parts: list[Demonstration]) -> Demonstration:
    return Demonstration(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.mask for part in parts]),
        np.concatenate([part.copies for part in parts]),
    )
