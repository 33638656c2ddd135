"""Rollout costs: monotone under interval shrink, never below the longest request, and native equal to plain Python."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import records

from libra.native.partition import PartitionSolver, Piece
from libra.resources.calibration import load_profile
from libra.resources.cost_model import Requests, RolloutCosts, partition_solver
from libra.resources.cost_model.rollout import QueueModel, set_seconds
from libra.resources.specs import load_hardware, load_model

A800 = load_hardware("a800_80g")
COSTS = RolloutCosts.from_specs(load_model("Qwen3-14B"), A800, slots=64)
REQUESTS = Requests.from_records(records(400, seed=3))
PUBLISHED = load_profile("a800_published").rollout_costs()
assert PUBLISHED is not None
BASES = {
    "14B": COSTS,
    "0.6B": RolloutCosts.from_specs(load_model("Qwen3-0.6B"), A800),
    "mixture": RolloutCosts.from_specs(load_model("Qwen3-30B-A3B"), A800, slots=64),
    "published profile": PUBLISHED,
}
QUEUES = st.builds(
    QueueModel, path=st.floats(0.5, 1.5), work=st.floats(0.5, 1.5), wave=st.floats(0, 2), rework=st.floats(0, 2),
    overlap=st.sampled_from([1.0, 2.0, 5.0]),
)  # fmt: skip


@st.composite
def intervals(draw: st.DrawFn) -> tuple[RolloutCosts, PartitionSolver, Piece]:
    """Costs with a fitted queue or the default one, their solver over `REQUESTS`, and an interval on one level."""
    base = BASES[draw(st.sampled_from(list(BASES)))]
    costs = replace(base, queue=draw(st.one_of(st.just(base.queue), QUEUES)))
    first = draw(st.integers(0, 399))
    last = draw(st.integers(first + 1, 400))
    return costs, partition_solver(REQUESTS, costs), Piece(draw(st.integers(0, len(costs.steps) - 1)), first, last)


@given(intervals(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_smaller_interval_never_costs_more(
    case: tuple[RolloutCosts, PartitionSolver, Piece], data: st.DataObject
) -> None:
    _, solver, piece = case
    first = data.draw(st.integers(piece.first, piece.last - 1))
    inner = Piece(piece.level, first, data.draw(st.integers(first + 1, piece.last)))
    # Sums of prefixes: an inner interval may differ in the last bits.
    assert solver.cost(inner) <= solver.cost(piece) * (1 + 1e-12)


@given(intervals())
@settings(max_examples=200, deadline=None)
def test_no_instance_ends_before_its_longest_request(case: tuple[RolloutCosts, PartitionSolver, Piece]) -> None:
    """A batch's makespan is at or above its longest request alone. With k batches in flight a request may take k
    periods, so a period is at or above the longest request alone over k."""
    costs, solver, piece = case
    step = costs.steps[piece.level]
    mine = REQUESTS.take(slice(piece.first, piece.last))
    # What one request cannot do without, whatever runs beside it: its decode steps and its tools, one after another.
    alone = step.step * mine.generated + mine.tool_seconds
    assert solver.cost(piece) >= alone.max() / costs.queue.overlap
    if costs.queue.overlap == 1:
        assert solver.cost(piece) >= alone.max()


@given(intervals())
@settings(max_examples=200, deadline=None)
def test_native_costs_equal_the_plain_formula(case: tuple[RolloutCosts, PartitionSolver, Piece]) -> None:
    costs, solver, piece = case
    mine = REQUESTS.take(slice(piece.first, piece.last))
    plain = set_seconds(mine, costs.steps[piece.level], costs.queue)
    assert solver.cost(piece) == pytest.approx(plain, rel=1e-9)


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
