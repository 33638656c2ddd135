"""Several runs on one cluster: who gets how much, by demand and with feedback.

A run's demand is what a unit of its devices takes of every dimension (GPUs, GPU memory, CPU, host memory, network),
least and most units, and how its step time falls with units. Units go one by one to the run whose progress gains most
from its next one, relative to what it would have with an equal share; that is proportional fairness, discretised.
Invariants: no dimension is exceeded; every run has at least its least units or the allocation is refused; pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log

from libra.resources.errors import ConfigError

DIMENSIONS = ("gpu", "gpu-memory", "cpu", "host-memory", "network")
"""Devices, bytes, cores, bytes, bytes/s; the reserved names of resource tags and ``gpu``."""

Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """One run. ``unit``: amounts that one unit takes. ``step_seconds``: of the run with so many units. ``weight``: of
    its progress against that of others."""

    name: str
    unit: Amounts
    least: int
    most: int
    step_seconds: Callable[[int], float]
    weight: float = 1.0


def equal_shares(capacity: Amounts, demands: Sequence[Demand]) -> dict[str, int]:
    """Every run the same share of every dimension, within its quotas. Raises `ConfigError` when a least quota does not
    fit its share."""
    found = {}
    for demand in demands:
        share = {name: amount / len(demands) for name, amount in capacity.items()}
        units = min(demand.most, _fitting(share, demand.unit))
        if units < demand.least:
            raise ConfigError(
                f"run {demand.name} needs at least {demand.least} units, its equal share holds {units}; fewer runs, a "
                "lower least quota or demand-driven shares would do"
            )
        found[demand.name] = units
    return found


def demand_driven(capacity: Amounts, demands: Sequence[Demand]) -> dict[str, int]:
    """Units by marginal gain in Σ weight·log(steps a second). Raises `ConfigError` when the least quotas do not fit."""
    units = {demand.name: demand.least for demand in demands}
    left = dict(capacity)
    for demand in demands:
        for name, amount in demand.unit.items():
            left[name] = left.get(name, 0.0) - amount * demand.least
    short = [name for name, amount in left.items() if amount < -1e-9]
    if short:
        raise ConfigError(f"the least quotas of {len(demands)} runs exceed the cluster in {', '.join(sorted(short))}")
    while True:
        options = []
        for demand in demands:
            at = units[demand.name]
            # Looks past plateaus: a step time may only fall every few units (a whole replica).
            for more in range(1, min(demand.most - at, _fitting(left, demand.unit)) + 1):
                gain = demand.weight * log(demand.step_seconds(max(at, 1)) / demand.step_seconds(at + more))
                if gain > 1e-12:
                    options.append((gain / more, demand.name, more, demand))
        if not options:
            return units
        _, name, more, demand = max(options, key=lambda option: (option[0], option[1]))
        units[name] += more
        for dimension, amount in demand.unit.items():
            left[dimension] -= amount * more


def pays(
    old: Mapping[str, int], new: Mapping[str, int], demands: Sequence[Demand], seconds: float, switch_seconds: float
) -> bool:
    """Whether ``new`` units make more progress than ``old`` ones in the next ``seconds``, although every run whose
    units change stands still for ``switch_seconds`` of them. Progress: Σ weight·log(steps)."""
    if switch_seconds >= seconds and old != new:
        return False
    gain = 0.0
    for demand in demands:
        before, after = old[demand.name], new[demand.name]
        if before != after:
            left = (seconds - switch_seconds) / seconds
            gain += demand.weight * log(left * demand.step_seconds(before) / demand.step_seconds(after))
    return gain > 0


@dataclass(slots=True)
class Feedback:
    """Measured step times correct the demand curves: a factor a run, averaged exponentially, within ``bound``."""

    weight: float = 0.3
    bound: float = 4.0
    factors: dict[str, float] = field(default_factory=dict)

    def observe(self, name: str, predicted: float, measured: float) -> None:
        """A step of the run took ``measured`` seconds where ``predicted`` were expected (uncorrected)."""
        ratio = min(self.bound, max(1 / self.bound, measured / predicted))
        old = self.factors.get(name, ratio)
        self.factors[name] = old + self.weight * (ratio - old)

    def predicted(self, name: str, seconds: float) -> float:
        """The corrected prediction."""
        return seconds * self.factors.get(name, 1.0)


def _fitting(amounts: Amounts, unit: Amounts) -> int:
    """Units that fit, every dimension counted; a dimension that the cluster does not name is not limited."""
    return int(
        min(
            (amounts[name] / amount + 1e-9 for name, amount in unit.items() if amount > 0 and name in amounts),
            default=0,
        )
    )
