"""Whole KV pages between a rank's paged KV tensors and the extents of a staging arena, by many threads without the GIL.

A *page* is the keys and values of one block of tokens for one KV head in one layer; an *extent* holds the pages of one
(block, head) of all layers. Only whole pages move, so the layout inside a page does not matter as long as both sides
agree on it, and re-sharding by attention head is the choice of a table's columns.

Invariants: addresses are taken from arrays that the `PagedCache` keeps alive, and every block and extent is checked
against their bounds before a byte moves; when a call returns, what it wrote is visible to every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.native import _pages

fence = _pages.fence
"""A full memory fence: what this thread wrote before is seen before what it writes after."""


class PagedCache:
    """The KV tensors of one rank: one array a layer, indexed [block, head, …], each page contiguous.

    A torch tensor comes in as ``tensor.view(torch.uint8).numpy()``, which shares its memory. ``ValueError`` names the
    layer whose shape, strides or type differ from the first one's.
    """

    def __init__(self, layers: Sequence[NDArray[Any]]) -> None:
        if not layers:
            raise ValueError("a paged cache needs the array of at least one layer")
        first = layers[0]
        for number, layer in enumerate(layers):
            if (layer.shape, layer.strides, layer.dtype) != (first.shape, first.strides, first.dtype):
                raise ValueError(
                    f"layer {number} has shape {layer.shape}, strides {layer.strides}, type {layer.dtype}; layer 0 has "
                    f"{first.shape}, {first.strides}, {first.dtype}: all layers of a cache must be alike"
                )
            if layer.ndim < 3 or not layer.flags.writeable:
                raise ValueError(
                    f"layer {number} must be a writable array of [block, head, …], got shape {layer.shape}"
                )
        if first.size and not first[0, 0].flags.c_contiguous:
            raise ValueError(
                f"pages of strides {first.strides[2:]} are not contiguous: the engine must use its layout "
                "[block, head, token, …]"
            )
        self.layers = tuple(layers)
        self.blocks, self.heads = first.shape[:2]
        self.page_bytes = first.itemsize * int(np.prod(first.shape[2:]))
        self.block_stride = first.strides[0] if self.blocks > 1 else 0
        self.head_stride = first.strides[1] if self.heads > 1 else 0
        self.addresses = np.array([layer.ctypes.data for layer in layers], np.uint64)
        for count, stride in ((self.blocks, self.block_stride), (self.heads, self.head_stride)):
            if count > 1 and stride < self.page_bytes:
                raise ValueError(
                    f"strides {first.strides[:2]} are smaller than a page of {self.page_bytes} B: pages overlap"
                )


def gather_pages(
    cache: PagedCache,
    blocks: NDArray[np.int64],
    extents: NDArray[np.uint8],
    table: NDArray[np.uint32],
    threads: int = 2,
    streaming: bool = True,
) -> int:
    """Copy the pages of ``blocks`` (n,) into ``extents`` (count, bytes): those of block ``j`` and head ``h`` of all
    layers go to extent ``table[j, h]``; ``table`` is (n, cache.heads). Returns the bytes moved.

    ``streaming`` stores bypass the CPU cache, which pays for anything larger than it. ``ValueError`` or ``IndexError``
    (and no byte moved) if the shapes, a block or an extent do not fit. Extents must not repeat.
    """
    return _move(cache, blocks, extents, table, True, threads, streaming)


def scatter_pages(
    cache: PagedCache,
    blocks: NDArray[np.int64],
    extents: NDArray[np.uint8],
    table: NDArray[np.uint32],
    threads: int = 2,
    streaming: bool = True,
) -> int:
    """The inverse of `gather_pages`: extents into the cache. ``extents`` may be read-only; blocks must not repeat."""
    return _move(cache, blocks, extents, table, False, threads, streaming)


def copy_bytes(target: NDArray[np.uint8], source: NDArray[np.uint8], threads: int = 2, streaming: bool = True) -> None:
    """One contiguous copy (n,) → (n,) with the same threads and stores: the limit that page movement is held
    against."""
    _pages.copy_bytes(target, source, threads, streaming)


def _move(
    cache: PagedCache,
    blocks: NDArray[np.int64],
    extents: NDArray[np.uint8],
    table: NDArray[np.uint32],
    gather: bool,
    threads: int,
    streaming: bool,
) -> int:
    if extents.ndim != 2 or not extents.flags.c_contiguous or extents.dtype != np.uint8:
        raise ValueError(
            f"extents must be a C-contiguous uint8 array of (count, bytes), got {extents.shape} {extents.dtype}"
        )
    if table.dtype != np.uint32:
        raise ValueError(f"a table of {table.dtype} would be cast to uint32, extent numbers wrapped: make it uint32")
    if gather and not extents.flags.writeable:
        raise ValueError("cannot gather into read-only extents: map the arena writable")
    return _pages.move_pages(
        layers=cache.addresses,
        n_blocks=cache.blocks,
        n_heads=cache.heads,
        block_stride=cache.block_stride,
        head_stride=cache.head_stride,
        page_bytes=cache.page_bytes,
        extents=extents.ctypes.data,
        n_extents=extents.shape[0],
        extent_bytes=extents.shape[1],
        blocks=np.ascontiguousarray(blocks, np.int64),
        table=np.ascontiguousarray(table),
        gather=gather,
        threads=threads,
        streaming=streaming,
    )
