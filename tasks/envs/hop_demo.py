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
_BREAKS_JSON, _WRONG_KEY = 0.04, 0.05


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
        self.copy_after = int(environment.encode(CALL_OPEN)[-1])

    def trace(self, source: random.Random) -> Demonstration:
        env = self._environment
        slop = source.choice((0.8, 1.0, 1.2))
        task = env.task("train", source.getrandbits(40))
        session = env.open(task, f"demo{source.getrandbits(40)}", env.seed)
        parts = [(env.reset(task), 0)]
        seen = _Seen(key=task["start"])
        for turn in range(_MAX_TURNS):
            text = _play(seen, source, slop)
            parts.append((env.encode(text + END), 1))
            call = understand(text).call
            if call is None:
                break
            reply = session.reply(turn, call).text
            parts.append((env.encode(return_text(reply)), 0))
            seen = seen.after(reply)
        return _join(parts)

    def drill(self, source: random.Random, copies: int) -> Demonstration:
        """The protocol without its framing: two copied tokens in about eight, which forms the copying circuit fast."""
        key, parts = "", []
        for _ in range(copies):
            if key and source.random() < 0.25:
                reply = BUSY
            else:
                key = random_key(source)
                words = source.randint(1, 3) if source.random() < 0.3 else 0
                reply = found_text(source.choice(("next", "value")), key, " ".join(source.choices(WORDS, k=words)))
            parts.append((self._environment.encode(f"{reply}\n</tool_response>"), 0))
            turn = call_text(key) if source.random() < 0.8 else answer_text(key)
            parts.append((self._environment.encode(turn), 1))
        return _join(parts)


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


def _join(parts: list[tuple[Tokens, int]]) -> Demonstration:
    tokens = np.concatenate([ids for ids, _ in parts])
    mask = np.concatenate([np.full(len(ids), sampled, np.int8) for ids, sampled in parts])
    return Demonstration(tokens, mask)
