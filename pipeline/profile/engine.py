"""One engine in its own process, asked and timed.

Invariant: everything goes through the seam's messages (`libra.tasks.child.engine_host`), so an engine of any kind can
be measured; a request that fails, and an engine that dies, end the measurement with the engine's own words.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from libra.pipeline.profile.child import MeasuredChild
from libra.pipeline.profile.meter import Clock
from libra.resources.errors import InfraError
from libra.resources.types import Tokens, WeightVersion
from libra.tasks.child.parent import ChildProcess
from libra.tasks.engines.base import EngineConfig

_HOST = "libra.tasks.child.engine_host"
_SECONDS = 300.0
"""No single measurement takes as long."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Continue ``tokens`` of a sequence by ``new`` tokens, none of which ends it."""

    sequence: str
    tokens: Tokens
    new: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """``requests`` that arrived together and each computed ``tokens`` after ``context`` reused ones took ``seconds`` in
    all, in ``steps`` steps of the engine."""

    tokens: int
    context: int
    requests: int
    steps: int
    seconds: float


class MeasuredEngine(MeasuredChild):
    """Make it with `start`."""

    def __init__(self, config: EngineConfig, vocabulary: int, seed: int) -> None:
        self.config, self._vocabulary = config, vocabulary
        self._random = np.random.default_rng(seed)
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        tokenizer: str | None,
        weights: WeightVersion,
        vocabulary: int,
        log: Path,
        *,
        tp: int = 1,
        core: int | None = None,
        clock: Clock = "cpu",
        seed: int = 0,
    ) -> Self:
        """Start the process (pinned to ``core``) for an instance of TP ``tp`` and load ``weights`` of a model with
        ``vocabulary`` tokens. Raises what the engine raises."""
        self = cls(config, vocabulary, seed)
        child = await ChildProcess.start(
            _HOST,
            {
                "engine": config.model_dump(mode="json"),
                "tokenizer": tokenizer,
                "deterministic": False,
                "place": {"tp": tp, "arena": None},
            },
            name=f"measured {config.kind} engine",
            log=log,
            seconds=_SECONDS,
            threads=config.threads,
            on_event=self._on_event,
            on_exit=self._on_exit,
        )
        async with self._own(child, core, clock):
            fields = {"version": weights.version, "path": weights.path, "digest": weights.digest}
            await child.call("load", seconds=_SECONDS, **fields)
        return self

    def tokens(self, count: int) -> Tokens:
        """``count`` random ids."""
        return self._random.integers(0, self._vocabulary, count).astype(np.int32)

    async def generate(self, ask: Ask) -> Tokens:
        """The tokens of one request. `InfraError` with the engine's words if it failed."""
        name = f"m{next(self._numbers)}"
        end = self._waiting[name] = asyncio.get_running_loop().create_future()
        self.child.send(
            "submit", id=name, sequence=ask.sequence, tokens=ask.tokens, max_new=ask.new, stop=[], temperature=1.0,
            stream=int(self._random.integers(2**63)),
        )  # fmt: skip
        try:
            fields = await asyncio.wait_for(end, _SECONDS)
        finally:
            self._waiting.pop(name, None)
        if fields["error"] or len(fields["tokens"]) != ask.new:
            what = fields["error"] or f"ended by {fields['finish']} after {len(fields['tokens'])} of {ask.new} tokens"
            raise InfraError(f"a measured request of {len(ask.tokens)} tokens: {what}")
        return np.asarray(fields["tokens"], np.int32)

    async def burst(self, asks: Iterable[Ask]) -> float:
        """Seconds that the engine takes for requests that arrive together."""
        began = self.read()
        await asyncio.gather(*(self.generate(ask) for ask in asks))
        return self.read() - began

    async def stats(self) -> dict[str, Any]:
        """The engine's `EngineStats`."""
        found: dict[str, Any] = await self.child.call("stats", seconds=_SECONDS)
        return found

    def release(self, sequences: Sequence[str]) -> None:
        """Drop what the engine keeps of these."""
        self.child.send("release", sequences=list(sequences))

    async def decode_step(self, contexts: Sequence[int], new: int) -> float:
        """Seconds of one decode step of sequences with these ``contexts``, over ``new`` steps.

        The same sequences are continued by 1 and by 1 + ``new`` tokens; what both cost (arrival, admission, the first
        token) falls out of the difference.
        """
        asks = [Ask(f"d{i}", self.tokens(context), 1) for i, context in enumerate(contexts)]
        await self.burst(asks)
        once = await self.burst(asks)
        many = await self.burst([Ask(ask.sequence, ask.tokens, 1 + new) for ask in asks])
        self.release([ask.sequence for ask in asks])
        return (many - once) / new

    async def prefill(self, tokens: int, context: int) -> Prefilled:
        """As many requests as one step takes at once, each of ``tokens`` after ``context`` kept ones."""
        count = max(1, min(self.config.slots, self.config.max_prefill_tokens // tokens, 16))
        kept = [(f"p{i}", self.tokens(context)) for i in range(count)]
        if context:
            await self.burst([Ask(name, first, 1) for name, first in kept])
        earlier = (await self.stats())["steps"]
        seconds = await self.burst(
            [Ask(name, np.concatenate([first, self.tokens(tokens)]), 1) for name, first in kept]
        )  # fmt: skip
        steps = (await self.stats())["steps"] - earlier
        self.release([name for name, _ in kept])
        return Prefilled(tokens, context, count, int(steps), seconds)

    def _on_event(self, name: str, fields: dict[str, Any]) -> None:
        for end in fields["ended"] if name == "generated" else ():
            waiting = self._waiting.get(end["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(end)

    def _on_exit(self, reason: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(InfraError(reason))
