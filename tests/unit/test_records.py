"""A request's record, from its turns."""

from __future__ import annotations

from dataclasses import replace

from libra.resources.types import Migration, RequestRecord, Served
from libra.resources.types.request import totals


def test_integrals_of_a_two_turn_request() -> None:
    record = RequestRecord.from_turns("g0m0", 10, [(4, 6, 1.5), (2, 0, 0.0)], domain="math")
    assert (record.context, record.generated, record.tool, record.turns) == (22, 6, 6, 2)
    assert record.tool_seconds == 1.5
    assert record.kvint == 10 + 11 + 12 + 13 + 20 + 21
    assert record.prefilled == 16
    assert record.prefill_pairs == 50 + 6 * (14 + 3)


def test_a_migration_tells_its_outcome_beside_both_estimates_in_one_line() -> None:
    fetched = Migration("fetch", "a", "b", 90, 9_000, 0.25, fetching=0.2, prefilling=1.5)
    assert (fetched.expected, replace(fetched, way="prefill").expected) == (0.2, 1.5)
    assert str(fetched) == (
        "fetch of 90 tokens (9000 B) from a to b took 0.2500 s; estimates: bringing it 0.2000 s, computing it 1.5000 s"
    )
    assert "bringing it unknown" in str(replace(fetched, fetching=None))


def test_totals_add_up_over_records() -> None:
    move = Migration("load", "a", "b", 8, 800, 0.5)
    first = Served(4, 10, 0, "a", 1, "stop", 0.0, 3.0, 1.0, 0)
    second = Served(2, 20, 14, "b", 2, "stop", 4.0, 5.0, 0.0, 0, move)
    records = [RequestRecord.of("g0m0", 10, [first, second], []), RequestRecord.of("g0m1", 10, [first], [])]
    assert totals(records) == {
        "queue_seconds": 2.0,
        "tool_seconds": 0,
        "residence": {"1": 4.0, "2": 1.0},
        "kvint": 2 * (10 + 11 + 12 + 13) + 20 + 21,
        "prefilled": 10 + 6 + 10,
        "migrations": 1,
        "migration_bytes": 800,
        "migration_seconds": 0.5,
    }
