"""What `libra profile` asks for and how it prices prefills, without an engine; and the clock of another process."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.pipeline.config import load_config
from libra.pipeline.profile.engine import Prefilled
from libra.pipeline.profile.measure import default_grid, prefill_points
from libra.pipeline.profile.meter import meter, pin
from libra.resources.calibration import DecodePoint
from libra.resources.errors import ConfigError

GRID = default_grid(load_config("quickstart"))
DECODE = [DecodePoint(1, b, b * c, 0.004 + 1e-4 * b + 1e-7 * b * c) for b in (1, 4, 16) for c in (10, 100, 500)]


@given(st.integers(1, 2000), st.integers(1, 64))
def test_lengths_around_a_value_have_it_as_their_mean(value: int, count: int) -> None:
    lengths = GRID.around(value, count)
    assert len(lengths) == count
    assert min(lengths) >= 1
    assert max(lengths) <= value * (1 + GRID.spread) + 1
    assert fmean(lengths) == pytest.approx(value, abs=1)


def test_a_prefill_costs_what_it_adds_to_its_steps() -> None:
    (point,) = prefill_points([Prefilled(tokens=100, context=50, requests=4, steps=2, seconds=0.108)], DECODE)
    assert (point.tokens, point.context) == (100, 50)
    assert point.seconds == pytest.approx((0.108 - 2 * 0.004) / 4)


def test_a_prefill_never_costs_nothing() -> None:
    (point,) = prefill_points([Prefilled(tokens=1, context=0, requests=4, steps=1, seconds=0.004)], DECODE)
    assert point.seconds == pytest.approx(0.05 * 0.004 / 4)


def test_the_clock_of_a_process_counts_its_work_only() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.readline(); sum(range(10**6)); print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        core = min(os.sched_getaffinity(0))
        pin(child.pid, core)
        assert os.sched_getaffinity(child.pid) == {core}
        read = meter(child.pid, "cpu")
        before = read()
        sum(range(10**6))  # our own work
        assert read() - before < 0.5
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert read() > before
    finally:
        child.kill()
        child.wait(10)
    with pytest.raises(OSError, match="has no CPU clock"):
        meter(child.pid, "cpu")


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (
            {"length": (60, 120, 200), "rows": (4,)},
            r"length × rows × micro_batch_tokens is 3 point\(s\), the fit needs 4",
        ),
        ({"batch": (1, 2), "context": (20,)}, r"batch × context is 2 point\(s\), the fit needs 3"),
        ({"prefill": (8, 64), "reused": (0,)}, r"prefill × reused is 2 point\(s\), the fit needs 3"),
    ],
)
def test_a_grid_too_small_to_fit_is_refused_before_anything_is_measured(chosen: dict[str, Any], says: str) -> None:
    config = load_config("quickstart")
    with pytest.raises(ConfigError, match=says):
        default_grid(config, **chosen).check(config)
