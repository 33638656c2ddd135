"""Pages of a KV layout, and which of them a rank holds and stages."""

from __future__ import annotations

import pytest

from libra.resources.errors import KVError
from libra.resources.kv.layout import KVLayout

QWEN3_14B = KVLayout("bfloat16", layers=40, kv_heads=8, head_dim=128, block_size=32, tp=1, page_format="test")


def test_sizes_of_a_14b_model() -> None:
    assert QWEN3_14B.page_bytes == 16384
    assert QWEN3_14B.extent_bytes == 40 * 16384
    assert QWEN3_14B.bytes_per_token == 163_840
    assert [QWEN3_14B.blocks(tokens) for tokens in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_heads_are_dealt_in_order() -> None:
    assert [list(QWEN3_14B.at_tp(4).held(rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_with_more_ranks_than_heads_each_head_is_held_by_several_and_staged_by_one() -> None:
    layout = KVLayout("float16", 2, kv_heads=2, head_dim=8, block_size=16, tp=8, page_format="test")
    assert [list(layout.held(rank)) for rank in range(8)] == [[0]] * 4 + [[1]] * 4
    assert [list(layout.staged(rank)) for rank in range(8)] == [[0], [], [], [], [1], [], [], []]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_head_is_staged_once_and_by_a_rank_that_holds_it(heads: int, tp: int) -> None:
    try:
        layout = KVLayout("float32", 1, heads, 8, 16, tp, "test")
    except KVError as error:
        assert f"{heads} KV heads cannot be dealt to {tp} ranks" in str(error)
        assert heads % tp and tp % heads
        return
    staged = [head for rank in range(tp) for head in layout.staged(rank)]
    assert staged == list(range(heads))
    assert all(set(layout.staged(rank)) <= set(layout.held(rank)) for rank in range(tp))
    assert {head for rank in range(tp) for head in layout.held(rank)} == set(range(heads))


def test_only_the_degree_may_differ() -> None:
    assert QWEN3_14B.differs(QWEN3_14B.at_tp(8)) is None
    other = KVLayout("bfloat16", 40, 8, 128, 16, 2, "test")
    assert QWEN3_14B.differs(other) == "block_size 32 is not 16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int4"}, "KV of type 'int4' cannot be staged; it must be one of float32, float16, bfloat16"),
        ({"layers": 0}, "layers = 0"),
        ({"tp": 3}, "8 KV heads cannot be dealt to 3 ranks"),
    ],
)
def test_contradictions_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(KVError, match=message):
        KVLayout(**{**QWEN3_14B.to_json(), **change})


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(KVError, match="rank 2 of a layout of 2 ranks"):
        QWEN3_14B.at_tp(2).held(2)


def test_json_round_trip() -> None:
    assert KVLayout(**QWEN3_14B.to_json()) == QWEN3_14B
