"""The worker's side of staged KV: its arena comes and goes, hints become wishes, and what came of them is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.resources.errors import ConfigError
from libra.resources.kv.entries import Entry, Writing
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.ownership import SHARED_MEMORY, arena_path
from libra.resources.tags import node_of
from libra.resources.types import Migration
from libra.tasks.kv import Hint, Source, Staging, hint_of, informed
from libra.tasks.kv_fetch import Choice

LAYOUT = KVLayout("float32", layers=2, kv_heads=2, head_dim=32, block_size=32, tp=1, page_format="test")
RUN, WORKER, NODE = "0badfeed", "tcp://10.0.0.1:7", "10.0.0.1"
BUDGET = 8 * 2**20
TOKENS = np.arange(150, dtype=np.int32)


def no_peer(address: str) -> Any:
    raise AssertionError(f"nothing is to be fetched from {address}")


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging(RUN, WORKER, NODE, BUDGET, no_peer)
    made.open(LAYOUT.to_json(), "test", 3)
    yield made
    owned = made.take()
    if owned is not None:
        owned.release()


def put(staging: Staging, trajectory: str, version: int = 3) -> None:
    assert staging.arena is not None
    writing = staging.arena.begin(trajectory, version, TOKENS)
    assert isinstance(writing, Writing)
    assert writing.publish()


def has(staging: Staging, trajectory: str) -> bool:
    assert staging.arena is not None
    return isinstance(staging.arena.find(trajectory, 3, TOKENS, LAYOUT), Entry)


def ended(**fields: Any) -> dict[str, Any]:
    return {"loaded": 0, "staged": 0, "cached": 0, "kv_seconds": 0.0, **fields}


def test_the_arena_lies_where_run_and_worker_say_and_ends_with_its_owner(staging: Staging) -> None:
    assert staging.path == arena_path(RUN, WORKER) == SHARED_MEMORY / f"libra-{RUN}-kv-tcp_10.0.0.1_7" / "arena"
    assert staging.path.exists()
    assert staging.arena is not None
    assert staging.arena.weight_version == 3
    owned = staging.take()
    assert owned is not None
    owned.release()
    assert not staging.path.parent.exists()
    assert staging.take() is staging.arena is None
    assert staging.wish("g0m0", TOKENS, Hint(stage=True)) == {}
    assert staging.stats() == {}
    staging.forget(["g0m0"])


def test_an_engine_that_stages_no_kv_cannot_have_an_arena() -> None:
    with pytest.raises(ConfigError, match=r"engine.kv_arena = 1024 but engine.kind = 'torch' stages no KV"):
        Staging(RUN, WORKER, NODE, 1024, no_peer).open(None, "torch", 0)
    assert not arena_path(RUN, WORKER).parent.exists()


def test_what_the_plugin_wrote_becomes_a_hint_and_only_arenas_of_the_node_a_wish(staging: Staging) -> None:
    written = {
        "bucket": "rollout:tp1",
        "kv": {"sources": [["b", NODE, "tcp://b"], ["c", "10.0.0.2", "tcp://c"]], "fetching": 0.5, "prefilling": 2.0},
    }
    hint = hint_of(written, stage=False)
    assert hint == Hint(False, (Source("b", NODE, "tcp://b"), Source("c", "10.0.0.2", "tcp://c")), 0.5, 2.0)
    assert staging.wish("g0m0", TOKENS, hint) == {"stage": False, "arenas": [str(arena_path(RUN, "b"))]}
    assert hint_of({}, stage=True) == Hint(stage=True)


def test_what_came_of_a_move_is_told_of_the_first_segment_only(staging: Staging) -> None:
    moved = Hint(True, (Source("b", NODE, "tcp://b"),), 0.5, 2.0)
    loaded = staging.migration(moved, ended(loaded=90, cached=90, kv_seconds=0.25), 100)
    assert loaded == Migration("load", "b", WORKER, 90, 90 * LAYOUT.bytes_per_token, 0.25, 0.5, 2.0)
    assert loaded.expected == 0.5
    computed = staging.migration(moved, ended(cached=10), 100)
    assert computed == Migration("prefill", "b", WORKER, 90, 0, 0.0, 0.5, 2.0)
    assert computed.expected == 2.0
    assert staging.migration(Hint(True), ended(loaded=90), 100) is None


def test_the_estimates_that_decided_replace_the_policy_s_where_they_were_measured() -> None:
    hint = Hint(True, (Source("b", "10.0.0.2", "tcp://b"),), 0.5, 2.0)
    known = informed(hint, Choice(fetch=False, fetching=3.0, prefilling=None))
    assert (known.fetching, known.prefilling) == (3.0, 2.0)


def test_nothing_of_a_forgotten_trajectory_stays(staging: Staging) -> None:
    for name in ("g0m0", "g0m1"):
        put(staging, name)
    staging.forget(["g0m0", "g9m9"])
    assert [has(staging, name) for name in ("g0m0", "g0m1")] == [False, True]
    assert staging.stats()["kv_entries"] == 1


def test_use_keeps_an_entry(staging: Staging) -> None:
    """The entries fill the arena; the one in use outlives the others."""
    count = 0
    while staging.stats()["kv_evicted"] == 0:
        put(staging, f"g{count}m0")
        staging.wish("g0m0", np.concatenate([TOKENS, TOKENS]), Hint())
        count += 1
    assert has(staging, "g0m0")
    assert not has(staging, "g1m0")


def test_a_dead_owner_s_arena_is_reaped_by_the_next_of_the_run(staging: Staging, tmp_path: Path) -> None:
    code = (
        "import os; from libra.resources.kv.ownership import OwnedArena\n"
        "from libra.resources.kv.layout import KVLayout\n"
        "import psutil\n"
        f"OwnedArena('{RUN}', 'dead', KVLayout(**{LAYOUT.to_json()!r}), {BUDGET})\n"
        "[guard] = psutil.Process().children(); guard.kill(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    left = arena_path(RUN, "dead")
    assert left.exists()
    other = Staging(RUN, "other", NODE, BUDGET, no_peer)
    other.open(LAYOUT.to_json(), "test", 0)
    assert not left.parent.exists()
    assert staging.path.exists()
    owned = other.take()
    assert owned is not None
    owned.release()


def test_a_worker_is_on_the_node_that_it_names_else_on_its_host() -> None:
    assert node_of({"capable:rollout": 8, "node:rack-3": 1}, NODE) == "rack-3"
    assert node_of({"capable:rollout": 8}, NODE) == NODE
