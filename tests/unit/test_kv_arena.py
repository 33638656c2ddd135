"""An arena as one process sees it: what is found, what is refused and why, what is evicted, what is freed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kv_parts import SMALL, Engine, begin, get, kv_of, put

from libra.resources.errors import KVError
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry, Refused, Writing
from libra.resources.kv.move import load, stage
from libra.resources.kv.ownership import OwnedArena
from libra.resources.kv.segment import format_segment

MIB = 1 << 20


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    format_segment(tmp_path / "arena", SMALL, 3 * MIB, slots=8)
    with Arena(tmp_path / "arena", writable=True) as arena:
        yield arena
        assert arena.audit() == []


def tiny(path: Path, extents: int, slots: int = 8) -> Arena:
    """An arena of exactly ``extents`` extents of 256 bytes."""
    format_segment(path, SMALL, 2 * MIB + extents * SMALL.extent_bytes, slots)
    return Arena(path, writable=True)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def python(code: str, *arguments: str) -> str:
    command, tests = [sys.executable, "-c", code, *arguments], Path(__file__).parents[1]
    return subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=60, check=True).stdout


def test_what_was_put_is_found_with_the_longest_common_prefix(arena: Arena) -> None:
    assert put(arena, "g0m0", 0, list(range(10))) == "stored"
    assert get(arena, "g0m0", 0, list(range(10))) == 10
    assert get(arena, "g0m0", 0, [*range(10), 77, 78]) == 10
    assert get(arena, "g0m0", 0, [0, 1, 2, 3, 4, 99]) == 5, "staged tokens may run ahead of what the client saw"


def test_the_reason_of_a_miss_is_named(arena: Arena) -> None:
    put(arena, "g0m0", 0, [1, 2, 3])
    found = {
        "absent": arena.find("g0m1", 0, ids(1, 2, 3), SMALL),
        "version": arena.find("g0m0", 1, ids(1, 2, 3), SMALL),
        "tokens": arena.find("g0m0", 0, ids(1, 2, 9), SMALL, beyond=2),
        "layout": arena.find("g0m0", 0, ids(1, 2, 3), replace(SMALL, block_size=8)),
    }
    assert {name: found[name].reason for name in found if isinstance(found[name], Refused)} == {n: n for n in found}
    assert found["layout"] == Refused("layout", "the arena's block_size 4 is not 8, the engine's")


@pytest.mark.parametrize(
    "other",
    [
        replace(SMALL, dtype="float16"),
        replace(SMALL, page_format="amx"),
        replace(SMALL, head_dim=8),
        replace(SMALL, layers=1),
    ],
)
def test_an_engine_of_another_layout_finds_nothing(arena: Arena, other: object) -> None:
    put(arena, "g0m0", 0, [1, 2, 3])
    missed = arena.find("g0m0", 0, ids(1, 2, 3), other)  # type: ignore[arg-type]
    assert isinstance(missed, Refused) and missed.reason == "layout"


def test_nothing_is_readable_before_it_is_published(arena: Arena) -> None:
    writing = begin(arena, "g0m0", 0, [1, 2, 3])
    assert isinstance(writing, Writing)
    assert get(arena, "g0m0", 0, [1, 2, 3]) == "absent"
    assert put(arena, "g0m0", 0, [1, 2, 3]) == "being_written"
    assert arena.being_written("g0m0", 0)
    assert not arena.being_written("g0m0", 1)
    assert not arena.being_written("g1m0", 0)
    assert writing.publish()
    assert not arena.being_written("g0m0", 0)
    assert get(arena, "g0m0", 0, [1, 2, 3]) == 3


def test_a_writer_that_fails_leaves_nothing(arena: Arena) -> None:
    writing = begin(arena, "g0m0", 0, [1, 2, 3])
    assert isinstance(writing, Writing)
    with pytest.raises(OSError, match="copy failed"), writing:
        raise OSError("copy failed")
    assert get(arena, "g0m0", 0, [1, 2, 3]) == "absent"
    assert (arena.stats().writing, arena.stats().used_bytes) == (0, 0)


def test_a_longer_context_extends_the_entry_and_only_the_rest_is_written(arena: Arena) -> None:
    put(arena, "g0m0", 0, list(range(10)))
    first = arena.find("g0m0", 0, ids(*range(10)), SMALL)
    longer = begin(arena, "g0m0", 0, list(range(19)))
    assert isinstance(first, Entry) and isinstance(longer, Writing)
    assert longer.first_block == 2, "the third block was not full: its KV is staged anew"
    assert (longer.entry.table[:2] == first.table[:2]).all()
    assert not arena.valid(first), "a reader of the shorter entry is told"
    assert longer.publish()
    assert get(arena, "g0m0", 0, list(range(19))) == 19


def test_blocks_are_kept_only_while_the_tokens_agree(arena: Arena) -> None:
    put(arena, "g0m0", 0, list(range(12)))
    other = begin(arena, "g0m0", 0, [0, 1, 2, 3, 4, 55, 6, 7, 8])
    assert isinstance(other, Writing) and other.first_block == 1
    assert other.publish()
    assert get(arena, "g0m0", 0, [0, 1, 2, 3, 4, 55, 6, 7, 8]) == 9


def test_the_least_recently_used_entries_make_room(tmp_path: Path) -> None:
    with tiny(
        tmp_path / "arena", extents=3 * 5
    ) as arena:  # an entry of 8 tokens: 2 blocks × 2 heads + 1 for its metadata
        for name in ("a", "b", "c"):
            assert put(arena, name, 0, [1] * 8) == "stored"
        oldest = arena.find("a", 0, ids(*[1] * 8), SMALL)
        assert isinstance(oldest, Entry)
        arena.touch(oldest)
        assert put(arena, "d", 0, [1] * 8) == "stored"
        assert [get(arena, name, 0, [1] * 8) for name in ("a", "b", "c", "d")] == [8, "absent", 8, 8]
        assert arena.stats().evicted == 1


def test_what_can_never_fit_evicts_nothing(tmp_path: Path) -> None:
    with tiny(tmp_path / "arena", extents=11) as arena:
        put(arena, "a", 0, [1] * 8)
        assert put(arena, "huge", 0, [1] * 400) == "too_large"
        held = begin(arena, "b", 0, [2] * 8)
        assert isinstance(held, Writing)
        assert put(arena, "c", 0, [3] * 16) == "no_room", "the room is that of an entry being written"
        assert get(arena, "a", 0, [1] * 8) == 8
        assert arena.stats().refused == 2


def test_more_entries_than_slots_evict_too(tmp_path: Path) -> None:
    with tiny(tmp_path / "arena", extents=200, slots=2) as arena:
        assert [put(arena, name, 0, [1]) for name in ("a", "b", "c")] == ["stored"] * 3
        assert [get(arena, name, 0, [1]) for name in ("a", "b", "c")] == ["absent", 1, 1]


def test_a_reader_learns_that_its_entry_was_lost_during_the_copy(arena: Arena) -> None:
    put(arena, "g0m0", 0, list(range(8)))
    entry = arena.find("g0m0", 0, ids(*range(8)), SMALL)
    assert isinstance(entry, Entry)
    engine = Engine(SMALL, pool=4)
    assert load(arena, entry, engine.cache(0), engine.blocks(8), SMALL, rank=0)
    arena.release("g0m0")
    put(arena, "g0m0", 0, list(range(8)))
    assert not load(arena, entry, engine.cache(0), engine.blocks(8), SMALL, rank=0)


def test_a_trajectory_that_ends_frees_its_entries_and_what_is_being_written(arena: Arena) -> None:
    put(arena, "g0m0", 0, [1, 2, 3])
    assert arena.release("g0m0") == 1
    writing = begin(arena, "g0m0", 0, [1, 2, 3])
    assert isinstance(writing, Writing)
    assert arena.release("g0m0") == 1
    assert not writing.publish()
    assert arena.stats().used_bytes == 0


def test_new_weights_make_old_kv_worthless(arena: Arena) -> None:
    put(arena, "g0m0", 0, [1, 2, 3])
    late = begin(arena, "g1m0", 0, [4, 5, 6])
    assert isinstance(late, Writing)
    assert arena.set_weight_version(1) == 2
    assert not late.publish()
    assert put(arena, "g0m0", 0, [1, 2, 3]) == "version"
    assert (get(arena, "g0m0", 0, [1, 2, 3]), arena.stats().used_bytes) == ("absent", 0)
    assert put(arena, "g0m0", 1, [1, 2, 3]) == "stored"


def test_ranks_of_other_processes_join_and_the_entry_is_published_once_all_have_left(tmp_path: Path) -> None:
    layout = SMALL.at_tp(2)
    tokens = ids(*range(6))
    engine = Engine(layout, pool=5)
    blocks = engine.blocks(6)
    engine.prefill(tokens, blocks)
    format_segment(tmp_path / "arena", layout, 3 * MIB, slots=4)
    with (
        Arena(tmp_path / "arena", True) as core,
        Arena(tmp_path / "arena", True) as first,
        Arena(tmp_path / "arena", True) as second,
    ):
        writing = core.begin("g0m0", 0, tokens)
        assert isinstance(writing, Writing)
        for rank, arena in enumerate((first, second)):
            part = arena.join(writing.ticket)
            assert isinstance(part, Writing)
            with part:
                stage(part, engine.cache(rank), blocks, layout, rank)
        assert writing.publish()
        assert get(core, "g0m0", 0, list(range(6))) == 6


def test_an_entry_is_not_published_if_a_rank_failed_or_has_not_left(arena: Arena) -> None:
    for fails in (True, False):
        writing = begin(arena, "g0m0", 0, [1, 2, 3])
        assert isinstance(writing, Writing)
        part = arena.join(writing.ticket)
        assert isinstance(part, Writing)
        if fails:
            with pytest.raises(OSError, match="device"), part:
                raise OSError("device lost")
            assert not writing.publish()
        else:
            assert not writing.publish()
            assert arena.stats().writing == 1, "extents stay the late rank's while it writes"
            part.__exit__(None)
        assert (get(arena, "g0m0", 0, [1, 2, 3]), arena.stats().used_bytes) == ("absent", 0)


def test_extents_that_are_small_chain_their_metadata(tmp_path: Path) -> None:
    tokens = list(range(2000))
    format_segment(tmp_path / "arena", SMALL, 4 * MIB, slots=4)
    with Arena(tmp_path / "arena", writable=True) as arena:
        assert put(arena, "g0m0", 0, tokens) == "stored"
        assert get(arena, "g0m0", 0, tokens) == 2000
        assert arena.audit() == []


def test_a_handle_says_where_and_how_much(arena: Arena) -> None:
    put(arena, "g0m0", 0, list(range(9)))
    entry = arena.find("g0m0", 0, ids(*range(9)), SMALL)
    assert isinstance(entry, Entry)
    handle = arena.handle(entry, worker="tcp://10.0.0.1:4001", node="n1")
    assert (handle.trajectory, handle.tokens, handle.nbytes) == ("g0m0", 9, 3 * 2 * SMALL.extent_bytes)
    assert handle.arena == str(arena.path)


def test_a_read_only_mapping_reads_and_changes_nothing(arena: Arena) -> None:
    put(arena, "g0m0", 0, list(range(9)))
    with Arena(arena.path) as reader:
        assert get(reader, "g0m0", 0, list(range(9))) == 9
        with pytest.raises(KVError, match="read-only; attach"):
            reader.release("g0m0")
        with pytest.raises(ValueError, match="read-only"):
            reader.extents[0] = 0


def test_block_ids_and_tensors_that_do_not_fit_are_refused(arena: Arena) -> None:
    put(arena, "g0m0", 0, list(range(9)))
    entry = arena.find("g0m0", 0, ids(0, 1, 2, 3, 4), SMALL)
    assert isinstance(entry, Entry) and entry.matched == 5
    engine = Engine(SMALL, pool=5)
    with pytest.raises(KVError, match="only 5 tokens, in 2 blocks, are of use"):
        load(arena, entry, engine.cache(0), engine.blocks(9), SMALL, 0)
    with pytest.raises(KVError, match="rank 0's KV tensors have"):
        load(arena, entry, Engine(replace(SMALL, tp=2), 5).cache(0), engine.blocks(5), SMALL, 0)
    writing = begin(arena, "g1m0", 0, [1])
    assert isinstance(writing, Writing)
    with pytest.raises(KVError, match="2 block ids for an entry of 1 blocks"):
        stage(writing, engine.cache(0), engine.blocks(5), SMALL, 0)


def test_an_arena_is_private_exclusive_and_gone_at_its_end(tmp_path: Path) -> None:
    owned = OwnedArena("r1", "w0", SMALL, 3 * MIB, slots=4, shared=tmp_path)
    assert owned.directory == tmp_path / "libra-r1-kv-w0"
    assert stat.S_IMODE(owned.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(owned.path.stat().st_mode) == 0o600
    assert owned.path.stat().st_blocks * 512 >= owned.path.stat().st_size, "its memory is taken, not promised"
    with pytest.raises(KVError, match=rf"in use by process {os.getpid()} .*KV arena of w0 in run r1"):
        OwnedArena("r1", "w0", SMALL, 3 * MIB, shared=tmp_path)
    owned.release()
    owned.release()
    assert list(tmp_path.iterdir()) == []
    OwnedArena("r1", "w0", SMALL, 3 * MIB, shared=tmp_path).release()


def test_an_arena_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kv_parts import SMALL\n"
        "from libra.resources.kv.ownership import OwnedArena\n"
        "owned = OwnedArena('r1', 'w0', SMALL, 3 << 20, shared=Path(sys.argv[1])); print(owned.path.exists())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("run", "budget", "message"),
    [
        ("r1", 1000, "holds 0 extents of 256 B, and one block of 2 heads needs 3; raise the budget"),
        ("r1", 1 << 60, "does not fit in .* B free; lower the budget"),
        ("a/b", 3 * MIB, "cannot be named by run 'a/b' and worker 'w0'"),
    ],
)
def test_an_arena_that_cannot_be_made_leaves_nothing(tmp_path: Path, run: str, budget: int, message: str) -> None:
    with pytest.raises(KVError, match=message):
        OwnedArena(run, "w0", SMALL, budget, shared=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_an_arena_s_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "libra-r1-kv-w0").touch()
    with pytest.raises(KVError, match="libra-r1-kv-w0 belongs to another user or is no directory"):
        OwnedArena("r1", "w0", SMALL, 3 * MIB, shared=tmp_path)


def test_what_is_no_arena_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KVError, match="has its worker ended"):
        Arena(tmp_path / "arena")
    (tmp_path / "arena").write_bytes(b"\0" * 100)
    with pytest.raises(KVError, match="holds 100 B and is no KV arena"):
        Arena(tmp_path / "arena")
    (tmp_path / "arena").write_bytes(b"\0" * 9000)
    with pytest.raises(KVError, match="is no whole KV arena"):
        Arena(tmp_path / "arena")


def test_memory_is_pinned_as_well_as_this_machine_can(arena: Arena) -> None:
    pin = arena.pin()
    assert arena.pin() is pin
    assert pin.nbytes == arena.extents.nbytes
    assert pin.kind in ("cuda", "locked", "plain")
    assert (pin.kind == "cuda") == (pin.why_not == ""), "what is less than the best says why"
    put(arena, "g0m0", 0, [1, 2, 3])
    assert get(arena, "g0m0", 0, [1, 2, 3]) == 3


def test_memory_registered_with_a_gpu_is_copied_to_it_and_back(arena: Arena) -> None:
    if arena.pin().kind != "cuda":
        pytest.skip(f"no GPU to register memory with: {arena.pin().why_not}")
    from cuda.bindings import runtime as rt

    size = SMALL.extent_bytes
    arena.extents[0], arena.extents[1] = 7, 0
    error, attributes = rt.cudaPointerGetAttributes(arena.extents.ctypes.data)
    assert (error, attributes.type) == (rt.cudaError_t.cudaSuccess, rt.cudaMemoryType.cudaMemoryTypeHost)
    error, device = rt.cudaMalloc(size)
    assert error == rt.cudaError_t.cudaSuccess
    try:
        kind = rt.cudaMemcpyKind.cudaMemcpyDefault
        for target, source in ((device, arena.extents[0].ctypes.data), (arena.extents[1].ctypes.data, device)):
            assert rt.cudaMemcpy(target, source, size, kind) == (rt.cudaError_t.cudaSuccess,)
    finally:
        rt.cudaFree(device)
    assert (arena.extents[1] == 7).all()


def test_importing_it_loads_neither_torch_nor_cuda() -> None:
    code = (
        "import libra.resources.kv.move, libra.resources.kv.ownership, sys\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('torch', 'cuda')])"
    )
    assert python(code) == "[]\n"


def test_the_oracle_tells_kv_apart() -> None:
    one, other = kv_of(ids(1, 2, 3, 4, 5), SMALL), kv_of(ids(1, 2, 3, 4, 6), SMALL)
    assert (one[:, 0] == other[:, 0]).all() and (one[:, 1] != other[:, 1]).all()
    assert len(np.unique(one[..., 0])) == one[..., 0].size, "every page is its own"
