"""Rollout costs: monotone under interval shrink, never below the longest request, and native equal to plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import records

from libra.native.partition import Piece
from libra.resources.cost_model import Requests, RolloutCosts, partition_solver
from libra.resources.cost_model.rollout import request_columns, set_seconds
from libra.resources.specs import load_hardware, load_model

COSTS = RolloutCosts.from_specs(load_model("Qwen3-14B"), load_hardware("a800_80g"), slots=64)
REQUESTS = Requests.from_records(records(400, seed=3))
SOLVER = partition_solver(REQUESTS, COSTS)


@given(st.integers(0, 3), st.integers(0, 399), st.integers(1, 400), st.integers(0, 50), st.integers(0, 50))
@settings(max_examples=400, deadline=None)
def test_a_smaller_interval_never_costs_more(level: int, first: int, size: int, off_left: int, off_right: int) -> None:
    last = min(400, first + size)
    inner = (min(first + off_left, last - 1), max(last - off_right, first + 1))
    if inner[0] >= inner[1]:
        return
    assert SOLVER.cost(Piece(level, *inner)) <= SOLVER.cost(Piece(level, first, last))


@given(st.integers(0, 3), st.integers(0, 399), st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_no_instance_ends_before_its_longest_request(level: int, first: int, size: int) -> None:
    last = min(400, first + size)
    _, _, alone = request_columns(REQUESTS, COSTS.steps[level], COSTS.queue)
    assert SOLVER.cost(Piece(level, first, last)) >= alone[first:last].max()


@given(st.integers(0, 3), st.integers(0, 399), st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_native_costs_equal_the_plain_formula(level: int, first: int, size: int) -> None:
    last = min(400, first + size)
    plain = set_seconds(REQUESTS.take(slice(first, last)), COSTS.steps[level], COSTS.queue)
    assert SOLVER.cost(Piece(level, first, last)) == pytest.approx(plain, rel=1e-9)


def test_one_request_takes_at_least_its_steps_times_the_step_time() -> None:
    # 30,000 generated tokens at TP 8 cannot take less than 30,000 weight streams.
    alone = Requests.from_lengths([30_512.0])
    for step in COSTS.steps:
        assert set_seconds(alone, step, COSTS.queue) > 30_000 * step.step


def test_decode_is_bound_by_weights_divided_once_by_tp() -> None:
    one, eight = COSTS.of(1), COSTS.of(8)
    assert one.token / eight.token == pytest.approx(8)  # and not 64
    assert 1 < one.step / eight.step < 8


def test_capacity_counts_each_devices_share_once() -> None:
    # Bytes of one device, not of all, against KV bytes of one device.
    model, hardware = load_model("Qwen3-14B"), load_hardware("a800_80g")
    free = 8 * (0.9 * hardware.memory - hardware.workspace) - model.weight_bytes
    assert COSTS.of(8).capacity == pytest.approx(free / model.kv_bytes_per_token)


def test_heads_that_are_replicated_take_room() -> None:
    moe = RolloutCosts.from_specs(load_model("Qwen3-30B-A3B"), load_hardware("a800_80g"))
    assert moe.of(8).capacity < 1.2 * moe.of(4).capacity  # 4 KV heads: the other 4 ranks repeat them


def test_prefill_is_linear_and_quadratic() -> None:
    step = COSTS.of(1)
    short, long = step.prefill_seconds(1000), step.prefill_seconds(32_000)
    assert long > 32 * (short - step.admission)
    assert step.prefill_seconds(1000, context=30_000) > short


def test_decode_integrates_growth() -> None:
    step = COSTS.of(2)
    stepwise = sum(step.decode_seconds(4, 1000 + 4 * k) for k in range(100))
    assert step.decode_seconds(4, 1000, steps=100) == pytest.approx(stepwise)


def test_queueing_near_the_limit_costs_more_than_without() -> None:
    crowded = Requests.from_lengths(np.full(200, 20_000.0))
    step = COSTS.of(1)
    roomy = type(step)(**{f: getattr(step, f) for f in step.__slots__} | {"capacity": 1e9, "slots": 10_000})
    assert set_seconds(crowded, step, COSTS.queue) > 1.1 * set_seconds(crowded, roomy, COSTS.queue)
