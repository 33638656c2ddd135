"""Staging and loading KV against a plain copy of as many bytes, Qwen3-14B-shaped (40 layers, 8 KV heads of 128,
bfloat16).

Every round runs every contender once, one after the other, and a figure is the median over rounds of its ratio to the
copy of the same round: what else the machine does at the time touches all of them. The context is 40,960 tokens, halved
until everything fits in 60 % of the free memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from benchmarks.rows import Row, Rows
from libra.native.pages import PagedCache, copy_bytes, gather_pages, scatter_pages
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry, Writing
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.move import load, stage
from libra.resources.kv.ownership import OwnedArena

THREADS = 2
ROUNDS = 7
LAYOUT = KVLayout("bfloat16", layers=40, kv_heads=8, head_dim=128, block_size=32, tp=1, page_format="bench")
MOST_TOKENS = 40_960
GATHER_LIMIT, SCATTER_LIMIT, TIME_LIMIT, TORCH_LIMIT = 0.80, 0.65, 1.5, 1.2


def fitting(tokens: int) -> int:
    """``tokens``, halved until the cache, the arena and the copy's target fit."""
    shared = os.statvfs("/dev/shm")
    room = min(0.6 * psutil.virtual_memory().available, 2.5 * shared.f_bavail * shared.f_frsize)
    while 2.7 * tokens * LAYOUT.bytes_per_token > room and tokens > 1280:
        tokens //= 2
    return tokens


class Contest:
    """The contenders over one context of ``tokens`` tokens, in scattered blocks and extents."""

    def __init__(self, arena: Arena, tokens: int) -> None:
        import torch

        torch.set_num_threads(THREADS)
        rng = np.random.default_rng(0)
        self.arena, self.tokens = arena, np.arange(tokens, dtype=np.int32)
        rows = LAYOUT.blocks(tokens)
        pool = rows + rows // 8
        shape = (pool, LAYOUT.kv_heads, LAYOUT.page_bytes)
        self.layers = [np.full(shape, layer + 1, np.uint8) for layer in range(LAYOUT.layers)]
        self.cache = PagedCache(self.layers)
        self.blocks = rng.permutation(pool)[:rows]
        self.table = rng.permutation(len(arena.extents))[: rows * LAYOUT.kv_heads].reshape(rows, -1).astype(np.uint32)
        self.nbytes = rows * LAYOUT.kv_heads * LAYOUT.layers * LAYOUT.page_bytes
        self.copied = np.ones(self.nbytes // 2, np.uint8)
        self._torch = torch
        # torch's peers write one layer's pages side by side: no scattered target, no allocation.
        self._one_layer = torch.ones((rows * LAYOUT.kv_heads, LAYOUT.page_bytes // 8), dtype=torch.int64)

    def memcpy(self) -> None:
        """Half the bytes, twice, between resident memory."""
        for half in (0, 1):
            source = self.arena.extents.reshape(-1)[half * len(self.copied) :][: len(self.copied)]
            copy_bytes(self.copied, source, THREADS)

    def gather(self) -> None:
        gather_pages(self.cache, self.blocks, self.arena.extents, self.table, THREADS)

    def scatter(self) -> None:
        scatter_pages(self.cache, self.blocks, self.arena.extents, self.table, THREADS)

    def torch_gather(self) -> None:
        index = self._torch.from_numpy(self.blocks)
        out = self._one_layer.view(len(self.blocks), -1)
        for layer in self.layers:
            pool = self._torch.from_numpy(layer).view(self._torch.int64).view(len(layer), -1)
            self._torch.index_select(pool, 0, index, out=out)

    def torch_scatter(self) -> None:
        index = self._torch.from_numpy(self.table.reshape(-1).astype(np.int64))
        extents = self._torch.from_numpy(self.arena.extents).view(self._torch.int64)
        pages = extents.view(len(extents), LAYOUT.layers, -1)
        for layer in range(LAYOUT.layers):
            self._torch.index_select(pages[:, layer], 0, index, out=self._one_layer)

    def stage(self) -> None:
        """All of it: reserve an entry (evicting the last round's), copy, publish."""
        self.arena.release("g0m0")
        writing = self.arena.begin("g0m0", 0, self.tokens)
        assert isinstance(writing, Writing)
        stage(writing, self.cache, self.blocks, LAYOUT, rank=0, threads=THREADS)
        assert writing.publish()

    def load(self) -> None:
        """All of it: find the entry and compare its tokens, copy, check that it was not lost."""
        entry = self.arena.find("g0m0", 0, self.tokens, LAYOUT)
        assert isinstance(entry, Entry)
        assert load(self.arena, entry, self.cache, self.blocks, LAYOUT, rank=0, threads=THREADS)


def seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(contest: Contest, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each contender, (rounds,), after a round to warm up."""
    order = ("memcpy", "gather", "scatter", "torch_gather", "torch_scatter", "stage", "load")
    taken = [{name: seconds(getattr(contest, name)) for name in order} for _ in range(rounds + 1)][1:]
    return {name: np.array([each[name] for each in taken]) for name in order}


def run(tokens: int = MOST_TOKENS, rounds: int = ROUNDS) -> Rows:
    """The rows ``kv.*``."""
    tokens = fitting(tokens)
    budget = int(1.05 * tokens * LAYOUT.bytes_per_token) + 64 * LAYOUT.extent_bytes + (4 << 20)
    owned = OwnedArena(f"bench{os.getpid()}", "kv", LAYOUT, budget, slots=16, shared=Path("/dev/shm"))
    try:
        assert owned.arena is not None
        contest = Contest(owned.arena, tokens)
        taken = measure(contest, rounds)
        nbytes = contest.nbytes
        del contest
    finally:
        owned.release()
    ratio = {name: float(np.median(taken["memcpy"] / taken[name])) for name in taken}
    rate = {name: nbytes / float(np.median(taken[name])) / 1e9 for name in taken}
    load_average = os.getloadavg()[0]
    where = f"{tokens} tokens, {nbytes / 1e9:.2f} GB, {THREADS} threads, {rounds} rounds, load {load_average:.1f}"

    def bandwidth(name: str, limit: float) -> Row:
        note = f"at least; {rate[name]:.1f} GB/s, memcpy {rate['memcpy']:.1f}; {where}"
        return Row(ratio[name], "× memcpy", limit, note)

    def duration(name: str) -> Row:
        note = f"at most; {1e3 * float(np.median(taken[name])):.0f} ms; {where}"
        return Row(1 / ratio[name], "× memcpy time", TIME_LIMIT, note)

    def against_torch(name: str) -> Row:
        peer = taken[f"torch_{name}"]
        note = f"at least; torch.index_select(out=) {rate[f'torch_{name}']:.1f} GB/s; {where}"
        return Row(float(np.median(peer / taken[name])), "× torch", TORCH_LIMIT, note)

    return {
        "kv.gather_bandwidth_over_memcpy": bandwidth("gather", GATHER_LIMIT),
        "kv.scatter_bandwidth_over_memcpy": bandwidth("scatter", SCATTER_LIMIT),
        "kv.gather_bandwidth_over_torch": against_torch("gather"),
        "kv.scatter_bandwidth_over_torch": against_torch("scatter"),
        "kv.stage_time_over_memcpy": duration("stage"),
        "kv.load_time_over_memcpy": duration("load"),
    }
