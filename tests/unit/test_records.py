"""A request's record, from its turns."""

from __future__ import annotations

import pytest

from libra.resources.types import RequestRecord


def test_integrals_of_a_two_turn_request() -> None:
    record = RequestRecord.from_turns("g0m0", 10, [(4, 6, 1.5), (2, 0, 0.0)], domain="math")
    assert (record.context, record.generated, record.tool_tokens, record.turns) == (22, 6, 6, 2)
    assert record.tool_seconds == 1.5
    assert record.kvint == 4 * 10 + 8 + 2 * 20 + 2
    assert record.prefill_tokens == 16
    assert record.prefill_pairs == 50 + 6 * (14 + 3)


def test_the_integral_is_the_sum_of_contexts_up_to_half_a_token_each() -> None:
    record = RequestRecord.from_turns("g0m0", 100, [(50, 0, 0.0)])
    exact = sum(range(100, 150))
    assert record.kvint == pytest.approx(exact + 50 / 2)
