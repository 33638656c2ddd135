"""For tests of staged KV: a made-up engine whose KV is a function of the tokens, and processes that put and get.

The KV of a block depends on all tokens up to its end and on head and layer, as a real model's does, so a page in the
wrong place, of the wrong trajectory or torn is recognised. ``python -m kv_parts serve|stress …`` are the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from libra.native.checksum import crc32c
from libra.native.pages import PagedCache
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Refused, Writing
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.move import load, stage
from libra.resources.kv.records import READY

SMALL = KVLayout("float32", layers=2, kv_heads=2, head_dim=4, block_size=4, tp=1, page_format="test")
TESTS = Path(__file__).parent


def kv_of(tokens: np.ndarray, layout: KVLayout) -> np.ndarray:
    """The KV of ``tokens``, (layers, blocks, heads, words) uint32; a last block that is not full depends on the tokens
    that it has."""
    words = layout.page_bytes // 4
    ends = [min(len(tokens), (block + 1) * layout.block_size) for block in range(layout.blocks(len(tokens)))]
    seeds = np.array([crc32c(tokens[:end]) for end in ends], np.uint32)
    head, layer = np.arange(layout.kv_heads, dtype=np.uint32), np.arange(layout.layers, dtype=np.uint32)
    mixed = seeds[None, :, None] + 7919 * head[None, None, :] + 104729 * layer[:, None, None]
    return (mixed[..., None] + np.arange(words, dtype=np.uint32)).astype(np.uint32)


@dataclass
class Engine:
    """Paged KV tensors of every rank of an engine with ``pool`` blocks, filled with rubbish."""

    layout: KVLayout
    pool: int
    seed: int = 0
    ranks: list[list[np.ndarray]] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        words = self.layout.page_bytes // 4
        shapes = [(self.pool, len(self.layout.held(rank)), words) for rank in range(self.layout.tp)]
        self.ranks = [
            [self.rng.integers(0, 2**32, shape, np.uint32) for _ in range(self.layout.layers)] for shape in shapes
        ]

    def blocks(self, tokens: int) -> np.ndarray:
        """Some free blocks, in no order."""
        return self.rng.permutation(self.pool)[: self.layout.blocks(tokens)]

    def prefill(self, tokens: np.ndarray, blocks: np.ndarray) -> None:
        """Compute the KV of ``tokens`` into ``blocks``."""
        kv = kv_of(tokens, self.layout)
        for rank, layers in enumerate(self.ranks):
            held = self.layout.held(rank)
            for layer, tensor in enumerate(layers):
                tensor[blocks] = kv[layer][:, held.start : held.stop]

    def cache(self, rank: int) -> PagedCache:
        return PagedCache(self.ranks[rank])

    def kv(self, blocks: np.ndarray) -> np.ndarray:
        """The KV in ``blocks`` over all heads, as `kv_of` gives it; replicas of a head must agree."""
        found = np.zeros(
            (self.layout.layers, len(blocks), self.layout.kv_heads, self.layout.page_bytes // 4), np.uint32
        )
        for rank, layers in enumerate(self.ranks):
            held = self.layout.held(rank)
            for layer, tensor in enumerate(layers):
                if rank % self.layout.replicas:
                    assert (found[layer][:, held.start : held.stop] == tensor[blocks]).all()
                found[layer][:, held.start : held.stop] = tensor[blocks]
        return found


def begin(arena: Arena, trajectory: str, version: int, tokens: list[int]) -> Writing | str:
    """Compute the KV of ``tokens`` and copy it into a new entry, unpublished; or why not."""
    ids = np.array(tokens, np.int32)
    writing = arena.begin(trajectory, version, ids)
    if isinstance(writing, Refused):
        return writing.reason
    layout = arena.layout
    engine = Engine(layout, layout.blocks(len(ids)) + 1)
    blocks = engine.blocks(len(ids))
    engine.prefill(ids, blocks)
    for rank in range(layout.tp):
        stage(writing, engine.cache(rank), blocks, layout, rank)
    return writing


def put(arena: Arena, trajectory: str, version: int, tokens: list[int]) -> str:
    """Stage the KV of ``tokens``: ``stored``, ``lost`` or why not."""
    writing = begin(arena, trajectory, version, tokens)
    if isinstance(writing, str):
        return writing
    return "stored" if writing.publish() else "lost"


def get(arena: Arena, trajectory: str, version: int, tokens: list[int]) -> int | str:
    """How many tokens were loaded, their KV compared with what it must be; or why none were."""
    entry = arena.find(trajectory, version, np.array(tokens, np.int32), arena.layout)
    if isinstance(entry, Refused):
        return entry.reason
    layout = arena.layout
    engine = Engine(layout, layout.blocks(entry.matched) + 1)
    blocks = engine.blocks(entry.matched)
    if not all(load(arena, entry, engine.cache(rank), blocks, layout, rank) for rank in range(layout.tp)):
        return "lost"
    expected = kv_of(entry.tokens, layout)[:, : len(blocks)]
    assert (engine.kv(blocks) == expected).all(), f"wrong KV for {trajectory} of version {version}"
    return entry.matched


def start(*arguments: object) -> subprocess.Popen[str]:
    """A process of this module."""
    command = [sys.executable, "-m", "kv_parts", *map(str, arguments)]
    return subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve(path: str) -> None:
    """Do what each line of standard input says, answer with the result and the arena's entries and bytes in use."""
    arena, reader = Arena(Path(path), writable=True), Arena(Path(path))
    opened: dict[str, Writing] = {}
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        result: Any = None
        if name == "put":
            result = put(arena, *arguments)
        elif name == "get":
            result = get(reader, *arguments)
        elif name == "open":
            writing = begin(arena, *arguments)
            result = writing if isinstance(writing, str) else "opened"
            if isinstance(writing, Writing):
                opened[arguments[0]] = writing
        elif name == "publish":
            result = opened.pop(arguments[0]).publish()
        elif name == "abandon":
            with opened.pop(arguments[0]):
                pass
        elif name in ("release", "set_weight_version"):
            result = getattr(arena, name)(*arguments)
        stats = arena.stats()
        sys.stdout.write(json.dumps([result, stats.entries, stats.writing, stats.used_bytes, stats.evicted]) + "\n")
        sys.stdout.flush()


def stress(path: str, seed: str, operations: str) -> None:
    """Put, get and release at random, of trajectories shared with other processes and of some that only this process
    writes: those must read as last published, or as evicted. Counts what happened."""
    rng = np.random.default_rng(int(seed))
    counts: dict[str, int] = {}
    mine: dict[str, list[int]] = {}
    with Arena(Path(path), writable=True) as arena, Arena(Path(path)) as reader:
        for _ in range(int(operations)):
            own = rng.random() < 0.5
            name = f"own{seed}x{rng.integers(3)}" if own else f"shared{rng.integers(4)}"
            tokens = mine.get(name, [])[: rng.integers(60)] + rng.integers(0, 9, rng.integers(1, 30)).tolist()
            choice = rng.random()
            if choice < 0.45:
                result: int | str = put(arena, name, 0, tokens)
                if own:
                    mine.pop(name, None)
                    if result == "stored":
                        mine[name] = tokens
            elif choice < 0.95:
                asked = mine.get(name, tokens)
                result = get(reader, name, 0, asked)
                if own:
                    evicted = result in ("absent", "lost")
                    assert evicted or (name in mine and result == len(mine[name])), (name, result)
                result = "loaded" if isinstance(result, int) else result
            else:
                arena.release(name)
                mine.pop(name, None)
                result = "released"
            counts[result] = counts.get(result, 0) + 1  # type: ignore[index]
    sys.stdout.write(json.dumps(counts))


def churn(path: str, seed: str) -> None:
    """Put and release for ever, to be killed."""
    rng = np.random.default_rng(int(seed))
    with Arena(Path(path), writable=True) as arena:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            name = f"g{rng.integers(6)}m0"
            put(arena, name, 0, rng.integers(0, 9, rng.integers(1, 60)).tolist())
            if rng.random() < 0.3:
                arena.release(f"g{rng.integers(6)}m0")


def every_change(path: Path) -> None:
    """Each way in which an arena's metadata changes, once or more."""
    with Arena(path, writable=True) as arena, Arena(path, writable=True) as rank:
        put(arena, "g0m0", 0, list(range(10)))
        put(arena, "g0m0", 0, list(range(19)))
        for fails in (True, False):
            nine = np.arange(9, dtype=np.int32)
            writing = arena.begin("g1m0", 0, nine) if fails else begin(arena, "g1m0", 0, nine.tolist())
            assert isinstance(writing, Writing)
            part = rank.join(writing.ticket)
            assert isinstance(part, Writing)
            with contextlib.suppress(OSError), part:
                if fails:
                    raise OSError("what was to be written is not")
            assert writing.publish() is not fails
        doomed = arena.begin("g2m0", 0, np.arange(9, dtype=np.int32))
        assert isinstance(doomed, Writing)
        arena.release("g2m0")
        with doomed:
            pass
        for number in range(3, 7):  # evicts
            put(arena, f"g{number}m0", 0, [number] * 20)
        arena.release("g6m0")
        arena.set_weight_version(1)
        put(arena, "g7m0", 1, [7] * 9)
        arena.clear()


def crash(path: str, stride: str) -> None:
    """Kill a process at every ``stride``-th line that `every_change` runs in the package, one process a line, and look
    at what it left. Prints how many were killed."""
    package, points, killed = "libra.resources.kv", 1, 0
    arena = Arena(Path(path), writable=True)
    while True:
        arena.set_weight_version(0)
        assert put(arena, "bystander", 0, [8, 8, 8]) == "stored"
        evicted = arena.stats().evicted
        pid = os.fork()
        if pid == 0:
            left = points

            def line(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal left
                left -= event == "line"
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return line

            sys.settrace(lambda frame, event, _: line if frame.f_globals["__name__"].startswith(package) else None)
            every_change(Path(path))
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL), f"point {points}: {status}"
        arena.reap()
        assert arena.audit() == [], f"point {points}: {arena.audit()}"
        assert arena.stats().writing == 0, f"point {points} left an entry that nobody writes"
        kept = check_published(arena)
        dropped = arena.stats().evicted > evicted or arena.weight_version == 1
        assert "bystander" in kept or dropped, f"point {points}: {kept}"
        arena.clear()
        assert arena.stats().used_bytes == 0, f"point {points} leaks {arena.stats().used_bytes} B"
        if status == 0:
            break
        points, killed = points + int(stride), killed + 1
    sys.stdout.write(f"{killed}\n")


def check_published(arena: Arena) -> list[str]:
    """The names of all entries that can be read, each found whole and right."""
    names = []
    for slot in arena.segment.in_state(READY):
        found = arena.segment.read(slot, (READY,))
        assert found is not None
        name, tokens = bytes(found[0]["trajectory"]).decode(), found[1].view(np.int32).tolist()
        assert get(arena, name, int(found[0]["version"]), tokens) == len(tokens)
        names.append(name)
    return names


if __name__ == "__main__":
    {"serve": serve, "stress": stress, "churn": churn, "crash": crash}[sys.argv[1]](*sys.argv[2:])
