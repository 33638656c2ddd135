"""Whole KV pages between a rank's paged KV tensors and the extents of a staging arena, by many threads without the GIL.

A *page* is the keys and values of one block of tokens for one KV head in one layer; an *extent* holds the pages of one
(block, head) of all layers. Only whole pages move, so the layout inside a page does not matter as long as both sides
agree on it, and re-sharding by attention head is the choice of a table's columns.

Invariants: addresses are taken from arrays that the `PagedCache` keeps alive, and every block and extent is checked
against their bounds before a byte moves; when a call returns, what it wrote is visible to every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.native import _pages

KERNELS = Path(__file__).parent / "src" / "pages.cu"
"""The same movement as a GPU's kernels; what they include lies beside it."""
fence = _pages.fence
"""A full memory fence: what this thread wrote before is seen before what it writes after."""


@dataclass(frozen=True, slots=True)
class PageGrid:
    """Where the pages of each layer's KV tensor lie: ``blocks`` × ``heads`` pages of ``page_bytes`` contiguous bytes;
    strides in bytes. ``ValueError`` names what does not fit."""

    blocks: int
    heads: int
    block_stride: int
    head_stride: int
    page_bytes: int

    @classmethod
    def of(cls, layers: Sequence[tuple[Sequence[int], Sequence[int], str, int]]) -> PageGrid:
        """From (shape, strides in bytes, type, bytes of an element) of every layer, each indexed [block, head, …]."""
        if not layers:
            raise ValueError("a paged cache needs the array of at least one layer")
        shape, strides, kind, item = layers[0]
        for number, layer in enumerate(layers):
            if (tuple(layer[0]), tuple(layer[1]), layer[2]) != (tuple(shape), tuple(strides), kind):
                raise ValueError(
                    f"layer {number} has shape {layer[0]}, strides {layer[1]}, type {layer[2]}; layer 0 has {shape}, "
                    f"{strides}, {kind}: all layers of a cache must be alike"
                )
        if len(shape) < 3:
            raise ValueError(f"each layer must be an array of [block, head, …], got shape {shape}")
        page_bytes = item * prod(shape[2:])
        contiguous = item
        for size, stride in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
            if prod(shape) and size > 1 and stride != contiguous:
                raise ValueError(
                    f"pages of strides {strides[2:]} are not contiguous: the engine must use its layout "
                    "[block, head, token, …]"
                )
            contiguous *= size
        for count, stride in zip(shape[:2], strides[:2], strict=True):
            if count > 1 and stride < page_bytes:
                raise ValueError(f"strides {strides[:2]} are smaller than a page of {page_bytes} B: pages overlap")
        blocks, heads = shape[:2]
        return cls(blocks, heads, strides[0] if blocks > 1 else 0, strides[1] if heads > 1 else 0, page_bytes)


class PagedCache:
    """The KV tensors of one rank in host memory: one array a layer, indexed [block, head, …], each page contiguous.

    A torch tensor comes in as ``tensor.view(torch.uint8).numpy()``, which shares its memory. ``ValueError`` names the
    layer whose shape, strides or type differ from the first one's.
    """

    def __init__(self, layers: Sequence[NDArray[Any]]) -> None:
        self.grid = PageGrid.of([(layer.shape, layer.strides, str(layer.dtype), layer.itemsize) for layer in layers])
        for number, layer in enumerate(layers):
            if not layer.flags.writeable:
                raise ValueError(f"layer {number} is read-only: KV is loaded into it")
        self.layers = tuple(layers)
        self.addresses = np.array([layer.ctypes.data for layer in layers], np.uint64)

    def gather(
        self, blocks: NDArray[np.int64], extents: NDArray[np.uint8], table: NDArray[np.uint32], threads: int
    ) -> int:
        """`gather_pages` of this cache."""
        return gather_pages(self, blocks, extents, table, threads)

    def scatter(
        self, blocks: NDArray[np.int64], extents: NDArray[np.uint8], table: NDArray[np.uint32], threads: int
    ) -> int:
        """`scatter_pages` of this cache."""
        return scatter_pages(self, blocks, extents, table, threads)


def gather_pages(
    cache: PagedCache,
    blocks: NDArray[np.int64],
    extents: NDArray[np.uint8],
    table: NDArray[np.uint32],
    threads: int = 2,
    streaming: bool = True,
) -> int:
    """Copy the pages of ``blocks`` (n,) into ``extents`` (count, bytes): those of block ``j`` and head ``h`` of all
    layers go to extent ``table[j, h]``; ``table`` is (n, heads of the cache). Returns the bytes moved.

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
    check_arrays(extents, table, gather)
    grid = cache.grid
    return _pages.move_pages(
        layers=cache.addresses,
        n_blocks=grid.blocks,
        n_heads=grid.heads,
        block_stride=grid.block_stride,
        head_stride=grid.head_stride,
        page_bytes=grid.page_bytes,
        extents=extents.ctypes.data,
        n_extents=extents.shape[0],
        extent_bytes=extents.shape[1],
        blocks=np.ascontiguousarray(blocks, np.int64),
        table=np.ascontiguousarray(table),
        gather=gather,
        threads=threads,
        streaming=streaming,
    )


def check_arrays(extents: NDArray[np.uint8], table: NDArray[np.uint32], gather: bool) -> None:
    """``ValueError`` if these arrays are not of the kind that pages move by."""
    if extents.ndim != 2 or not extents.flags.c_contiguous or extents.dtype != np.uint8:
        raise ValueError(
            f"extents must be a C-contiguous uint8 array of (count, bytes), got {extents.shape} {extents.dtype}"
        )
    if table.dtype != np.uint32:
        raise ValueError(f"a table of {table.dtype} would be cast to uint32, extent numbers wrapped: make it uint32")
    if gather and not extents.flags.writeable:
        raise ValueError("cannot gather into read-only extents: map the arena writable")
