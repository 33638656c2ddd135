"""What may be said of a simulated figure: one rule for all of them.

A figure meets the published one if it is within `TOLERANCE` of it; a bound is met if it holds, but for `ROUNDING`.
``derived``: met, from shipped specs and defaults alone. ``tuned``: met, and a free parameter, which is named, was set
for that. ``not reproduced``: not met, or not simulated; and why. Invariant: a parameter that was tuned in
vain, and an input that is published itself, make no figure ``derived``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any, Final, Literal

from libra.pipeline.simulate.paper.published import Published

TOLERANCE: Final = 0.1
"""Relative, of a figure that is no bound."""
ROUNDING: Final = 0.01
"""Relative, of a bound: published bounds are rounded."""

Status = Literal["derived", "tuned", "not reproduced"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A published figure and what is said of it. ``simulated`` is None where nothing was; ``variant``: of which costs,
    if there are several; ``spread``: standard deviation over seeds, 0 where there are none."""

    published: Published
    simulated: float | None
    status: Status
    remark: str
    spread: float = 0.0
    variant: str = ""

    @property
    def name(self) -> str:
        """Of the published figure, with the variant."""
        return f"{self.published.name} ({self.variant})" if self.variant else self.published.name

    def to_plain(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def met(published: Published, found: float) -> bool:
    """Whether ``found`` meets the published figure; see the module."""
    if published.relation == "<=":
        return found <= published.value * (1 + ROUNDING)
    if published.relation == ">=":
        return found >= published.value * (1 - ROUNDING)
    return abs(found / published.value - 1) <= TOLERANCE


def judged(
    published: Published, values: Sequence[float], why: str, tuned: str = "", good: str = "", variant: str = ""
) -> Figure:
    """The mean of ``values`` (one a seed) judged by the module's rule. ``tuned``: the free parameters behind it (empty:
    none); ``why``: said when the figure is not met; ``good``: said when it is. Raises `ValueError` without values or
    without a reason."""
    if not values or not why:
        raise ValueError(f"{published.key}: values {list(values)} and the reason {why!r} must both be given")
    found = mean(values)
    near = met(published, found)
    status: Status = "not reproduced" if not near else "tuned" if tuned else "derived"
    parts = [f"{found / published.value - 1:+.0%}." if published.relation == "=" else ""]
    parts += [f"Tuned: {tuned}." if tuned and near else f"In spite of {tuned}." if tuned else ""]
    parts += [good if near else why]
    spread = stdev(values) if len(values) > 1 else 0.0
    return Figure(published, found, status, " ".join(part for part in parts if part), spread, variant)


def absent(published: Published) -> Figure:
    """A figure that is not simulated, with its reason."""
    return Figure(published, None, "not reproduced", published.missing)


def incomparable(published: Published, values: Sequence[float], why: str) -> Figure:
    """A simulated figure of another kind than the published one: shown beside it, never counted as reproduced."""
    spread = stdev(values) if len(values) > 1 else 0.0
    return Figure(published, mean(values), "not reproduced", why, spread)
