"""What a profiler measures, and the costs that fit it.

Invariant: a fit's columns are the terms of the cost model, so fitted costs are used exactly as derived ones are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from libra.resources.calibration.regression import Fit, fit_relative
from libra.resources.cost_model.rollout import StepCost
from libra.resources.cost_model.strategies import Strategies
from libra.resources.cost_model.training import TrainingCosts, TrainingFactors
from libra.resources.errors import ConfigError
from libra.resources.types import Recompute, TrainStrategy


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One decode step of ``batch`` sequences with ``resident`` tokens in all took ``seconds``."""

    tp: int
    batch: int
    resident: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prefill of ``tokens`` after ``context`` tokens of reused KV took ``seconds``."""

    tp: int
    tokens: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainPoint:
    """One optimizer step over sequences of ``lengths`` tokens in micro-batches of ``micro`` sequences took ``seconds``
    on one rank (tp = ep = pp = dp = 1) that recomputes activations by ``recompute``, log-prob pass included if the
    trainer makes one, weights not published."""

    lengths: tuple[int, ...]
    micro: int
    seconds: float
    recompute: Recompute = "full"

    @property
    def strategy(self) -> TrainStrategy:
        """How it was trained."""
        return TrainStrategy(1, 1, 1, 1, self.micro, self.recompute)


def fit_rollout(
    decode: Sequence[DecodePoint], prefill: Sequence[PrefillPoint], capacity: dict[int, float], slots: int
) -> tuple[tuple[StepCost, ...], dict[str, Fit]]:
    """`StepCost` of every TP degree measured, and the fits by name (``decode tp1``). ``capacity``: KV tokens a degree.
    Raises `ConfigError` when a degree has decode but no prefill points, or too few."""
    steps: list[StepCost] = []
    fits: dict[str, Fit] = {}
    for tp in sorted({p.tp for p in decode}):
        points = [p for p in decode if p.tp == tp]
        prefills = [p for p in prefill if p.tp == tp]
        if not prefills:
            raise ConfigError(f"TP {tp} has {len(points)} decode measurements and no prefill ones; measure both")
        columns = np.array([(1.0, p.batch, p.resident) for p in points])
        decoded = fit_relative(columns, np.array([p.seconds for p in points]))
        columns = np.array([(1.0, p.tokens, p.tokens * (p.context + p.tokens / 2)) for p in prefills])
        filled = fit_relative(columns, np.array([p.seconds for p in prefills]))
        a, b, c = map(float, decoded.coefficients)
        d0, d1, d2 = map(float, filled.coefficients)
        steps.append(StepCost(tp, a, b, c, d0, d1, d2, capacity[tp], slots))
        fits |= {f"decode tp{tp}": decoded, f"prefill tp{tp}": filled}
    return tuple(steps), fits


def fit_training(points: Sequence[TrainPoint], costs: TrainingCosts) -> tuple[TrainingFactors, Fit]:
    """Factors on the derived costs ``costs`` that fit measurements of one rank: on the linear part, the quadratic part,
    the cost of a micro-batch, and a fixed cost of a step (beyond the derived optimizer step)."""
    columns = np.array([_train_columns(point, costs) for point in points])
    derived = [sum(float(part[0]) for part in costs.fixed_parts(Strategies.of([p.strategy]))[:2]) for p in points]
    fit = fit_relative(columns, np.array([p.seconds for p in points]) - derived)
    linear, quadratic, constant, fixed = map(float, fit.coefficients)
    return replace(costs.factors, linear=linear, quadratic=quadratic, constant=constant, fixed_seconds=fixed), fit


def _train_columns(point: TrainPoint, costs: TrainingCosts) -> tuple[float, float, float, float]:
    """Seconds of (linear, quadratic, micro-batch) cost with factor 1, and 1 for the fixed cost; one stage, so a pass is
    the sum over micro-batches."""
    lengths = np.sort(np.array(point.lengths, np.float64))[::-1]
    rows = costs.coefficients(Strategies.of([point.strategy]))[0]
    last = rows[7:10] + rows[10:13] + (rows[7:10] if costs.factors.logprob_pass else 0.0)
    micro_batches = -(-len(lengths) // point.micro)
    return float(last[1] * lengths.sum()), float(last[2] * (lengths**2).sum()), float(last[0] * micro_batches), 1.0
