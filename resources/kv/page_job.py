"""One move of pages between a GPU's KV tensors and extents, in numbers: what a kernel or a batch of copies gets.

Invariants: a job names no block and no extent out of bounds, and says the same whichever way it is carried out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.native.pages import PageGrid, check_arrays


@dataclass(frozen=True, slots=True)
class PageJob:
    """The pages of ``blocks`` (n,) of tensors at ``addresses`` (one a layer) against extents ``table`` (n, heads).

    ``extents`` is an address; ``to_extents``: into them, else out of them. Built by `checked`."""

    grid: PageGrid
    addresses: NDArray[np.uint64]
    blocks: NDArray[np.int64]
    table: NDArray[np.uint32]
    extents: int
    extent_bytes: int
    to_extents: bool

    @classmethod
    def checked(
        cls,
        grid: PageGrid,
        addresses: NDArray[np.uint64],
        blocks: NDArray[np.int64],
        extents: NDArray[np.uint8],
        table: NDArray[np.uint32],
        to_extents: bool,
    ) -> PageJob:
        """``ValueError`` or ``IndexError``, as of `libra.native.pages.gather_pages`, if something does not fit."""
        check_arrays(extents, table, to_extents)
        if table.shape != (len(blocks), grid.heads):
            raise ValueError(f"a table of shape {table.shape} does not fit {len(blocks)} blocks of {grid.heads} heads")
        count, extent_bytes = extents.shape
        if extent_bytes < len(addresses) * grid.page_bytes:
            raise ValueError(f"an extent of {extent_bytes} B cannot hold {len(addresses)} pages of {grid.page_bytes} B")
        wrong = np.flatnonzero((blocks < 0) | (blocks >= grid.blocks))
        if len(wrong):
            raise IndexError(f"block {blocks[wrong[0]]} of row {wrong[0]}: the cache has {grid.blocks}")
        if table.size and int(table.max()) >= count:
            raise IndexError(f"extent {table.max()}: the arena has {count}")
        blocks = np.ascontiguousarray(blocks, np.int64)
        table = np.ascontiguousarray(table)
        return cls(grid, addresses, blocks, table, int(extents.ctypes.data), extent_bytes, to_extents)

    @property
    def pages(self) -> int:
        return self.table.size * len(self.addresses)

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.pages * self.grid.page_bytes

    def words(self) -> NDArray[np.uint64]:
        """The job as ``placement_of`` in native/src/page_words.hpp reads it; the extents' address is not part of it."""
        grid = self.grid
        head = [len(self.addresses), grid.heads, len(self.blocks)]
        head += [grid.block_stride, grid.head_stride, grid.page_bytes, self.extent_bytes]
        table = np.zeros(-(-self.table.size // 2) * 2, np.uint32)
        table[: self.table.size] = self.table.reshape(-1)
        parts = [np.array(head, np.uint64), self.addresses, self.blocks.view(np.uint64), table.view(np.uint64)]
        return np.concatenate(parts)

    def word_bytes(self, extents: int) -> int:
        """The words to move in, 16 bytes or 1: every address and size is a multiple of it. ``extents``: their address
        as the kernel sees it."""
        grid = self.grid
        numbers = [grid.block_stride, grid.head_stride, grid.page_bytes, self.extent_bytes, extents]
        aligned = all(number % 16 == 0 for number in numbers) and not (self.addresses % np.uint64(16)).any()
        return 16 if aligned else 1

    def copies(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """(targets, sources): an address each for every page, all of ``grid.page_bytes`` bytes."""
        grid, layers = self.grid, np.arange(len(self.addresses), dtype=np.uint64)
        heads = np.arange(grid.heads, dtype=np.uint64) * np.uint64(grid.head_stride)
        rows = self.blocks.astype(np.uint64) * np.uint64(grid.block_stride)
        cached = rows[:, None, None] + heads[None, :, None] + self.addresses[None, None, :]
        staged = self.table.astype(np.uint64)[:, :, None] * np.uint64(self.extent_bytes) + np.uint64(self.extents)
        staged = staged + (layers * np.uint64(grid.page_bytes))[None, None, :]
        both = staged.reshape(-1), cached.reshape(-1)
        return both if self.to_extents else both[::-1]
