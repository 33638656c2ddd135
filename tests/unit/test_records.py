"""A request's record, from its turns."""

from __future__ import annotations

from libra.resources.types import RequestRecord


def test_integrals_of_a_two_turn_request() -> None:
    record = RequestRecord.from_turns("g0m0", 10, [(4, 6, 1.5), (2, 0, 0.0)], domain="math")
    assert (record.context, record.generated, record.tool, record.turns) == (22, 6, 6, 2)
    assert record.tool_seconds == 1.5
    assert record.kvint == 10 + 11 + 12 + 13 + 20 + 21
    assert record.prefilled == 16
    assert record.prefill_pairs == 50 + 6 * (14 + 3)
