"""1F1B of unequal micro-batches: against a plain oracle, and the textbook formula when they are equal."""

from __future__ import annotations

import numpy as np
import pytest

from libra.native.pipeline import PassCost, StageCosts, TrainBatch, forward_only, one_f_one_b


def stages(count: int, send: float = 0.0) -> StageCosts:
    forward, backward = PassCost(0.0, 1.0), PassCost(0.0, 2.0)
    return StageCosts(count, forward, backward, forward, backward, PassCost(send))


def oracle(tokens: list[float], costs: StageCosts) -> float:
    """Runs each stage's operations in 1F1B order, each at the first moment that its inputs are there."""
    p, m = costs.stages, len(tokens)
    order = []
    for s in range(p):
        warm = min(p - s - 1, m)
        ops = [("f", j) for j in range(warm)]
        for i in range(m - warm):
            ops += [("f", warm + i), ("b", i)]
        order.append(ops + [("b", j) for j in range(m - warm, m)])
    end: dict[tuple[str, int, int], float] = {}
    free = [0.0] * p
    while any(order):
        for s in range(p):
            while order[s]:
                kind, j = order[s][0]
                before = (kind, s - 1, j) if kind == "f" else (kind, s + 1, j)
                edge = s == 0 if kind == "f" else s == p - 1
                if not edge and before not in end:
                    break
                ready = 0.0 if edge else end[before] + costs.send.seconds(tokens[j], tokens[j] ** 2)
                last = s == p - 1
                cost = {
                    ("f", False): costs.forward, ("f", True): costs.last_forward,
                    ("b", False): costs.backward, ("b", True): costs.last_backward,
                }[kind, last]  # fmt: skip
                free[s] = max(free[s], ready) + cost.seconds(tokens[j], tokens[j] ** 2)
                end[kind, s, j] = free[s]
                order[s].pop(0)
    return max(free)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 20])
def test_equal_micro_batches_take_m_plus_p_minus_1(count: int, m: int) -> None:
    tokens = np.full(m, 2.0)
    assert one_f_one_b(tokens, tokens**2, stages(count)) == pytest.approx((m + count - 1) * 6.0)
    assert forward_only(tokens, tokens**2, stages(count)) == pytest.approx((m + count - 1) * 2.0)


@pytest.mark.parametrize("seed", range(30))
def test_unequal_micro_batches_equal_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = StageCosts(
        int(rng.integers(1, 9)), PassCost(0.1, 1.0, 0.01), PassCost(0.2, 2.0, 0.02), PassCost(0.1, 1.3, 0.01),
        PassCost(0.2, 2.6, 0.02), PassCost(0.05, 0.03),
    )  # fmt: skip
    tokens = rng.lognormal(1.0, 0.8, int(rng.integers(1, 25)))
    assert one_f_one_b(tokens, tokens**2, costs) == oracle(list(tokens), costs)


def test_unequal_micro_batches_cost_more_than_their_mean() -> None:
    tokens = np.random.default_rng(0).lognormal(1.0, 1.0, 64)
    mean = np.full(64, tokens.mean())
    assert one_f_one_b(tokens, tokens**2, stages(8)) > 1.2 * one_f_one_b(mean, mean**2, stages(8))


def test_sequences_are_dealt_longest_first_to_the_least_loaded() -> None:
    batch = TrainBatch(np.array([5.0, 1.0, 4.0, 2.0, 3.0]), 0.0)
    assert batch.dealt(2) == [[5.0, 2.0, 1.0], [4.0, 3.0]]
    assert batch.seconds(2, 1, stages(1).coefficients())[0] == 3 * 8.0


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="needs sequences"):
        TrainBatch(np.array([]), 0.0)
