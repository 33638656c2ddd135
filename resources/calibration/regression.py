"""Robust regression with coefficients at or above zero.

Invariants: errors are relative, so that short and long times count alike; outliers (a step during which the machine did
something else) lose weight; a column that does not help gets exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.resources.errors import ConfigError

Floats = NDArray[np.float64]
_HUBER = 1.345
"""Residuals beyond so many robust standard deviations lose weight (95 % efficiency at the normal; Huber 1981)."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """``coefficients``: shape (k,). ``mape``: mean absolute relative error on the points fitted; ``held_out``: on
    points that the fit did not see (mean over folds), ``held_out_max`` the largest of them."""

    coefficients: Floats
    mape: float
    held_out: float
    held_out_max: float


def fit_relative(columns: Floats, seconds: Floats, folds: int = 5) -> Fit:
    """Fit ``columns @ coefficients ≈ seconds``; columns (n, k), seconds (n,) above zero.

    Iteratively reweighted least squares of relative errors with Huber weights, non-negative coefficients. Held-out
    errors by cross-validation over interleaved folds. Raises `ConfigError` when points are too few or not positive.
    """
    if len(seconds) < columns.shape[1]:
        raise ConfigError(
            f"{len(seconds)} measurements cannot fit {columns.shape[1]} coefficients; measure more points"
        )
    if not (np.isfinite(columns).all() and (seconds > 0).all()):
        raise ConfigError("a measurement is not positive or not finite; measure again")
    scaled = columns / seconds[:, None]
    coefficients = _robust(scaled)
    errors = np.abs(scaled @ coefficients - 1)
    held_out = []
    folds = min(folds, len(seconds))
    for fold in range(folds):
        test = np.arange(len(seconds)) % folds == fold
        if (~test).sum() >= columns.shape[1]:
            held_out += list(np.abs(scaled[test] @ _robust(scaled[~test]) - 1))
    unseen = np.array(held_out or [np.nan])
    return Fit(coefficients, float(errors.mean()), float(unseen.mean()), float(unseen.max()))


def _robust(scaled: Floats) -> Floats:
    weights = np.ones(len(scaled))
    coefficients = non_negative(scaled, np.ones(len(scaled)))
    for _ in range(30):
        residuals = scaled @ coefficients - 1
        spread = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals)))) + 1e-9
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(residuals), 1e-12))
        root = np.sqrt(weights)
        new = non_negative(scaled * root[:, None], root)
        if np.allclose(new, coefficients, rtol=1e-9, atol=0):
            break
        coefficients = new
    return coefficients


def non_negative(a: Floats, b: Floats) -> Floats:
    """argmin ‖a·x − b‖ with x ≥ 0: the active-set method of Lawson and Hanson (1974), chapter 23."""
    norms = np.linalg.norm(a, axis=0)
    norms[norms == 0] = 1.0
    a = a / norms
    count = a.shape[1]
    x, passive = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count + 10):
        gradient = a.T @ (b - a @ x)
        gradient[passive] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-12 * max(1.0, float(np.abs(b).max())):
            break
        passive[best] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            if (trial[passive] > 0).all():
                break
            down = passive & (trial <= 0)
            step = float(np.min(x[down] / (x[down] - trial[down])))
            x = x + step * (trial - x)
            passive &= x > 1e-15
        x = trial
    return np.asarray(x / norms)
