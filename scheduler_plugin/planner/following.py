"""Costs that follow the machine while a run runs: a correction a side, from measured steps.

The trainer says what an update took. What rollout took is seen only where the trainer waited for it: steps that took
longer than their updates are rollout's; in others rollout took no longer than the steps. With several batches in flight
long and short steps take turns, since a batch that ends late leaves less to wait for to the next one: rollout is read
from as many steps together as batches are in flight. Pure. Invariants: corrections are bounded and forget at change
points (`Correction`); a step moves a side's factor only by what it tells of that side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from libra.resources.calibration import Correction
from libra.scheduler_plugin.planner.planner import Planner
from libra.scheduler_plugin.planner.scaling import scaled

_WAITED = 1.1
"""Step over update from which the trainer is taken to have waited for rollout."""


@dataclass(slots=True)
class Following:
    """``overlap``: batches in flight at once. ``tilt``: by how much more simulation was above prediction for the plan
    in force than for the first one."""

    overlap: int = 1
    rollout: Correction = field(default_factory=Correction)
    training: Correction = field(default_factory=Correction)
    tilt: float = 1.0
    _before: float = 1.0
    _steps: deque[tuple[float, float, float]] = field(default_factory=deque)

    def corrected(self, planner: Planner, shares: Mapping[str, float]) -> Planner:
        """``planner`` with costs as measured so far, and these prefill shares of domains."""
        made = scaled(planner, self.rollout.factor, self.training.factor)
        return replace(made, shares=dict(shares))

    def observe(self, train: float, rollout: float, train_seconds: float, seconds: float) -> bool:
        """A step of ``seconds`` with an update of ``train_seconds``; ``train`` and ``rollout`` were predicted with the
        present factors. Returns whether a change point was found."""
        changed = False
        if 0 < train < inf and train_seconds > 0:
            changed = self.training.observe(train / self.training.factor, train_seconds)
        if 0 < rollout < inf and seconds > 0:
            self._steps.append((rollout / self.rollout.factor, seconds, train_seconds))
        if len(self._steps) > self.overlap:
            self._steps.popleft()
        if len(self._steps) == self.overlap:
            raw, took, updates = (sum(column) for column in zip(*self._steps, strict=True))
            if took > _WAITED * updates or raw * self.rollout.factor > took:
                changed = self.rollout.observe(raw, took) or changed
        return changed

    @property
    def resets(self) -> int:
        """Change points so far."""
        return self.rollout.resets + self.training.resets

    def turn(self, against: float) -> None:
        """A plan is applied that simulation puts ``against`` times as far above its prediction as the former one."""
        self._before, self.tilt = self.tilt, self.tilt * against
        self._steps.clear()

    def turn_back(self) -> None:
        """The former plan is in force again."""
        self.tilt = self._before
        self._steps.clear()

    def __str__(self) -> str:
        return f"engines × {self.rollout.factor:.2f}, training × {self.training.factor:.2f} of what was predicted"
