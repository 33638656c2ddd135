"""Entries of an arena as its callers hold them: copies, never views of shared metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from libra.resources.kv.arena import Arena

Reason = Literal["absent", "version", "layout", "tokens", "being_written", "too_large", "no_room", "gone"]
"""Why KV was not found (``absent``; of another ``version`` or ``layout``; no more common ``tokens`` than the engine
has) or not staged (``version`` as well; ``being_written``; ``too_large`` for the arena; ``no_room`` beside what is
being written; the entry ``gone``)."""


@dataclass(frozen=True, slots=True)
class Refused:
    """KV not found or not staged, so the engine prefills: ``reason`` is to be counted, ``detail`` to be logged."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An entry's metadata: ``tokens`` (n,) int32, ``table`` (blocks, kv_heads) uint32 extents; (slot, seq) names it.

    ``matched`` is how many of its first tokens are those that were asked for; KV beyond them is not to be used."""

    slot: int
    seq: int
    trajectory: str
    version: int
    tokens: NDArray[np.int32]
    table: NDArray[np.uint32]
    matched: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names an entry being written to the other ranks that write it."""

    slot: int
    seq: int


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What an arena holds and has done. Bytes are of whole extents; ``repaired`` counts deaths in mid-change."""

    entries: int
    writing: int
    used_bytes: int
    capacity_bytes: int
    evicted: int
    refused: int
    reaped: int
    repaired: int


class Writing:
    """One process's part in writing an entry: blocks from ``first_block`` on, in the extents of ``entry.table``.

    The process that began the entry calls `publish` once all that joined it have left, each its heads written. As a
    context manager: a writer that joined leaves at the end of the block; what is not published by then, or raises, is
    given up and freed once no writer is left.
    """

    def __init__(self, arena: Arena, entry: Entry, first_block: int, number: int) -> None:
        self.arena, self.entry, self.first_block, self.number = arena, entry, first_block, number
        self._left = False

    @property
    def ticket(self) -> Ticket:
        """For `Arena.join`."""
        return Ticket(self.entry.slot, self.entry.seq)

    def publish(self) -> bool:
        """Make the entry readable. False, and the entry is freed, if meanwhile its trajectory ended, the weights
        changed, or another writer failed, died or has not left."""
        self._left = True
        return self.arena.leave(self, publish=True, whole=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._left:
            self._left = True
            self.arena.leave(self, publish=False, whole=kind is None and self.number > 0)


def common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """How many first tokens of two sequences agree."""
    n = min(len(left), len(right))
    different = np.flatnonzero(left[:n] != right[:n])
    return int(different[0]) if len(different) else n
