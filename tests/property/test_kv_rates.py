"""Fetching KV or computing it: whatever the link does, probes cost little and a link that recovers is used again."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from libra.tasks.kv_fetch import PROBING, Rates

TOKENS, BYTES = 1000, 10**6
COMPUTING = 1.0
SLOWDOWNS = st.floats(1.01, 1000.0)


def measured(fetching: float) -> Rates:
    """An instance where one fetch of `BYTES` took ``fetching`` and `TOKENS` are computed in `COMPUTING` seconds."""
    rates = Rates()
    assert rates.choose(BYTES, TOKENS).fetch  # never measured: tried
    rates.fetched(BYTES, fetching)
    rates.prefilled(TOKENS, COMPUTING)
    return rates


@given(SLOWDOWNS, st.lists(st.floats(0.01, 50.0), max_size=300))
def test_probes_cost_at_most_their_share_of_the_time_spent_computing(slow: float, sizes: list[float]) -> None:
    """A link that stays slow, and moves of any size."""
    rates, computing, beyond = measured(slow * COMPUTING), 0.0, 0.0
    for size in sizes:
        tokens = max(1, int(size * TOKENS))
        choice = rates.choose(tokens * BYTES // TOKENS, tokens)
        assert choice.prefilling is not None
        assert choice.fetching is not None
        assert choice.fetch == choice.probe
        computing += choice.prefilling
        if choice.probe:
            beyond += choice.fetching - choice.prefilling
            rates.fetched(tokens * BYTES // TOKENS, choice.fetching)
        else:
            rates.prefilled(tokens, choice.prefilling)
    assert beyond <= PROBING * computing * (1 + 1e-9)


@given(SLOWDOWNS, st.floats(0.001, 0.99))
def test_a_link_that_recovers_is_used_again(slow: float, recovered: float) -> None:
    """After as many moves as the rule says, and from then on."""
    rates = measured(slow * COMPUTING)
    moves = 1
    while not (choice := rates.choose(BYTES, TOKENS)).fetch:
        rates.prefilled(TOKENS, COMPUTING)
        moves += 1
    assert choice.probe
    assert abs(moves - math.ceil((slow - 1) / PROBING)) <= 1
    for _ in range(20):
        rates.fetched(BYTES, recovered * COMPUTING)
        again = rates.choose(BYTES, TOKENS)
        assert (again.fetch, again.probe) == (True, False)


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.booleans()), max_size=200))
def test_the_same_measurements_give_the_same_choices(told: list[tuple[float, bool]]) -> None:
    one, other = measured(2.0), measured(2.0)
    for seconds, link in told:
        for rates in (one, other):
            if link:
                rates.fetched(BYTES, seconds)
            else:
                rates.prefilled(TOKENS, seconds)
        assert one.choose(BYTES, TOKENS) == other.choose(BYTES, TOKENS)
