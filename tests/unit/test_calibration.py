"""Calibration: fits that outliers do not bend, profiles that keep their provenance, corrections that follow and
forget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from workloads import records

from libra.resources.calibration import (
    Correction,
    DecodePoint,
    PrefillPoint,
    Profile,
    Provenance,
    TrainPoint,
    fit_relative,
    fit_rollout,
    fit_training,
    load_profile,
    save_profile,
)
from libra.resources.calibration.profile import step_entry
from libra.resources.calibration.regression import non_negative
from libra.resources.cost_model import RolloutCosts, TrainingCosts
from libra.resources.errors import ConfigError
from libra.resources.inventory import uniform
from libra.resources.specs import load_hardware, load_model
from libra.resources.specs.files import shipped
from libra.resources.types import TrainStrategy
from libra.scheduler_plugin.planner import Planner
from libra.scheduler_plugin.planner.planner import Profiles

A800, QWEN = load_hardware("a800_80g"), load_model("Qwen3-0.6B")


def decode_points(noise: float, outliers: float, seed: int = 0) -> list[DecodePoint]:
    rng = np.random.default_rng(seed)
    true = RolloutCosts.from_specs(QWEN, A800).of(1)
    found = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        for context in (128, 1024, 4096, 16384):
            seconds = true.decode_seconds(batch, batch * context) * float(np.exp(rng.normal(0, noise)))
            if rng.random() < outliers:
                seconds *= 5.0
            found.append(DecodePoint(1, batch, batch * context, seconds))
    return found


def prefill_points() -> list[PrefillPoint]:
    true = RolloutCosts.from_specs(QWEN, A800).of(1)
    grid = [(n, c) for n in (64, 512, 2048, 8192) for c in (0, 4096)]
    return [PrefillPoint(1, n, c, true.prefill_seconds(n, c)) for n, c in grid]


def test_a_fit_finds_the_costs_through_noise_and_outliers() -> None:
    true = RolloutCosts.from_specs(QWEN, A800).of(1)
    (step,), fits = fit_rollout(decode_points(0.02, 0.1), prefill_points(), {1: true.capacity}, 256)
    assert step.step == pytest.approx(true.step, rel=0.05)
    assert step.token == pytest.approx(true.token, rel=0.05)
    assert step.prefill_pair == pytest.approx(true.prefill_pair, rel=0.02)
    assert fits["prefill tp1"].held_out < 0.01


def test_an_ordinary_fit_would_have_been_bent() -> None:
    points = decode_points(0.02, 0.1)
    columns = np.array([(1.0, p.batch, p.resident) for p in points])
    seconds = np.array([p.seconds for p in points])
    plain = np.linalg.lstsq(columns / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
    robust = fit_relative(columns, seconds).coefficients
    true = RolloutCosts.from_specs(QWEN, A800).of(1)
    assert abs(robust[0] / true.step - 1) < abs(plain[0] / true.step - 1)


def test_held_out_errors_are_of_points_not_seen() -> None:
    rng = np.random.default_rng(1)
    columns = rng.uniform(0.1, 1.0, (8, 7))
    fit = fit_relative(columns, rng.uniform(1, 2, 8))
    assert fit.held_out > fit.mape  # 7 coefficients for 8 points: nothing left to learn from


@pytest.mark.parametrize("seed", range(20))
def test_non_negative_fits_are_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(30, 4)), rng.normal(size=30)
    x = non_negative(a, b)
    assert (x >= 0).all()
    gradient = a.T @ (a @ x - b)
    assert (gradient[x == 0] >= -1e-9).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-9


@pytest.mark.parametrize(
    ("columns", "seconds", "says"),
    [(np.ones((1, 3)), np.ones(1), "1 measurements cannot fit 3"), (np.ones((3, 1)), np.zeros(3), "not positive")],
)
def test_bad_measurements_are_refused(columns: np.ndarray, seconds: np.ndarray, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fit_relative(columns, seconds)


def test_a_degree_without_prefill_points_is_refused() -> None:
    with pytest.raises(ConfigError, match="TP 1 has 28 decode measurements and no prefill ones"):
        fit_rollout(decode_points(0, 0), [], {1: 1.0}, 8)


def test_training_factors_are_found() -> None:
    rng = np.random.default_rng(0)
    costs = TrainingCosts(QWEN, A800, np.array([1000.0]))
    slow = replace(costs, factors=replace(costs.factors, linear=2.0, quadratic=3.0, constant=1.5, fixed_seconds=0.4))
    points = []
    for count in (4, 16, 64):
        for mean in (200, 2000, 12_000):
            lengths = tuple(int(x) for x in rng.lognormal(np.log(mean), 0.5, count))
            one = replace(slow, lengths=np.array(lengths, float))
            predicted = one.predict(TrainStrategy(1, 1, 1, 1, 1))
            points.append(TrainPoint(lengths, 1, predicted.passes + predicted.logprobs + predicted.fixed))
    factors, fit = fit_training(points, costs)
    assert factors.quadratic == pytest.approx(3.0, rel=0.15)
    assert factors.linear == pytest.approx(2.0, rel=0.15)
    assert fit.held_out < 0.05


def test_a_profile_reads_back_equal(tmp_path: Path) -> None:
    steps = RolloutCosts.from_specs(QWEN, A800).steps
    where = Provenance(
        status="measured", source="torch engine", machine="2 cores", date="2026-09-01", versions={"torch": "2.13.0"},
        grid={"batch": [1, 2]}, residuals={"decode tp1 held-out": 0.03},
    )  # fmt: skip
    profile = Profile(
        name="mine", model="Qwen3-0.6B", hardware="a800_80g", provenance=where,
        rollout=tuple(step_entry(step) for step in steps),
    )  # fmt: skip
    save_profile(profile, tmp_path / "mine.yaml")
    again = load_profile(tmp_path / "mine.yaml")
    assert again == profile
    costs = again.rollout_costs()
    assert costs is not None
    assert costs.steps == steps
    assert "measured (mine: torch engine" in costs.provenance


@pytest.mark.parametrize("name", shipped("profiles"))
def test_shipped_profiles_load_and_name_existing_specs(name: str) -> None:
    profile = load_profile(name)
    assert load_model(profile.model).name == profile.model
    assert load_hardware(profile.hardware).name == profile.hardware


def test_the_published_table_is_marked_as_such_in_plans() -> None:
    profile = load_profile("a800_published")
    assert profile.provenance.status == "published"
    assert [t.tokens_per_s_per_gpu for t in profile.throughput] == [1852, 591, 430, 1220]
    costs = profile.rollout_costs()
    assert costs is not None
    planner = Planner(load_model("Qwen3-14B"), uniform(A800, 32), profiles=Profiles(rollout={"a800_80g": costs}))
    assert planner.plan(records(200)).provenance.startswith("published (a800_published")


def test_the_published_table_says_which_rows_are_interpolated_and_which_columns_derived() -> None:
    profile = load_profile("a800_published")
    provenance = profile.provenance
    assert "paper" in provenance.source
    derived = RolloutCosts.from_specs(load_model(profile.model), load_hardware(profile.hardware), slots=512)
    for column in provenance.derived:
        for row in profile.rollout:
            name = {"capacity_tokens": "capacity"}.get(column, column.removesuffix("_s"))
            assert getattr(row, column) == pytest.approx(getattr(derived.of(row.tp), name), rel=1e-3), (column, row.tp)
    rows = {f"tp{row.tp}": row for row in profile.rollout}
    assert set(rows) == {*provenance.interpolated, *provenance.fitted}
    for column in ("step_s", "token_s"):
        factor = [
            getattr(row, column) / getattr(derived.of(row.tp), column.removesuffix("_s")) for row in profile.rollout
        ]
        assert factor == pytest.approx(np.geomspace(factor[0], factor[-1], len(factor)), rel=1e-3)


def test_a_correction_follows_a_bias_and_ignores_one_wild_value() -> None:
    correction = Correction()
    rng = np.random.default_rng(0)
    for _ in range(60):
        correction.observe(1.0, 1.3 * float(np.exp(rng.normal(0, 0.03))))
    assert correction.factor == pytest.approx(1.3, rel=0.03)
    before = correction.factor
    correction.observe(1.0, 100.0)
    assert correction.factor <= before * np.exp(0.1) * (1 + 1e-9)


def test_a_lasting_change_resets_the_correction() -> None:
    correction = Correction()
    for _ in range(50):
        correction.observe(1.0, 1.0)
    changed = [correction.observe(1.0, 2.0) for _ in range(8)]
    assert sum(changed) == 1
    assert correction.factor == pytest.approx(2.0, rel=0.05)


def test_noise_alone_does_not_reset() -> None:
    correction = Correction()
    rng = np.random.default_rng(3)
    for _ in range(2000):
        correction.observe(1.0, float(np.exp(rng.normal(0, 0.05))))
    assert correction.resets == 0


def test_the_factor_is_bounded() -> None:
    correction = Correction()
    for _ in range(500):
        correction.observe(1.0, 1e6)
    assert correction.factor <= 4.0 * (1 + 1e-9)
