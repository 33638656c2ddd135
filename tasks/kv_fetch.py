"""Staged KV over the network: from the arena of one worker into that of another, by the workers' own RPC.

Invariants: what is published here was computed under this arena's version, for the tokens that were asked for, and each
chunk passed its checksum; an entry that was lost or changed at its source meanwhile is given up, and nothing of it
stays. A fetch that fails costs a prefill, never a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.native.checksum import crc32c
from libra.resources import wire
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Refused, Writing
from libra.resources.kv.layout import KVLayout
from libra.resources.types import Tokens

CHUNK_BYTES = 16 * 2**20
PATIENCE = 2.0
"""Seconds that a move waits for KV that is just being staged."""
_LOOK_SECONDS = 0.02
_MEMORY = 0.3
"""Weight of one measurement in the rate that follows it."""
PROBING = 0.05
"""Share of the time spent on computing, where that looked cheaper, which trying the link anew may cost."""

Reply = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fetched:
    """``tokens`` of KV, ``bytes`` bytes, came in ``seconds``."""

    tokens: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether to fetch, and what fetching and computing would take in seconds (None: never measured here); ``probe``:
    it looks dearer and is tried to see whether it still is."""

    fetch: bool
    fetching: float | None
    prefilling: float | None
    probe: bool = False


class Rates:
    """What fetching and prefilling take at one instance: means of what they took, the recent weighing more.

    Where fetching looks dearer it would never be measured again, and a link that has recovered would stay unused. So
    it is tried anew, by a rule without clock or chance: every choice to compute saves `PROBING` of its time up, and
    once what is saved covers what a fetch is expected to cost beyond computing, that fetch is a probe. By the
    estimates, then, probes cost at most that share of the time spent on computing; the dearer the link looked, the
    rarer they are. What a probe measures replaces the mean, which is too old to count.
    """

    def __init__(self) -> None:
        self._byte_seconds: float | None = None
        self._token_seconds: float | None = None
        self._saved = 0.0
        self._probing = False

    def choose(self, nbytes: int, tokens: int) -> Choice:
        """The cheaper of fetching ``nbytes`` and computing ``tokens``, or a probe. What was never measured is tried:
        fetching first."""
        fetching = None if self._byte_seconds is None else nbytes * self._byte_seconds
        prefilling = None if self._token_seconds is None else tokens * self._token_seconds
        if fetching is None or prefilling is None or fetching <= prefilling:
            self._saved = 0.0
            return Choice(True, fetching, prefilling)
        self._saved += PROBING * prefilling
        if self._saved < fetching - prefilling:
            return Choice(False, fetching, prefilling)
        self._saved, self._probing = 0.0, True
        return Choice(True, fetching, prefilling, probe=True)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """A fetch of ``nbytes`` took ``seconds``."""
        if nbytes > 0:
            before = None if self._probing else self._byte_seconds
            self._byte_seconds, self._probing = _follow(before, seconds / nbytes), False

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Computing ``tokens`` took ``seconds`` (0: not measured)."""
        if tokens > 0 and seconds > 0:
            self._token_seconds = _follow(self._token_seconds, seconds / tokens)


class KVServer:
    """Answers other workers from the arena that ``arena_of(run)`` gives (None: there is none)."""

    def __init__(self, arena_of: Callable[[str], Arena | None]) -> None:
        self._arena_of = arena_of

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """By name."""
        return {wire.KV_ENTRY: self.entry, wire.KV_CHUNK: self.chunk}

    async def entry(self, run: str, trajectory: str, version: int, context: bytes) -> Reply:
        """`wire.KV_ENTRY`. What is just being staged is waited for, up to `PATIENCE`."""
        until = time.monotonic() + PATIENCE
        while (arena := self._arena_of(run)) is not None and arena.being_written(trajectory, version):
            if time.monotonic() > until:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if arena is None:
            return {"refused": "there is no arena"}
        found = arena.find(trajectory, version, np.frombuffer(context, np.int32), arena.layout)
        if isinstance(found, Refused):
            return {"refused": str(found.detail)}
        return {"seq": found.seq, "matched": found.matched, "layout": arena.layout.to_json()}

    def chunk(self, run: str, trajectory: str, version: int, context: bytes, seq: int, first: int, last: int) -> Reply:
        """`wire.KV_CHUNK`."""
        arena = self._arena_of(run)
        if arena is None:
            return {"refused": "the arena has ended"}
        found = arena.find(trajectory, version, np.frombuffer(context, np.int32), arena.layout)
        if isinstance(found, Refused) or found.seq != seq:
            return {"refused": "the entry has changed"}
        data = arena.extents[found.table[first:last].ravel()]
        if not arena.valid(found):
            return {"refused": "the entry was lost during the copy"}
        return {"data": data.tobytes(), "checksum": crc32c(data)}


class Fetch:
    """One trajectory's KV for ``context``, from the worker behind ``peer`` (Dask's RPC to it) into ``arena``."""

    def __init__(self, arena: Arena, peer: Any, run: str, trajectory: str, context: Tokens) -> None:
        self._arena, self._peer, self._context = arena, peer, np.ascontiguousarray(context, np.int32)
        self._version = arena.weight_version
        self._named = {
            "run": run,
            "trajectory": trajectory,
            "version": self._version,
            "context": self._context.tobytes(),
        }
        self._found: Reply = {}

    async def look(self) -> int | str:
        """How many tokens of KV there are to fetch; or why none."""
        found: Reply = await self._peer.libra_kv_entry(**self._named)
        if "refused" in found:
            return str(found["refused"])
        difference = KVLayout(**found["layout"]).differs(self._arena.layout)
        if difference is not None:
            return f"layout: {difference}"
        self._found = found
        return int(found["matched"])

    @property
    def bytes(self) -> int:
        """Bytes of what `look` has found."""
        layout = self._arena.layout
        return layout.blocks(int(self._found["matched"])) * layout.kv_heads * layout.extent_bytes

    async def run(self) -> Fetched | str:
        """Fetch it; or why that failed."""
        began, matched = time.monotonic(), int(self._found["matched"])
        writing = self._arena.begin(str(self._named["trajectory"]), self._version, self._context[:matched])
        if isinstance(writing, Refused):
            return writing.detail
        with writing:
            problem = await self._copy(writing)
            if problem is None and not writing.publish():
                problem = "the trajectory ended or the weights changed meanwhile"
        if problem is not None:
            return problem
        return Fetched(matched, self.bytes, time.monotonic() - began)

    async def _copy(self, writing: Writing) -> str | None:
        """Every block that is not here yet; what is wrong with one, if anything."""
        layout, table = self._arena.layout, writing.entry.table
        step = max(1, CHUNK_BYTES // (layout.kv_heads * layout.extent_bytes))
        for first in range(writing.first_block, len(table), step):
            last = min(first + step, len(table))
            chunk = await self._peer.libra_kv_chunk(**self._named, seq=self._found["seq"], first=first, last=last)
            if "refused" in chunk:
                return str(chunk["refused"])
            problem = _put(self._arena, table[first:last], chunk)
            if problem is not None:
                return problem
        return None


def _put(arena: Arena, table: NDArray[np.uint32], chunk: Reply) -> str | None:
    data = np.frombuffer(chunk["data"], np.uint8)
    if data.size != table.size * arena.layout.extent_bytes:
        return f"a chunk of {data.size} bytes came for {table.size} extents of {arena.layout.extent_bytes}"
    if crc32c(data) != chunk["checksum"]:
        return f"a chunk of {data.size} bytes came damaged: CRC-32C {crc32c(data):08x}, not {chunk['checksum']:08x}"
    arena.extents[table.ravel()] = data.reshape(table.size, -1)
    return None


def _follow(mean: float | None, measured: float) -> float:
    return measured if mean is None else (1.0 - _MEMORY) * mean + _MEMORY * measured
