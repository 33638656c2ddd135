"""Staging and loading: one rank's pages between its KV tensors, on a CPU or a GPU, and an entry, re-sharded by head.

Invariants: a rank writes the heads that its layout says it stages and reads those it holds, so entries written at one
tensor-parallel degree load at any other; pages of an entry that was lost during a copy are reported, never counted as
loaded.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libra.native.pages import PageGrid
from libra.resources.errors import KVError
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry, Writing
from libra.resources.kv.gpu import DeviceCache
from libra.resources.kv.layout import KVLayout


class RankCache(Protocol):
    """One rank's paged KV tensors: a `libra.native.pages.PagedCache`, or a `DeviceCache` on a GPU."""

    grid: PageGrid
    addresses: NDArray[np.uint64]

    def gather(
        self, blocks: NDArray[np.int64], extents: NDArray[np.uint8], table: NDArray[np.uint32], threads: int
    ) -> int:
        """See `libra.native.pages.gather_pages`."""

    def scatter(
        self, blocks: NDArray[np.int64], extents: NDArray[np.uint8], table: NDArray[np.uint32], threads: int
    ) -> int:
        """See `libra.native.pages.scatter_pages`."""


def stage(
    writing: Writing, cache: RankCache, blocks: NDArray[np.int64], layout: KVLayout, rank: int, threads: int = 2
) -> int:
    """Copy a rank's part of an entry from ``cache`` into the arena: ``blocks`` are the engine's block ids of *all*
    blocks of the entry, those before ``writing.first_block`` are there already. Returns the bytes copied: 0 for a rank
    whose heads another one stages."""
    table = writing.entry.table
    if len(blocks) != len(table):
        raise KVError(f"{len(blocks)} block ids for an entry of {len(table)} blocks ({writing.entry.trajectory})")
    _check(writing.arena, cache, layout, rank)
    heads = layout.staged(rank)
    if not heads:
        return 0
    rows = slice(writing.first_block, None)
    return cache.gather(blocks[rows], writing.arena.extents, table[rows, heads.start : heads.stop], threads)


def load(
    arena: Arena,
    entry: Entry,
    cache: RankCache,
    blocks: NDArray[np.int64],
    layout: KVLayout,
    rank: int,
    first_block: int = 0,
    threads: int = 2,
) -> bool:
    """Copy a rank's heads of an entry's blocks, from ``first_block`` on, into the engine's ``blocks``. False: the
    entry was lost during the copy and the blocks hold nothing of use.

    The last block may hold KV of tokens beyond ``entry.matched``; an engine computes those positions anew."""
    if first_block + len(blocks) > layout.blocks(entry.matched):
        raise KVError(
            f"rows {first_block} to {first_block + len(blocks)} of {entry.trajectory}: only {entry.matched} tokens, in "
            f"{layout.blocks(entry.matched)} blocks, are of use"
        )
    difference = arena.layout.differs(layout)
    if difference is not None:
        raise KVError(f"KV in {arena.path} does not fit this engine: {difference}; find() refuses it, prefill")
    _check(arena, cache, layout, rank)
    heads = layout.held(rank)
    rows = slice(first_block, first_block + len(blocks))
    cache.scatter(blocks, arena.extents, entry.table[rows, heads.start : heads.stop], threads)
    return arena.valid(entry)


def _check(arena: Arena, cache: RankCache, layout: KVLayout, rank: int) -> None:
    found = (len(cache.addresses), cache.grid.heads, cache.grid.page_bytes)
    wanted = (layout.layers, len(layout.held(rank)), layout.page_bytes)
    if found != wanted:
        raise KVError(
            f"rank {rank}'s KV tensors have (layers, heads, page bytes) {found}, its layout says {wanted}; "
            "describe the engine's own layout"
        )
    if isinstance(cache, DeviceCache):
        arena.pin()  # once for a process; pages move without, but slowly
