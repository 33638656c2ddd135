"""One run's replanning, wherever it runs: what steps took in, what to do out.

Costs follow the machine (`Following`); of the best plans as predicted the one that is fastest as simulated is the
candidate, if somebody simulates them; `Replanner` decides whether it pays. Pure: no Dask, no clock, no process. A run
on a cluster and a simulated one are steered by this class; they differ in who simulates. Invariants: `Steering.figures`
computes (for long, on large clusters) and changes nothing, `Steering.decide` decides; where the training side is fixed
it is never touched; a plan is judged by costs that stand still meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from libra.resources.errors import LibraError
from libra.resources.types import Plan, RequestRecord
from libra.scheduler_plugin.planner.classes import DomainShares
from libra.scheduler_plugin.planner.following import Following
from libra.scheduler_plugin.planner.planner import Planner
from libra.scheduler_plugin.planner.replan import Decision, Outlook, ReplanConfig, Replanner, Seen
from libra.scheduler_plugin.planner.rescore import MOST, Job, Rescored
from libra.scheduler_plugin.planner.rollout_only import rollout_plans

Simulate = Callable[[Job], Rescored | None]
"""Simulates plans somewhere, within its own limits; None: it did not come to any."""


@dataclass(frozen=True, slots=True)
class Figures:
    """``train``, ``rollout``: predicted seconds of the step seen under the plan in force, by side; a candidate and the
    outlook if one was due. ``simulated``: what simulation chose the candidate; ``against``: by how much more (a factor)
    simulation is above prediction for the candidate than for the plan in force; ``failed``: why it could not."""

    train: float
    rollout: float
    candidate: Plan | None = None
    outlook: Outlook | None = None
    simulated: Rescored | None = None
    against: float = 1.0
    failed: LibraError | None = None

    @property
    def predicted(self) -> float:
        """Seconds of the step."""
        return max(self.train, self.rollout)


class Steering:
    """``plan``: in force as the run begins. ``policy``: the run's bucket policy (``kind`` and options), for simulation.
    ``fixed``: the training side keeps what it has. ``most``: plans simulated a look, at most. ``last``: the run's last
    step (None: not known)."""

    def __init__(
        self,
        planner: Planner,
        config: ReplanConfig,
        plan: Plan,
        policy: Mapping[str, Any],
        fixed: bool = False,
        most: int = MOST,
        last: int | None = None,
    ) -> None:
        self.planner = planner
        self.replanner = Replanner(config, plan, last)
        self.following = Following(planner.config.overlap)
        self.domains = DomainShares()
        self._policy, self._fixed, self._most = dict(policy), fixed, most
        self._recent: deque[Seen] = deque(maxlen=config.window)

    def saw(self, seen: Seen) -> None:
        """A step has ended: its records join the window, and the domains' prefill shares."""
        self._recent.append(seen)
        self.domains.observe(seen.records, self.planner.rollout_costs(self.planner.inventory.hardware[0]).steps[0])

    def window(self) -> tuple[RequestRecord, ...]:
        """Records of the last steps, as many as one step has: the mix of the window, the size of a batch.

        One of every so many neighbours in length, domain by domain. One of every so many as they came would keep the
        same places of every group, and members come in the order in which they end: never the longest.
        """
        records = [record for seen in self._recent for record in seen.records]
        steps = max(1, len(self._recent))
        order = sorted(range(len(records)), key=lambda i: (records[i].domain, records[i].context))
        return tuple(records[i] for i in sorted(order[steps // 2 :: steps]))

    def figures(self, seen: Seen, window: Sequence[RequestRecord], simulate: Simulate | None = None) -> Figures:
        """What ``seen`` should have taken, and, when a look is due, the best plan for ``window``, as simulated if
        ``simulate`` comes to any."""
        current, planner = self.replanner.current, self.following.corrected(self.planner, self.domains.shares)
        train, rollout = planner.evaluate(current, seen.records)
        rollout *= self.following.tilt
        if not self.replanner.due(seen.step):
            return Figures(train, rollout)
        found = None
        if simulate is not None and len(planner.inventory.kinds) == 1:
            options = dict(self._policy)
            kind, alpha = str(options.pop("kind")), planner.config.overlap - 1
            found = simulate(Job(planner, window, (), current, self._fixed, kind, options, alpha, self._most))
        if found is None:
            candidate = self._best(planner, current, window)
            return Figures(train, rollout, candidate, self._outlook(planner, current, candidate, window))
        plain = self._outlook(planner, current, found.plan, window)
        outlook, against = _simulated(plain, found)
        return Figures(train, rollout, found.plan, outlook, found, against)

    def decide(self, seen: Seen, figures: Figures) -> Decision:
        """What to do after the step: keep, apply, change bounds or roll back. Costs are corrected by the step unless a
        plan is being judged."""
        replanner = self.replanner
        decision = replanner.observe(seen.step, seen.seconds, figures.predicted)
        if decision.action == "roll_back":
            self.following.turn_back()
        elif figures.candidate is not None and figures.outlook is not None:
            decision = replanner.consider(seen.step, figures.candidate, figures.outlook)
            if decision.action == "apply":
                self.following.turn(figures.against)
        if decision.action in ("keep", "rebound") and not replanner.judging and seen.train_seconds is not None:
            changed = self.following.observe(figures.train, figures.rollout, seen.train_seconds, seen.seconds)
            if changed:
                replanner.recalibrated()
        return decision

    def _best(self, planner: Planner, current: Plan, window: Sequence[RequestRecord]) -> Plan:
        """The best plan as predicted."""
        if self._fixed:
            return rollout_plans(planner, current, window, best_only=True)[0]
        return planner.plan(window, current)

    def _outlook(self, planner: Planner, current: Plan, candidate: Plan, window: Sequence[RequestRecord]) -> Outlook:
        tilt = self.following.tilt
        now, then = planner.evaluate(current, window), planner.evaluate(candidate, window)
        return Outlook(max(now[0], tilt * now[1]), max(then[0], tilt * then[1]))


class InProcess:
    """Steers a run whose time stands still meanwhile: plans are simulated here, as many as ``steering`` says (none:
    the closed form's choice is taken)."""

    def __init__(self, steering: Steering, simulated: bool = True) -> None:
        self._steering, self._simulated = steering, simulated

    def after(self, seen: Seen) -> Decision:
        """What to do after a step."""
        self._steering.saw(seen)
        simulate = Job.best if self._simulated else None
        return self._steering.decide(seen, self._steering.figures(seen, self._steering.window(), simulate))

    def switched(self, seconds: float) -> None:
        """The last change took ``seconds``."""
        self._steering.replanner.switched(seconds)


def _simulated(plain: Outlook, found: Rescored) -> tuple[Outlook, float]:
    """The outlook that simulation gives, on the scale of the prediction of the plan in force, and the candidate's
    simulated over predicted beside that of the plan in force."""
    now, then = plain.current_seconds, plain.candidate_seconds
    if found.current is None or not 0 < found.current < inf or not 0 < now < inf or not 0 < then < inf:
        return plain, 1.0
    share = found.seconds / found.current
    return Outlook(now, now * share), share * now / then
