"""The arena of staged KV that a Dask worker owns, whatever its role is at the moment.

An engine copies KV into the arena of its worker (`libra.resources.kv`), and other instances take it from there, maybe
when the engine has died or the worker has another role. Invariants: a worker has one arena at most, of one run; it
outlives the roles and engines of that run here, and ends with the run's claim, as a role of another run starts, or with
the worker; what an engine was writing as it died is freed, and what is whole stays; who is lent the arena finds in it
only KV of the weights that the engine has.

Made, asked and ended on the worker's event loop, which no method blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from libra.resources.kv.arena import Arena
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.ownership import OwnedArena, arena_name, reap_arenas

SETTLE_SECONDS = 15.0
"""How long the processes of an engine may take to die after their host."""
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _Held:
    run: str
    budget: int
    owned: OwnedArena

    @property
    def arena(self) -> Arena:
        assert self.owned.arena is not None
        return self.owned.arena


class WorkerArena:
    """The arena of the Dask worker ``worker``, while there is one."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._held: _Held | None = None
        self._changing = asyncio.Lock()
        self.refused: Counter[str] = Counter()
        """How often KV was not loaded or not staged by the run's engines here, by reason."""

    async def lend(self, run: str, layout: KVLayout, budget: int, version: int) -> None:
        """Have an arena for an engine of ``run`` with this layout, which has loaded weights of ``version``: the one
        that is there if it fits (KV of other versions is freed), else a new one of ``budget`` bytes, which takes
        seconds per 10 GB. `KVError` if it cannot be made."""
        async with self._changing:
            held = self._held
            fits = held is not None and (held.run, held.budget) == (run, budget)
            if held is not None and fits and held.arena.layout.differs(layout) is None:
                held.arena.reap()
                held.arena.set_weight_version(version)
                return
            await self._end()
            making = asyncio.create_task(asyncio.to_thread(_make, run, self._worker, layout, budget, version))
            try:
                await asyncio.shield(making)
            except asyncio.CancelledError:
                await asyncio.wait([making])  # a thread cannot be stopped, and what it has made must be kept in mind
                raise
            finally:
                if making.done() and not making.cancelled() and making.exception() is None:
                    self._held = _Held(run, budget, making.result())

    def of(self, run: str) -> Arena | None:
        """The arena if it is of that run."""
        held = self._held
        return held.arena if held is not None and held.run == run else None

    def forget(self, trajectories: Iterable[str]) -> None:
        """Free what is staged of these."""
        for trajectory in trajectories if self._held is not None else ():
            assert self._held is not None
            self._held.arena.release(trajectory)

    async def settle(self) -> None:
        """An engine has ended: free what it was writing, once its processes are dead."""
        until = time.monotonic() + SETTLE_SECONDS
        while (held := self._held) is not None:
            held.arena.reap()
            if not held.arena.stats().writing or time.monotonic() > until:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def end(self, but: str | None = None) -> None:
        """Free the arena, and count anew, unless it is of the run ``but``."""
        async with self._changing:
            if self._held is not None and self._held.run != but:
                self.refused.clear()
                await self._end()

    def stats(self) -> dict[str, Any]:
        """Plain values for the heartbeat."""
        told: dict[str, Any] = {"kv_refused": dict(self.refused)} if self.refused else {}
        if self._held is not None:
            stats = self._held.arena.stats()
            told |= {"kv_entries": stats.entries, "kv_used": stats.used_bytes, "kv_evicted": stats.evicted}
        return told

    async def _end(self) -> None:
        held, self._held = self._held, None  # from here on nobody finds it
        if held is not None:
            await asyncio.shield(asyncio.to_thread(held.owned.release))  # unmapping takes a while


def _make(run: str, worker: str, layout: KVLayout, budget: int, version: int) -> OwnedArena:
    reap_arenas()
    owned = OwnedArena(run, arena_name(worker), layout, budget)
    assert owned.arena is not None
    owned.arena.set_weight_version(version)
    return owned
