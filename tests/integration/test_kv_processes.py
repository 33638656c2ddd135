"""One arena, four processes: step by step against an exact oracle, then all at once."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kv_parts import SMALL, get, start

from libra.resources.kv.arena import Arena
from libra.resources.kv.segment import format_segment

PROCESSES = 4
OPERATIONS = 10_000
SLOTS = 10
WORDS = SMALL.extent_bytes // 4 - 1


def size(tokens: list[int]) -> int:
    """The extents of an entry: its pages and its metadata."""
    pages = SMALL.blocks(len(tokens)) * SMALL.kv_heads
    return pages + -(-(len(tokens) + pages) // WORDS)


@dataclass
class Oracle:
    """What an arena of ``extents`` extents must hold and answer: a dict of entries, the least recently used first."""

    extents: int
    version: int = 0
    entries: OrderedDict[str, list[int]] = field(default_factory=OrderedDict)
    writing: dict[tuple[str, int], tuple[int, list[int]]] = field(default_factory=dict)
    doomed: set[tuple[str, int]] = field(default_factory=set)
    evicted: int = 0

    @property
    def used(self) -> int:
        return sum(map(size, self.entries.values())) + sum(size(tokens) for _, tokens in self.writing.values())

    def open(self, process: int, name: str, version: int, tokens: list[int]) -> str:
        if version != self.version:
            return "version"
        if size(tokens) > self.extents:
            return "too_large"
        if (name, version) in self.writing:
            return "being_written"
        rest = OrderedDict((key, value) for key, value in self.entries.items() if key != name)
        slot_free = name in self.entries or len(self.entries) + len(self.writing) < SLOTS
        free = self.extents - self.used + (size(self.entries[name]) if name in self.entries else 0)
        victims = []
        while (free < size(tokens) or not slot_free) and rest:
            victims.append(rest.popitem(last=False))
            free, slot_free = free + size(victims[-1][1]), True
        if free < size(tokens) or not slot_free:
            return "no_room"
        self.entries, self.evicted = rest, self.evicted + len(victims)
        self.writing[name, version] = (process, tokens)
        return "opened"

    def publish(self, name: str, version: int) -> bool:
        _, tokens = self.writing.pop((name, version))
        if (name, version) in self.doomed:
            self.doomed.discard((name, version))
            return False
        self.entries[name] = tokens
        return True

    def abandon(self, name: str, version: int) -> None:
        self.writing.pop((name, version))
        self.doomed.discard((name, version))

    def get(self, name: str, version: int, tokens: list[int]) -> int | str:
        if name not in self.entries:
            return "absent"
        if version != self.version:
            return "version"
        pairs = zip(self.entries[name], tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.entries[name]), len(tokens)))
        return same or "tokens"

    def release(self, name: str) -> int:
        doomed = {key for key in self.writing if key[0] == name} - self.doomed
        self.doomed |= doomed
        return len(doomed) + (self.entries.pop(name, None) is not None)

    def set_weight_version(self, version: int) -> int:
        doomed = {key for key in self.writing if key[1] != version} - self.doomed
        gone = 0 if version == self.version else len(self.entries)
        self.doomed |= doomed
        self.entries = self.entries if version == self.version else OrderedDict()
        self.version = version
        return len(doomed) + gone


def test_ten_thousand_operations_from_four_processes_agree_with_a_dict(tmp_path: Path) -> None:
    """Every answer, the number of entries, the bytes in use and the evictions, after each operation."""
    path, rng = tmp_path / "arena", np.random.default_rng(5)
    format_segment(path, SMALL, (2 << 20) + 150 * SMALL.extent_bytes, SLOTS)
    oracle = Oracle(extents=150)
    processes = [start("serve", path) for _ in range(PROCESSES)]
    names = [f"g{i}m0" for i in range(14)]
    history: dict[str, list[int]] = {}

    def ask(process: int, *request: Any) -> list[Any]:
        stdin, stdout = processes[process].stdin, processes[process].stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer: list[Any] = json.loads(stdout.readline())
        return answer

    try:
        step = 0
        while step < OPERATIONS:
            process, name = int(rng.integers(PROCESSES)), str(rng.choice(names))
            operation = rng.choice(
                ["put", "get", "release", "open", "publish", "abandon", "set_weight_version"],
                p=[0.38, 0.38, 0.09, 0.06, 0.06, 0.02, 0.01],
            )
            version = oracle.version if rng.random() < 0.97 else oracle.version - 1
            past = history.get(name, [])[: int(rng.integers(1, 90))]
            tokens = past + rng.integers(0, 5, int(rng.integers(1, 25 if rng.random() < 0.98 else 500))).tolist()
            mine = [key for key, (owner, _) in oracle.writing.items() if owner == process]
            expected: Any = None
            if operation in ("put", "open"):
                if any(key[0] == name for key in mine):  # a process names what it has open by trajectory
                    continue
                request: tuple[Any, ...] = (operation, name, version, tokens)
                expected = oracle.open(process, name, version, tokens)
                if operation == "put" and expected == "opened":
                    expected = "stored" if oracle.publish(name, version) else "lost"
                history[name] = tokens if expected in ("stored", "opened") else past
            elif operation == "get":
                request, expected = ("get", name, version, tokens), oracle.get(name, version, tokens)
            elif operation == "release":
                request, expected = ("release", name), oracle.release(name)
            elif operation == "set_weight_version":
                version = oracle.version + int(rng.integers(2))
                request, expected = ("set_weight_version", version), oracle.set_weight_version(version)
            elif not mine:
                continue
            elif operation == "publish":
                request, expected = ("publish", mine[0][0]), oracle.publish(*mine[0])
            else:
                request = ("abandon", mine[0][0])
                oracle.abandon(*mine[0])
            used = oracle.used * SMALL.extent_bytes
            wanted = [expected, len(oracle.entries), len(oracle.writing), used, oracle.evicted]
            assert ask(process, *request) == wanted, f"step {step}: {request} by process {process}"
            step += 1
        assert oracle.evicted > 500, "the budget was felt"
        with Arena(path, writable=True) as arena:
            assert arena.audit() == []
            for name in names:
                for process in range(PROCESSES):
                    if (name, oracle.version) in oracle.writing and oracle.writing[name, oracle.version][0] == process:
                        ask(process, "abandon", name)
                arena.release(name)
            arena.reap()
    finally:
        for child in processes:
            child.communicate(timeout=60)
    assert [child.returncode for child in processes] == [0] * PROCESSES
    with Arena(path, writable=True) as arena:
        arena.reap()
        assert (arena.stats().entries, arena.stats().used_bytes, arena.audit()) == (0, 0, [])


def test_four_processes_at_once_never_see_kv_that_is_torn_or_another_s(tmp_path: Path) -> None:
    """Shared trajectories and a budget of a few entries: readers race with eviction and rewriting all the time. A
    process that sees wrong KV, or in a trajectory of its own anything but what it published last, ends with an
    error."""
    path = tmp_path / "arena"
    format_segment(path, SMALL, (2 << 20) + 200 * SMALL.extent_bytes, slots=12)
    processes = [start("stress", path, seed, 2500) for seed in range(PROCESSES)]
    output = [child.communicate(timeout=120)[0] for child in processes]
    assert [child.returncode for child in processes] == [0] * PROCESSES
    counts = [json.loads(text) for text in output]
    for result in ("stored", "loaded", "absent", "released"):
        assert all(count.get(result, 0) > 20 for count in counts), counts
    with Arena(path, writable=True) as arena:
        assert arena.audit() == []
        assert arena.stats().evicted > 100
        assert arena.stats().writing == arena.stats().repaired == 0
        assert arena.clear() > 0
        assert arena.stats().used_bytes == 0
        assert get(arena, "shared0", 0, [1]) == "absent"
