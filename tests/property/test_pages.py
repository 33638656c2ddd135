"""Page movement against numpy, and re-sharding between any two tensor-parallel degrees."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_parts import Engine, kv_of

from libra.native.pages import PagedCache, copy_bytes, gather_pages, scatter_pages
from libra.resources.kv.arena import Arena
from libra.resources.kv.entries import Entry, Writing
from libra.resources.kv.layout import KVLayout
from libra.resources.kv.move import load, stage
from libra.resources.kv.segment import format_segment

DEGREES = [1, 2, 4, 8]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_gather_and_scatter_equal_numpy_indexing(data: st.DataObject) -> None:
    """Any sizes and gaps: pages that streaming stores cannot take whole, heads and blocks with padding between them."""
    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    layers, pool, heads, gap = pick(1, 3), pick(1, 8), pick(1, 3), pick(0, 2)
    page, slack, rows = data.draw(st.sampled_from([1, 63, 64, 256, 511, 512, 1000, 4096])), pick(0, 70), pick(0, pool)
    rng = np.random.default_rng(pick(0, 2**32))
    whole = [rng.integers(0, 256, (pool, heads + gap, page + 16 * gap), np.uint8) for _ in range(layers)]
    tensors = [array[:, :heads, :page] for array in whole]
    extents = rng.integers(0, 256, (rows * heads + pick(0, 3), layers * page + slack), np.uint8)
    blocks, table = rng.permutation(pool)[:rows], rng.permutation(len(extents))[: rows * heads].reshape(rows, heads)
    threads, streaming = pick(0, 5), data.draw(st.booleans())
    expected_extents, expected_whole = extents.copy(), [array.copy() for array in whole]

    if data.draw(st.booleans()):
        moved = gather_pages(PagedCache(tensors), blocks, extents, table.astype(np.uint32), threads, streaming)
        for layer, tensor in enumerate(tensors):
            expected_extents[:, layer * page : (layer + 1) * page][table] = tensor[blocks]
    else:
        moved = scatter_pages(PagedCache(tensors), blocks, extents, table.astype(np.uint32), threads, streaming)
        for layer, array in enumerate(expected_whole):
            array[:, :heads, :page][blocks] = extents[:, layer * page : (layer + 1) * page][table]

    assert moved == rows * heads * layers * page
    assert (extents == expected_extents).all()
    assert all((left == right).all() for left, right in zip(whole, expected_whole, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 100), st.integers(0, 100), st.integers(1, 4), st.booleans())
def test_a_contiguous_copy_is_a_copy(n: int, source_from: int, target_from: int, threads: int, streaming: bool) -> None:
    source, target = np.random.default_rng(n).integers(0, 256, n + 100, np.uint8), np.zeros(n + 100, np.uint8)
    copy_bytes(target[target_from : target_from + n], source[source_from : source_from + n], threads, streaming)
    assert (target[target_from : target_from + n] == source[source_from : source_from + n]).all()
    assert not target[:target_from].any() and not target[target_from + n :].any()


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("target_tp", DEGREES)
@pytest.mark.parametrize("source_tp", DEGREES)
def test_kv_staged_at_one_degree_loads_at_any_other(kv_heads: int, source_tp: int, target_tp: int) -> None:
    """The KV that every rank gets, replicas of a head included, is what it would have computed itself."""
    source = KVLayout("float16", 3, kv_heads, head_dim=8, block_size=8, tp=source_tp, page_format="test")
    target = source.at_tp(target_tp)
    rng = np.random.default_rng(kv_heads + 10 * source_tp + 100 * target_tp)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arena"
        format_segment(path, source, 3 << 20, slots=4)
        with Arena(path, writable=True) as writer, Arena(path) as reader:
            for tokens in (rng.integers(0, 99, n).astype(np.int32) for n in (1, 8, 8 * 5 + 3)):
                computed, loaded = Engine(source, pool=9, seed=1), Engine(target, pool=9, seed=2)
                blocks = computed.blocks(len(tokens))
                computed.prefill(tokens, blocks)
                writing = writer.begin(f"g0m{len(tokens)}", 0, tokens)
                assert isinstance(writing, Writing)
                moved = [stage(writing, computed.cache(rank), blocks, source, rank) for rank in range(source_tp)]
                assert sum(moved) == len(blocks) * kv_heads * 3 * source.page_bytes, "each head is staged once"
                assert writing.publish()

                entry = reader.find(f"g0m{len(tokens)}", 0, tokens, target)
                assert isinstance(entry, Entry) and entry.matched == len(tokens)
                blocks = loaded.blocks(len(tokens))
                untouched = np.setdiff1d(np.arange(9), blocks)
                before = loaded.kv(untouched) if target.replicas == 1 else None
                assert all(load(reader, entry, loaded.cache(r), blocks, target, r) for r in range(target_tp))
                assert (loaded.kv(blocks) == kv_of(tokens, source)).all()
                assert before is None or (loaded.kv(untouched) == before).all()
