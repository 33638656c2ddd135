"""When to change plans: gain against cost over the horizon, without going back and forth.

    watching ──candidate pays, `confirm` times in a row──> applied ──`settle` steps──> judged: as predicted ──> watching
        ^                                                               │ worse than predicted, two verdicts in a row
        └──────────────────────── rolled back; candidate barred <───────┘

Invariants: pure, no clock: time is counted in steps; a plan is applied only if gain × horizon > cost × safety; two
changes are at least `cool_down` steps apart (a roll-back excepted); a plan that was rolled back is not applied again
for `bar` steps. A candidate with the instances of the plan in force and other bucket bounds costs nothing to adopt: it
is adopted at once where a bound has moved far enough (`rebound`), and is not judged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from pydantic import Field

from libra.resources.config import Config
from libra.resources.types import BucketPlan, Plan, RequestRecord

Action = Literal["keep", "apply", "rebound", "roll_back"]


class ReplanConfig(Config):
    """See the module."""

    interval: int = Field(default=5, ge=1)
    """Steps between looks; a favourable one is confirmed at the very next steps. Confirmed an interval later, the
    shipped drift scenario's change came too late to pay (simulated, 3 plans a look: its seed 0 took 9,461 s as without
    replanning, and takes 8,132 s)."""
    horizon: int = Field(default=20, ge=1)
    """Steps over which a gain is counted: how long a plan is expected to last."""
    safety: float = Field(default=1.5, ge=1)
    """Factor on the switching cost."""
    minimum_gain: float = Field(default=0.08, ge=0, lt=1)
    """Share of the current step time that a candidate must save: hysteresis."""
    confirm: int = Field(default=2, ge=1)
    """Looks in a row that must favour a change of the same direction."""
    cool_down: int = Field(default=10, ge=0)
    """Steps after a change without another."""
    settle: int = Field(default=2, ge=0)
    """Steps after a change whose times are not judged."""
    judge: int = Field(default=4, ge=1)
    """Steps of one verdict: their times are summed up, since a batch of a workload that has just jumped took its time
    beside the next one's longer requests. An even number: at the usual staleness bound of 1 long and short steps take
    turns (simulated: 1,034, 304 and 1,258 s), and three of them are up to a third above the mean of two."""
    tolerance: float = Field(default=0.10, ge=0)
    """Share above the prediction at which a verdict is worse than predicted."""
    bar: int = Field(default=100, ge=0)
    """Steps for which a rolled-back layout is not tried again."""
    rebound: float = Field(default=0.2, gt=0)
    """Share by which a bucket's bound must have moved before buckets change alone: hysteresis."""
    window: int = Field(default=4, ge=1)
    """Steps whose measured times are averaged, and whose requests are planned for; even, as ``judge``."""
    switch_seconds: float = Field(default=15.0, ge=0)
    """Switching cost until one was measured (published: 3.6 + 4.4 s to train, 10.8 s to roll out)."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A step of the run: its number, its seconds, what its requests took, and the seconds of its update (None: not
    told)."""

    step: int
    seconds: float
    records: tuple[RequestRecord, ...]
    train_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predictions for the recent requests: of the plan in force, and of the candidate."""

    current_seconds: float
    candidate_seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, the plan to do it to, why, and the figures."""

    action: Action
    reason: str
    plan: Plan
    gain_seconds: float = 0.0
    cost_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an applied plan did: step seconds predicted (corrected for bias) and measured."""

    step: int
    predicted: float
    measured: float


@dataclass(slots=True)
class Replanner:
    """Decides for one run; ``current`` is the plan in force, ``last`` the run's last step (None: not known)."""

    config: ReplanConfig
    current: Plan
    last: int | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    _previous: Plan | None = None
    _ratios: deque[float] = field(default_factory=deque)
    _favourable: int = 0
    _changed_at: int | None = None
    _judging: bool = False
    _worse: int = 0
    _heard: list[tuple[float, float]] = field(default_factory=list)
    _barred: dict[tuple[object, ...], int] = field(default_factory=dict)
    _cost: float | None = None
    _bias: float = 1.0

    def observe(self, step: int, seconds: float, predicted: float) -> Decision:
        """A step took ``seconds``; ``predicted`` is the cost model's figure for the plan in force and the requests of
        this very step (infinite: the model says that they do not fit), so that a drift of the workload is not held
        against the plan.

        Judges the last change: it has held at the first verdict as predicted, and is rolled back at the second in a row
        that is worse.
        """
        changed = self._changed_at
        settling = changed is not None and step <= changed + self.config.settle
        if not settling and 0 < predicted < inf and not self._judging:
            self._ratios.append(seconds / predicted)
            while len(self._ratios) > self.config.window:
                self._ratios.popleft()
        if not self._judging or changed is None or settling:
            return self._keep("nothing to judge")
        expected = self._bias * predicted
        self.outcomes.append(Outcome(step, expected, seconds))
        self._heard.append((expected, seconds))
        if len(self._heard) < self.config.judge:
            return self._keep("not enough steps for a verdict")
        expected, seconds = (sum(column) / len(self._heard) for column in zip(*self._heard, strict=True))
        self._heard.clear()
        if seconds <= expected * (1 + self.config.tolerance):
            self._judging = False
            return self._keep("as predicted")
        self._worse += 1
        if self._worse < 2 or self._previous is None:
            return self._keep(f"steps took {seconds:.1f} s, {expected:.1f} s were predicted")
        return self._roll_back(step, expected, seconds)

    def due(self, step: int) -> bool:
        """Whether it is worth making a candidate at this step: a regular look, or a favourable one to be confirmed."""
        cooling = self._changed_at is not None and step - self._changed_at < self.config.cool_down
        looks = step % self.config.interval == 0 or self._favourable > 0
        return looks and not cooling and not self._judging

    def consider(self, step: int, candidate: Plan, outlook: Outlook) -> Decision:
        """Weigh a candidate. Predictions are scaled by measured / predicted of the plan in force, so that a bias of the
        model cancels."""
        if not self.due(step):
            return self._keep("not due: between looks, cooling down, or the last change is still judged")
        if _shape(candidate) == _shape(self.current):
            self._favourable = 0
            return self._rebound(candidate, outlook)
        barred = self._barred.get(_shape(candidate))
        if barred is not None and step < barred:
            self._favourable = 0
            return self._keep(f"this plan was rolled back and is barred until step {barred}")
        if self._ratios:
            self._bias = sum(self._ratios) / len(self._ratios)
        gain = self._bias * (outlook.current_seconds - outlook.candidate_seconds)
        cost = (self.config.switch_seconds if self._cost is None else self._cost) * self.config.safety
        share = gain / max(self._bias * outlook.current_seconds, 1e-12)
        if share < self.config.minimum_gain:
            self._favourable = 0
            return self._keep(f"gain {share:.1%} is under {self.config.minimum_gain:.0%}", gain, cost)
        horizon = self._horizon(step)
        if gain * horizon <= cost:
            self._favourable = 0
            return self._keep(f"{gain:.1f} s × {horizon} steps do not pay {cost:.1f} s", gain, cost)
        self._favourable += 1
        if self._favourable < self.config.confirm:
            return self._keep(f"favourable {self._favourable} of {self.config.confirm} times", gain, cost)
        self._adopt(step, candidate)
        reason = f"saves {gain:.1f} s a step ({share:.0%}); {horizon} steps pay {cost:.1f} s"
        return Decision("apply", reason, candidate, gain, cost)

    def switched(self, seconds: float) -> None:
        """The last change took ``seconds``: the cost of the next is the mean of this and what was believed."""
        self._cost = seconds if self._cost is None else 0.5 * (self._cost + seconds)

    def recalibrated(self) -> None:
        """The cost model has just been corrected: ratios to its older predictions say nothing any more."""
        self._ratios.clear()
        self._bias = 1.0

    @property
    def judging(self) -> bool:
        """Whether the last change still has to show that it does as predicted."""
        return self._judging

    def _rebound(self, candidate: Plan, outlook: Outlook) -> Decision:
        """Adopt the candidate's buckets where they differ enough; instances stay as they are."""
        gain = self._bias * (outlook.current_seconds - outlook.candidate_seconds)
        moved = max((_moved(old, new) for old, new in _bucket_pairs(self.current, candidate)), default=0.0)
        enough = gain >= self.config.minimum_gain * self._bias * outlook.current_seconds if moved == inf else gain >= 0
        if moved <= self.config.rebound or not enough:
            return self._keep("the best plan is the one in force", gain)
        parts = tuple(
            replace(old, classes=new.classes, layout=new.layout)
            for old, new in zip(self.current.rollout, candidate.rollout, strict=True)
        )
        self.current = replace(self.current, rollout=parts)
        bounds = ", ".join(
            f"TP {bucket.tp or 'any'} up to {bucket.max_context or 'any'}"
            for part in parts
            for bucket in part.layout.buckets
        )
        return Decision("rebound", f"the same instances, other bounds: {bounds}", self.current, gain)

    def _horizon(self, step: int) -> int:
        """Steps that gain by a change: the run's last ones at most, without those whose batches were in flight."""
        if self.last is None:
            return self.config.horizon
        return max(0, min(self.config.horizon, self.last - step - self.config.settle))

    def _adopt(self, step: int, plan: Plan) -> None:
        self._previous, self.current = self.current, plan
        self._changed_at, self._judging = step, True
        self._favourable = self._worse = 0
        self._ratios.clear()
        self._heard.clear()

    def _roll_back(self, step: int, expected: float, seconds: float) -> Decision:
        assert self._previous is not None
        failed, self.current, self._previous = self.current, self._previous, None
        self._barred[_shape(failed)] = step + self.config.bar
        self._changed_at, self._judging, self._worse = step, False, 0
        reason = f"twice worse than predicted: {seconds:.1f} s against {expected:.1f} s; the former plan comes back"
        return Decision("roll_back", reason, self.current)

    def _keep(self, reason: str, gain: float = 0.0, cost: float = 0.0) -> Decision:
        return Decision("keep", reason, self.current, gain, cost)


def _bucket_pairs(one: Plan, other: Plan) -> list[tuple[BucketPlan | None, BucketPlan | None]]:
    """The buckets of two plans of the same shape, degree by degree."""
    found: list[tuple[BucketPlan | None, BucketPlan | None]] = []
    for old, new in zip(one.rollout, other.rollout, strict=True):
        before = {bucket.tp: bucket for bucket in old.layout.buckets}
        after = {bucket.tp: bucket for bucket in new.layout.buckets}
        found += [(before.get(tp), after.get(tp)) for tp in before | after]
    return found


def _moved(old: BucketPlan | None, new: BucketPlan | None) -> float:
    """By which share a bound has moved; infinite where a bucket or a bound comes or goes."""
    if old is None or new is None or (old.max_context is None) != (new.max_context is None):
        return inf
    if old.max_context is None or new.max_context is None:
        return 0.0
    return max(old.max_context, new.max_context) / max(1, min(old.max_context, new.max_context)) - 1


def _shape(plan: Plan) -> tuple[object, ...]:
    """What makes two plans the same to a cluster: bounds and micro-batches may differ, devices and degrees not."""
    strategy = plan.strategy
    return (
        plan.train_kind,
        (strategy.tp, strategy.ep, strategy.pp, strategy.dp),
        tuple((part.kind, tuple(sorted(part.layout.degrees)), part.prefill_instances) for part in plan.rollout),
    )
