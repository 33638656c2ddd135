"""A whole run in virtual time: admission under a staleness bound, rollout, training, publishing, replanning.

    admitted ≤ (v + α + 1)·B + returned ─> rollout ─> complete groups ─> batch v ─> train ─> v + 1

Batch v waits for groups of version v − α; a returned group taught nothing and gave its place to another. Pure. The
planner, the replanner and the bucket policy are the objects that a run uses. Invariants: staleness at
consumption is at most α; every group admitted is trained on once or still in flight at the end; the training side never
overlaps itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from libra.resources.types import Plan, RequestRecord
from libra.scheduler_plugin.planner.planner import Planner
from libra.scheduler_plugin.planner.replan import Action, Outlook, Replanner
from libra.scheduler_plugin.planner.routing import buckets_of
from libra.scheduler_plugin.policy.base import BucketPolicy
from libra.scheduler_plugin.simulation.engine import Engine
from libra.scheduler_plugin.simulation.rollout import RolloutSimulation
from libra.scheduler_plugin.simulation.states import Ended, Moves
from libra.scheduler_plugin.simulation.traces import Trace

Group = list[Trace]
_TRAINED, _INSTALLED = "trained", "installed"


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """``steps``: optimizer steps. ``groups``: of a batch. ``members``: trajectories that a group needs; more that are
    sampled are redundant and cancelled when enough have finished. ``alpha``: staleness bound. ``colocated``: training
    and rollout take turns on all devices. ``switch_seconds``: of one turn-taking. ``activation_seconds``: until a new
    engine serves; ``join_seconds``: until devices that join training take part. ``install_seconds``: from an update
    until engines have its weights and groups are admitted under them. ``failure``, ``retries``: of tool calls.
    ``window``: batches whose records a plan is made from. ``clairvoyant``: plans are made from the batch to
    come, and changes cost nothing (an upper bound, not a policy)."""

    steps: int
    groups: int
    members: int
    alpha: int = 1
    colocated: bool = False
    switch_seconds: float = 10.8
    activation_seconds: float = 10.8
    join_seconds: float = 8.0
    install_seconds: float = 0.0
    failure: float = 0.0
    retries: int = 3
    window: int = 2
    clairvoyant: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step. ``seconds`` since the last one; ``train_seconds`` of its update; ``idle_seconds`` that the
    trainer waited for the batch; ``tokens``: contexts of the batch; ``staleness``: of its oldest group;
    ``engine_seconds``: that the batch's trajectories were on engines, queued or running."""

    step: int
    seconds: float
    train_seconds: float
    idle_seconds: float
    tokens: float
    mean_context: float
    staleness: int
    train_gpus: int
    layout: str
    change: Action = "keep"
    engine_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LoopResult:
    """``seconds``: virtual time of the run. ``throughput``: tokens of trained contexts a second and device, the first
    step left out. ``accuracy``: share of decisions at tool returns bound to the bucket of the final context. ``moved``:
    tokens of context moved between instances over tokens trained."""

    steps: tuple[StepReport, ...]
    seconds: float
    throughput: float
    accuracy: float
    moved: float
    changes: int
    events: int
    failed: int
    cancelled: int


@dataclass(slots=True)
class _Open:
    """A group in flight."""

    names: set[str]
    need: int
    version: int
    done: list[Ended] = field(default_factory=list)


class RunLoop:
    """One run of ``planner``'s system. ``group_of``: the n-th group's traces; ``policy_of``: a policy for a plan.
    ``replanner``: None keeps the first plan; ``propose``: makes its candidates from recent traces, the plan in force
    given (None: the planner's closed form); ``reshape``: another way to get a plan each step (heuristics);
    ``returned``: whether a complete group turns out to hold nothing to learn from (None: never) and another takes its
    place."""

    def __init__(
        self,
        config: LoopConfig,
        planner: Planner,
        plan: Plan,
        group_of: Callable[[int], Group],
        policy: BucketPolicy,
        moves: Moves,
        replanner: Replanner | None = None,
        reshape: Callable[[Plan, StepReport, Sequence[RequestRecord]], Plan | None] | None = None,
        propose: Callable[[Sequence[Trace], Plan], tuple[Plan, Outlook]] | None = None,
        returned: Callable[[str], bool] | None = None,
    ) -> None:
        self.config, self.planner, self.plan = config, planner, plan
        self._group_of, self._replanner, self._reshape = group_of, replanner, reshape
        self._propose = propose or self._predicted
        self._is_returned = returned or (lambda _: False)
        self._costs = planner.rollout_costs(planner.inventory.spec(plan.train_kind))
        self._kv_bytes = moves.kv_bytes
        self._sim = RolloutSimulation(
            [engine for engine, _ in self._engines(plan, 0.0)],
            buckets_of(plan),
            policy,
            moves,
            config.failure,
            config.retries,
            config.seed,
        )
        self._version = self._installed = self._admitted = self._returned = 0
        self._open: dict[str, _Open] = {}
        self._ready: list[_Open] = []
        self._training: list[_Open] | None = None
        self._train_seconds = self._idle_since = self._idle = self._last = 0.0
        self._join_at = 0.0
        self._recent: deque[list[Trace]] = deque(maxlen=config.window)
        self._reports: list[StepReport] = []

    def run(self) -> LoopResult:
        """Run to the last step."""
        self._admit()
        while self._version < self.config.steps:
            event = self._sim.step()
            if event is None:
                raise RuntimeError(
                    f"the simulation stands still at step {self._version}: {len(self._open)} open groups, "
                    f"{len(self._ready)} ready of {self.config.groups}"
                )
            if isinstance(event, Ended):
                self._ended(event)
            elif event == _TRAINED:
                self._trained()
            elif event == _INSTALLED:
                self._installed += 1
                self._admit()
        return self._result()

    def _admit(self) -> None:
        limit = min(self._installed + self.config.alpha + 1, self.config.steps) * self.config.groups
        while self._admitted - self._returned < limit:
            traces = self._group_of(self._admitted)
            self._admitted += 1
            name = traces[0].group
            self._open[name] = _Open({t.name for t in traces}, min(self.config.members, len(traces)), self._version)
            for trace in traces:
                self._sim.submit(trace)

    def _ended(self, ended: Ended) -> None:
        group = self._open.get(ended.trace.group)
        if group is None or ended.trace.name not in group.names:
            return
        group.names.discard(ended.trace.name)
        if ended.how == "finished":
            group.done.append(ended)
        if len(group.done) < group.need and group.names:
            return
        del self._open[ended.trace.group]
        for name in sorted(group.names):
            self._sim.cancel(name)
        if self._is_returned(ended.trace.group):
            self._returned += 1
            self._admit()
        else:
            self._ready.append(group)
        self._try_train()

    def _try_train(self) -> None:
        """Waits for: a free trainer, B complete groups, and old groups (below). Unblocked by: `_ended`, `_trained`.

        After batch v, at most k·B groups of version ≤ v − α + k may be left, for each k: they are due within k batches.
        (Only to insist on groups of version v − α, k = 0, is not enough at α ≥ 2: batches of younger groups that were
        complete first would leave more due ones than a batch holds.)
        """
        size, alpha = self.config.groups, self.config.alpha
        if self._training is not None or len(self._ready) < size:
            return
        self._ready.sort(key=lambda group: group.version)
        left = [group.version for group in (*self._ready[size:], *self._open.values())]
        for k in range(alpha + 1):
            if sum(version <= self._version - alpha + k for version in left) > k * size:
                return
        self._training, self._ready = self._ready[: self.config.groups], self._ready[self.config.groups :]
        self._idle = self._sim.now - self._idle_since
        lengths = [float(e.trace.final) for group in self._training for e in group.done]
        self._train_seconds = self._price(lengths) + 2 * self.config.switch_seconds * self.config.colocated
        wait = 0.0 if self.config.clairvoyant else max(0.0, self._join_at - self._sim.now)
        self._sim.alarm(self._sim.now + wait + self._train_seconds, _TRAINED)

    def _price(self, lengths: Sequence[float]) -> float:
        if not lengths:
            return 0.0
        hardware = self.planner.inventory.spec(self.plan.train_kind)
        records = [RequestRecord.from_turns("", 1, [(max(1, int(length) - 1), 0, 0.0)]) for length in lengths]
        return self.planner.train_tree(hardware, records).costs.seconds(self.plan.strategy)

    def _trained(self) -> None:
        batch, self._training = self._training, None
        assert batch is not None
        staleness = max(self._version - group.version for group in batch)
        self._version += 1
        now = self._sim.now
        hardware = self.planner.inventory.spec(self.plan.train_kind)
        weights = self.planner.model.weight_bytes
        self._sim.publish(weights / (hardware.host_copy_gb_per_s * 1e9 * max(self.plan.layout.degrees)))
        finals = [e.trace.final for group in batch for e in group.done]
        traces = [e.trace for group in batch for e in group.done]
        records = [trace.record() for trace in traces]
        self._recent.append(traces)
        report = StepReport(
            self._version, now - self._last, self._train_seconds, self._idle, float(sum(finals)),
            float(np.mean(finals)) if finals else 0.0, staleness, self.plan.strategy.gpus, str(self.plan.layout),
            engine_seconds=sum(e.engine_seconds for group in batch for e in group.done),
        )  # fmt: skip
        self._last = self._idle_since = now
        self._reports.append(self._replan(report, records))
        if self.config.install_seconds > 0:
            self._sim.alarm(now + self.config.install_seconds, _INSTALLED)
        else:
            self._installed += 1
            self._admit()
        self._try_train()

    def _replan(self, report: StepReport, records: list[RequestRecord]) -> StepReport:
        if not records or report.step >= self.config.steps:
            return report
        if self.config.clairvoyant:
            coming = [t.record() for n in range(self.config.groups) for t in self._group_of(self._admitted + n)]
            return self._apply(report, self.planner.plan(coming, self.plan), "apply")
        if self._reshape is not None:
            other = self._reshape(self.plan, report, records)
            return report if other is None else self._apply(report, other, "apply")
        if self._replanner is None:
            return report
        decision = self._replanner.observe(report.step, report.seconds, max(self.planner.evaluate(self.plan, records)))
        if decision.action == "keep" and self._replanner.due(report.step):
            decision = self._replanner.consider(report.step, *self._propose(self._window(), self.plan))
        return report if decision.action == "keep" else self._apply(report, decision.plan, decision.action)

    def _window(self) -> list[Trace]:
        """Recent groups, as many as a batch has: the mix of the window, the size of a batch."""
        groups: dict[str, list[Trace]] = {}
        for batch in self._recent:
            for trace in batch:
                groups.setdefault(trace.group, []).append(trace)
        return [trace for members in list(groups.values())[:: len(self._recent)] for trace in members]

    def _predicted(self, window: Sequence[Trace], current: Plan) -> tuple[Plan, Outlook]:
        """The planner's best plan for the window, both priced by the closed form."""
        records = [trace.record() for trace in window]
        candidate = self.planner.plan(records, current)
        evaluate = self.planner.evaluate
        return candidate, Outlook(max(evaluate(current, records)), max(evaluate(candidate, records)))

    def _apply(self, report: StepReport, plan: Plan, how: Action) -> StepReport:
        if how == "rebound":
            self.plan = plan
            self._sim.buckets = buckets_of(plan)
            return replace(report, change=how)
        if plan.strategy == self.plan.strategy and plan.layout.degrees == self.plan.layout.degrees:
            if plan.layout.buckets != self.plan.layout.buckets and self.config.clairvoyant:
                self._sim.buckets = buckets_of(plan)
            return report
        free = self.config.clairvoyant
        before = {(p.role, p.devices) for p in self.plan.placements}
        same = {placement.devices for placement in plan.placements if (placement.role, placement.devices) in before}
        engines = self._engines(plan, self._sim.now if free else self._sim.now + self.config.activation_seconds)
        keep = [engine.address for engine, devices in engines if devices in same]
        new = [engine for engine, devices in engines if devices not in same]
        joined = any(p.role == "train" and p.devices not in same for p in plan.placements)
        if joined and not free:
            self._join_at = self._sim.now + self.config.join_seconds
        self.plan = plan
        self._sim.reconfigure(keep, new, buckets_of(plan))
        if self._replanner is not None:
            self._replanner.switched(self.config.activation_seconds + (self.config.join_seconds if joined else 0.0))
        return replace(report, change=how)

    def _engines(self, plan: Plan, ready_at: float) -> list[tuple[Engine, tuple[str, ...]]]:
        """An engine for each rollout placement, and its devices; an address follows from them."""
        found = []
        for placement in plan.placements:
            if placement.role == "rollout":
                node, _, first = placement.devices[0].partition(":")
                name = f"{first}-tp{placement.size}"
                engine = Engine(name, node, self._costs.of(placement.size), ready_at, int(self._kv_bytes))
                found.append((engine, placement.devices))
        return found

    def _result(self) -> LoopResult:
        totals = self._sim.totals
        later = self._reports[1:] or self._reports
        seconds = sum(report.seconds for report in later)
        tokens = sum(report.tokens for report in later)
        trained = sum(report.tokens for report in self._reports)
        return LoopResult(
            tuple(self._reports),
            self._sim.now,
            tokens / seconds / len(self.planner.inventory),
            totals.right / totals.decisions if totals.decisions else 1.0,
            totals.moved / trained if trained else 0.0,
            sum(report.change in ("apply", "roll_back") for report in self._reports),
            totals.events,
            totals.failed,
            totals.cancelled,
        )
