"""The exact solver: bitwise equal to a naive dynamic programme over (TP level, GPUs, requests) on random instances."""

from __future__ import annotations

import numpy as np
import pytest

from libra.native.partition import PartitionSolver, Piece

INFINITY = float("inf")
TPS = (1, 2, 4, 8)


def instance(seed: int) -> tuple[PartitionSolver, int, int]:
    """A random instance: the solver, its number of requests, and a budget."""
    rng = np.random.default_rng(seed)
    n, budget = int(rng.integers(1, 22)), int(rng.integers(1, 17))
    context = np.sort(rng.lognormal(8, 1, n))
    if rng.random() < 0.3:
        context = np.sort(rng.choice(context, n))  # ties
    generated = context * rng.uniform(0.2, 0.9, n)
    kv = generated * context * 0.6
    levels, work, path, alone = [], [], [], []
    for tp in TPS:
        step = 0.02 / tp**0.5 + 0.002
        capacity = context.max() * rng.uniform(0.3, 4.0) * tp
        levels.append([tp, step, 1 / capacity, capacity, 1 / rng.integers(2, 64), 1e-4 / tp])
        shared = generated * 1e-3 / tp**0.7 + kv * 2e-7 / tp
        tools = rng.exponential(2.0, n)
        work.append(shared)
        path.append(step * generated + tools)
        alone.append(path[-1] + shared)
    arrays = (np.ascontiguousarray(a, np.float64) for a in (context, kv, generated, work, path, alone, levels))
    return PartitionSolver(*arrays, wave=rng.uniform(0, 1), path_share=rng.uniform(0.8, 1.1)), n, budget


def naive(solver: PartitionSolver, n: int, budget: int) -> float:
    """dp[l][g][i]: the least makespan of the first i requests on g GPUs with levels up to l, in ascending order."""
    below = [[0.0 if i == 0 else INFINITY for i in range(n + 1)] for _ in range(budget + 1)]
    for level, tp in enumerate(TPS):
        costs = {(k, i): solver.cost(Piece(level, k, i)) for k in range(n) for i in range(k + 1, n + 1)}
        table = [row[:] for row in below]
        for g in range(tp, budget + 1):
            for i in range(1, n + 1):
                options = (max(table[g - tp][k], costs[k, i]) for k in range(i))
                table[g][i] = min(table[g][i], *options)
        below = table
        for g in range(1, budget + 1):
            below[g] = [min(a, b) for a, b in zip(below[g], below[g - 1], strict=True)]
    return below[budget][n]


@pytest.mark.parametrize("block", range(10))
def test_500_random_instances_equal_the_oracle_bit_for_bit(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        solver, n, budget = instance(seed)
        assert solver.solve(budget).seconds == naive(solver, n, budget), f"seed {seed}"


@pytest.mark.parametrize("seed", range(100))
def test_the_pieces_are_a_packing_that_has_the_makespan(seed: int) -> None:
    solver, n, budget = instance(seed)
    solution = solver.solve(budget)
    if solution.seconds == INFINITY:
        assert not solution.pieces
        return
    assert [p.first for p in solution.pieces] == [0, *(p.last for p in solution.pieces[:-1])]
    assert solution.pieces[-1].last == n
    assert sum(TPS[p.level] for p in solution.pieces) <= budget
    levels = [p.level for p in solution.pieces]
    assert levels == sorted(levels)
    assert max(solver.cost(p) for p in solution.pieces) == solution.seconds


@pytest.mark.parametrize("seed", range(40))
def test_more_gpus_never_hurt_and_probe_agrees(seed: int) -> None:
    solver, _, _ = instance(seed)
    values = [solver.solve(g).seconds for g in range(1, 20)]
    assert values == sorted(values, reverse=True)
    best = values[-1]
    if best < INFINITY:
        probe = solver.probe(best, 19)
        assert probe.gpus <= 19
        assert probe.seconds <= best
        assert solver.probe(np.nextafter(best, 0), 19).gpus == 20


@pytest.mark.parametrize("seed", range(40))
def test_mixing_serves_every_request_once_and_within_capacity(seed: int) -> None:
    solver, n, _ = instance(seed)
    counts = (3, 2, 1, 1)
    seconds, where = solver.mix(counts)
    if seconds == INFINITY:
        return
    assert len(where) == n
    assert where.min() >= 0
    assert where.max() < sum(counts)


def test_a_budget_that_cannot_hold_the_longest_request_has_no_solution() -> None:
    one = np.array([100.0])
    levels = np.array([[1, 0.01, 1 / 50, 50.0, 1 / 8, 0.0], [2, 0.01, 1 / 200, 200.0, 1 / 8, 0.0]])
    column = np.array([[1.0], [1.0]])
    solver = PartitionSolver(one, one, one, column, column, column, levels, 0.5, 1.0)
    assert solver.solve(1).seconds == INFINITY
    assert solver.solve(2).pieces == (Piece(1, 0, 1),)
