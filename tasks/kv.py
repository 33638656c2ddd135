"""The worker's side of staged KV: the arena that a rollout role owns, and what a segment has to do with it.

A role whose engine can stage KV (`libra.tasks.engines.base.Engine.kv_layout`) owns one arena in shared memory, named by
run and worker, so that whoever knows both finds it. Invariants: the arena is there before the role is ready and gone
when the role has ended or its engine has died; what it holds is of the weights that its engine has (the engine changes
the version while it is paused); nothing of a trajectory stays after `Staging.forget`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from libra.resources.errors import ConfigError
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.ownership import OwnedArena, arena_name, arena_path, reap_arenas
from libra.resources.types import Migration, Tokens
from libra.tasks.kv_fetch import Choice, Fetch, Fetched, Rates

logger = logging.getLogger("distributed.libra.kv")


@dataclass(frozen=True, slots=True)
class Source:
    """A rollout worker in whose arena KV of a trajectory may lie: its name, the node it is on, its Dask address."""

    worker: str
    node: str
    address: str


@dataclass(frozen=True, slots=True)
class Hint:
    """What is known of a segment's KV before it runs. ``stage``: the trajectory may go on elsewhere; ``sources``: where
    KV of it lies if it has moved, the likeliest first; ``fetching`` and ``prefilling``: seconds that bringing it and
    computing it should take, as the policy reckoned and as who chose between them did later (None: nobody could say);
    ``fetched``: seconds that it took from another node, if it came."""

    stage: bool = False
    sources: tuple[Source, ...] = ()
    fetching: float | None = None
    prefilling: float | None = None
    fetched: float | None = None


NO_HINT = Hint()
"""Nothing is known, and nothing shall be staged."""


def hint_of(annotation: Mapping[str, Any], stage: bool) -> Hint:
    """The hint in what the plugin wrote on the task (`libra.scheduler_plugin.binding.Binder`)."""
    kv = annotation.get("kv")
    if kv is None:
        return Hint(stage)
    return Hint(stage, tuple(Source(*source) for source in kv["sources"]), kv["fetching"], kv["prefilling"])


def informed(hint: Hint, choice: Choice) -> Hint:
    """``hint`` with the estimates that decided where they were measured, the policy's where they were not."""
    return replace(
        hint,
        fetching=hint.fetching if choice.fetching is None else choice.fetching,
        prefilling=hint.prefilling if choice.prefilling is None else choice.prefilling,
    )


class Staging:
    """The arena of one role: ``budget`` bytes, for the worker ``worker`` of ``run`` on ``node``. ``peer`` gives Dask's
    RPC to a worker's address."""

    def __init__(self, run: str, worker: str, node: str, budget: int, peer: Callable[[str], Any]) -> None:
        self._run, self._worker, self._node, self._budget = run, worker, node, budget
        self._peer, self.rates = peer, Rates()
        self.path = arena_path(run, worker)
        self._owned: OwnedArena | None = None

    def open(self, layout: Mapping[str, Any] | None, kind: str, version: int) -> None:
        """Make the arena, for an engine of that ``kind`` which has loaded its first weights, of ``version``. Takes
        seconds per 10 GB. `ConfigError` if the engine stages no KV (``layout`` is None), `KVError` if it cannot be."""
        if layout is None:
            raise ConfigError(
                f"engine.kv_arena = {self._budget} but engine.kind = {kind!r} stages no KV: use engine.kind = 'vllm', "
                "or engine.kv_arena = 0"
            )
        reap_arenas()
        owned = OwnedArena(self._run, arena_name(self._worker), KVLayout(**layout), self._budget)
        assert owned.arena is not None
        owned.arena.set_weight_version(version)
        self._owned = owned

    @property
    def arena(self) -> Arena | None:
        """The arena while it is there."""
        return None if self._owned is None else self._owned.arena

    async def bring(self, trajectory: str, context: Tokens, hint: Hint, seconds: float) -> Hint:
        """Fetch KV of a trajectory that comes from another node, if that is cheaper than computing it; no longer than
        ``seconds``. The hint with what came of it."""
        arena = self.arena
        if arena is None or not hint.sources or any(each.node == self._node for each in hint.sources):
            return hint
        source = hint.sources[0]
        try:
            async with asyncio.timeout(seconds):
                fetch = Fetch(arena, self._peer(source.address), self._run, trajectory, context)
                tokens = await fetch.look()
                if isinstance(tokens, int):
                    choice = self.rates.choose(fetch.bytes, tokens)
                    hint = informed(hint, choice)
                    came = await self._fetch(fetch, choice)
                else:
                    came = tokens
        except (TimeoutError, OSError) as error:
            came = f"{type(error).__name__}: {error} (within load_seconds = {seconds:g})"
        if isinstance(came, str):
            logger.info("KV of %s is computed, not fetched from %s: %s", trajectory, source.worker, came)
            return hint
        return replace(hint, fetched=came.seconds)

    async def _fetch(self, fetch: Fetch, choice: Choice) -> Fetched | str:
        if not choice.fetch:
            return f"that is cheaper ({choice})"
        came = await fetch.run()
        if isinstance(came, Fetched):
            self.rates.fetched(came.bytes, came.seconds)
        return came

    def wish(self, trajectory: str, context: Tokens, hint: Hint) -> dict[str, Any]:
        """The fields of a `GenerateRequest` about KV; what is here of it counts as used."""
        arena = self.arena
        if arena is None:
            return {}
        here = arena.find(trajectory, arena.weight_version, np.asarray(context, np.int32), arena.layout)
        if isinstance(here, Entry):
            arena.touch(here)
        near = [str(arena_path(self._run, each.worker)) for each in hint.sources if each.node == self._node]
        return {"stage": hint.stage, "arenas": near}

    def migration(self, hint: Hint, ended: Mapping[str, Any], context: int) -> Migration | None:
        """What became of the KV of a trajectory that had moved here, from the fields of its `Generated`; None of one
        that had not."""
        arena = self.arena
        loaded, computed = int(ended["loaded"]), context - int(ended["cached"])
        if not loaded:
            self.rates.prefilled(computed, float(ended["kv_seconds"]))
        if arena is None or not hint.sources:
            return None
        way = "prefill" if not loaded else "load" if hint.fetched is None else "fetch"
        return Migration(
            way=way,
            source=hint.sources[0].worker,
            target=self._worker,
            tokens=loaded or computed,
            bytes=loaded * arena.layout.bytes_per_token,
            seconds=float(ended["kv_seconds"]) + (hint.fetched or 0.0),
            fetching=hint.fetching,
            prefilling=hint.prefilling,
        )

    def forget(self, trajectories: Iterable[str]) -> None:
        """Free what is staged of these."""
        arena = self.arena
        for trajectory in trajectories if arena is not None else ():
            assert arena is not None
            arena.release(trajectory)

    def stats(self) -> dict[str, int]:
        """Plain numbers for the heartbeat."""
        arena = self.arena
        if arena is None:
            return {}
        stats = arena.stats()
        return {"kv_entries": stats.entries, "kv_used": stats.used_bytes, "kv_evicted": stats.evicted}

    def take(self) -> OwnedArena | None:
        """Give the arena up: nothing is staged or found here any more. The caller releases it (not on an event loop:
        unmapping takes a while)."""
        owned, self._owned = self._owned, None
        return owned
