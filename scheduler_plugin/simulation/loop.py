"""A whole run in virtual time: admission under a staleness bound, rollout, training, publishing, replanning.

    room ─> rollout ─> complete groups ─> batch v ─> train ─> v + 1 ─> published ─> loaded by every engine ─> room

Pure. Admission (pacing, due groups, returned groups), the routing table with its policy, the role state machine, the
planner and the replanner are the objects that a run uses. Invariants: staleness at consumption is at most α; every
group admitted is trained on once, returned, or still in flight at the end; the training side never overlaps itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from libra.resources.types import Plan, RequestRecord
from libra.scheduler_plugin.admission import Admission, AdmissionRules, Wait
from libra.scheduler_plugin.planner.planner import Planner
from libra.scheduler_plugin.planner.replan import Action, Decision, Seen
from libra.scheduler_plugin.planner.routing import buckets_of
from libra.scheduler_plugin.policy.base import BucketPolicy
from libra.scheduler_plugin.simulation.engine import Engine
from libra.scheduler_plugin.simulation.pool import Answer, RoleSeconds, Tick, VirtualPool
from libra.scheduler_plugin.simulation.rollout import RolloutSimulation
from libra.scheduler_plugin.simulation.states import Ended, Life, Moves
from libra.scheduler_plugin.simulation.traces import Trace

Group = list[Trace]
_TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """``steps``: optimizer steps. ``groups``: of a batch. ``members``: trajectories that a group needs; more that are
    sampled are redundant and cancelled when enough have finished. ``alpha``: staleness bound. ``min_usable``,
    ``require_full``: which groups are trained on when members fail. ``colocated``: training and rollout take turns on
    all devices. ``switch_seconds``: of one turn-taking. ``activation_seconds``: until a new engine serves;
    ``join_seconds``: until devices that join training, or a core of another shape, take part; ``stop_seconds``: until
    an engine or a rank has ended. ``install_seconds``: from an update until engines may load its weights.
    ``failure``, ``retries``: of tool calls. ``clairvoyant``: plans are made from the batch to come, and changes cost
    nothing (no policy)."""

    steps: int
    groups: int
    members: int
    alpha: int = 1
    min_usable: int = 1
    require_full: bool = False
    colocated: bool = False
    switch_seconds: float = 10.8
    activation_seconds: float = 10.8
    join_seconds: float = 8.0
    stop_seconds: float = 0.0
    install_seconds: float = 0.0
    failure: float = 0.0
    retries: int = 3
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
    tokens of context moved between instances over tokens trained. ``generated``: tokens, those of failed and cancelled
    trajectories too. ``restarts``, ``failed``, ``cancelled``: trajectories. ``returned``: groups that gave their place
    to another."""

    steps: tuple[StepReport, ...]
    seconds: float
    throughput: float
    accuracy: float
    moved: float
    changes: int
    events: int
    failed: int
    cancelled: int
    restarts: int
    generated: float
    returned: int


@dataclass(slots=True)
class _Group:
    """A group that was admitted: ``need`` members make it complete; ``lives`` are in flight, ``done`` have finished."""

    ordinal: int
    name: str
    need: int
    lives: dict[str, Life]
    done: list[Ended] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether nothing of it is in flight."""
        return not self.lives

    @property
    def oldest(self) -> int | None:
        """Oldest version that a sampled token of it has or may yet have."""
        known = [life.version for life in self.lives.values()]
        known += [ended.version for ended in self.done]
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class _Written:
    """Weights of a version may be loaded."""

    version: int


class Steers(Protocol):
    """Decides about changes of the plan (`libra.scheduler_plugin.planner.steering`)."""

    def after(self, seen: Seen) -> Decision:
        """What to do after a step."""

    def switched(self, seconds: float) -> None:
        """The last change took ``seconds``."""


class RunLoop:
    """One run of ``planner``'s system. ``group_of``: the n-th group's traces; ``policy_of``: a policy for a plan.
    ``steers``: None keeps the first plan; ``reshape``: another way to get a plan each step (heuristics); ``returned``:
    whether a complete group turns out to hold nothing to learn from (None: never) and another takes its place."""

    def __init__(
        self,
        config: LoopConfig,
        planner: Planner,
        plan: Plan,
        group_of: Callable[[int], Group],
        policy: BucketPolicy,
        moves: Moves,
        steers: Steers | None = None,
        reshape: Callable[[Plan, StepReport, Sequence[RequestRecord]], Plan | None] | None = None,
        returned: Callable[[str], bool] | None = None,
    ) -> None:
        self.config, self.planner, self.plan = config, planner, plan
        self._group_of, self._steers, self._reshape = group_of, steers, reshape
        self._is_returned = returned or (lambda _: False)
        self._costs = planner.rollout_costs(planner.inventory.spec(plan.train_kind))
        self._kv_bytes = moves.kv_bytes
        self._sim = RolloutSimulation(
            (), buckets_of(plan), policy, moves, config.failure, config.retries, config.seed, self._engine
        )
        rules = AdmissionRules(config.groups, config.alpha, config.steps, config.min_usable, config.require_full)
        self._admission: Admission[_Group] = Admission(rules)
        self._open: dict[str, _Group] = {}
        self._training: list[_Group] | None = None
        self._training_plan = plan
        self._train_seconds = self._idle_since = self._idle = self._last = 0.0
        self._regroup_at = 0.0
        self._reports: list[StepReport] = []
        seconds = RoleSeconds(config.activation_seconds, config.join_seconds, config.stop_seconds)
        devices = [device.id for device in planner.inventory.devices]
        self._pool = VirtualPool(self._sim, devices, seconds, self._load_seconds, self._trains_now)
        self._pool.begin(p for p in plan.placements if p.role == "rollout" or not config.colocated)

    def run(self) -> LoopResult:
        """Run to the last step."""
        self._look()
        while self._admission.version < self.config.steps:
            event = self._sim.step()
            match event:
                case None:
                    raise RuntimeError(
                        f"the simulation stands still at step {self._admission.version}: {len(self._open)} open groups "
                        f"({self._sim.waiting} trajectories wait for an instance), {len(self._admission.ready)} ready "
                        f"of {self.config.groups}"
                    )
                case Ended():
                    self._ended(event)
                case Answer() | Tick():
                    self._pool.handle(event)
                    self._look()
                case _Written():
                    self._pool.published(event.version)
                    self._look()
                case _:
                    self._trained()
        return self._result()

    def _look(self) -> None:
        """The pool has changed: weights may be installed everywhere, a change complete, training devices ready."""
        installed = self._pool.installed
        if installed is not None and installed > self._admission.installed:
            self._admission.install(installed)
            self._sim.version = installed
        seconds = self._pool.settled()
        if seconds is not None and self._steers is not None:
            self._steers.switched(seconds)
        self._admit()
        self._try_train()

    def _admit(self) -> None:
        """Waits for: room. Unblocked by: `_look` (weights installed), `_ended` (a group returned)."""
        while self._admission.room > 0:
            ordinal = self._admission.admitted
            traces = self._group_of(ordinal)
            lives = {trace.name: self._sim.submit(trace) for trace in traces}
            group = _Group(ordinal, traces[0].group, min(self.config.members, len(traces)), lives)
            self._open[group.name] = group
            self._admission.admit(group)

    def _ended(self, ended: Ended) -> None:
        group = self._open.get(ended.trace.group)
        if group is None or group.lives.pop(ended.trace.name, None) is None:
            return
        if ended.how == "finished":
            group.done.append(ended)
        if len(group.done) < group.need and group.lives:
            return
        del self._open[group.name]
        for name in sorted(group.lives):
            self._sim.cancel(name)
        group.lives.clear()
        spread = not self._is_returned(group.name)
        if self._admission.complete(group.ordinal, len(group.done), group.need, spread) != "ready":
            self._admit()
        self._try_train()

    def _try_train(self) -> None:
        """Waits for: a free trainer, its devices, and a batch. Unblocked by: `_ended`, `_trained`, `_look`."""
        if self._training is not None or not self._has_trainer():
            return
        found = self._admission.next_batch()
        if isinstance(found, Wait):
            return
        self._training = self._admission.take(found)
        self._idle = self._sim.now - self._idle_since
        lengths = [float(e.trace.final) for group in self._training for e in group.done]
        self._train_seconds = self._price(lengths) + 2 * self.config.switch_seconds * self.config.colocated
        wait = max(0.0, self._regroup_at - self._sim.now)
        self._sim.alarm(self._sim.now + wait + self._train_seconds, _TRAINED)

    def _has_trainer(self) -> bool:
        """Whether an update can run: with the devices of the plan in force, or still with those of the one before."""
        for plan in (self.plan, self._training_plan):
            if self.config.colocated or self._pool.trains(_training_devices(plan)):
                self._training_plan = plan
                return True
        return False

    def _trains_now(self, device: str) -> bool:
        return self._training is not None and device in _training_devices(self._training_plan)

    def _price(self, lengths: Sequence[float]) -> float:
        if not lengths:
            return 0.0
        plan = self._training_plan
        hardware = self.planner.inventory.spec(plan.train_kind)
        records = [RequestRecord.from_turns("", 1, [(max(1, int(length) - 1), 0, 0.0)]) for length in lengths]
        return self.planner.train_tree(hardware, records).costs.seconds(plan.strategy)

    def _load_seconds(self, tp: int) -> float:
        """Of one engine's weights from host memory, a shard a device."""
        hardware = self.planner.inventory.spec(self.plan.train_kind)
        return float(self.planner.model.weight_bytes / (hardware.host_copy_gb_per_s * 1e9 * tp))

    def _trained(self) -> None:
        batch, self._training = self._training, None
        assert batch is not None
        version = self._admission.version
        staleness = max(version - e.version for group in batch for e in group.done)
        self._admission.trained(version)
        now = self._sim.now
        finals = [e.trace.final for group in batch for e in group.done]
        records = [e.trace.record() for group in batch for e in group.done]
        report = StepReport(
            version + 1, now - self._last, self._train_seconds, self._idle, float(sum(finals)),
            float(np.mean(finals)) if finals else 0.0, staleness, self._training_plan.strategy.gpus,
            str(self.plan.layout),
            engine_seconds=sum(e.engine_seconds for group in batch for e in group.done),
        )  # fmt: skip
        self._last = self._idle_since = now
        self._reports.append(self._replan(report, records))
        if self.config.install_seconds > 0:
            self._sim.alarm(now + self.config.install_seconds, _Written(version + 1))
        else:
            self._pool.published(version + 1)
        self._look()

    def _replan(self, report: StepReport, records: list[RequestRecord]) -> StepReport:
        if not records or report.step >= self.config.steps:
            return report
        if self.config.clairvoyant:
            first = self._admission.admitted
            coming = [t.record() for n in range(self.config.groups) for t in self._group_of(first + n)]
            return self._apply(report, self.planner.plan(coming, self.plan), "apply")
        if self._reshape is not None:
            other = self._reshape(self.plan, report, records)
            return report if other is None else self._apply(report, other, "apply")
        if self._steers is None:
            return report
        decision = self._steers.after(Seen(report.step, report.seconds, tuple(records), report.train_seconds))
        return report if decision.action == "keep" else self._apply(report, decision.plan, decision.action)

    def _apply(self, report: StepReport, plan: Plan, how: Action) -> StepReport:
        if how == "rebound":
            self.plan = plan
            self._sim.table.rebucket(buckets_of(plan))
            return replace(report, change=how)
        if plan.strategy == self.plan.strategy and plan.layout.degrees == self.plan.layout.degrees:
            if plan.layout.buckets != self.plan.layout.buckets and self.config.clairvoyant:
                self._sim.table.rebucket(buckets_of(plan))
            return report
        free = self.config.clairvoyant
        if not free and _core(plan) != _core(self.plan):
            self._regroup_at = self._sim.now + self.config.join_seconds
        self.plan = plan
        self._sim.table.rebucket(buckets_of(plan))
        self._pool.change(plan.placements, at_once=free)
        return replace(report, change=how)

    def _engine(self, address: str, name: str, tp: int) -> Engine:
        """The engine of the worker of a device."""
        node, _, index = name.rpartition(":")
        engine = Engine(index, node, self._costs.of(tp), int(self._kv_bytes))
        assert engine.address == address
        engine.weights = self._pool.states[name].version or 0
        return engine

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
            totals.restarts,
            totals.generated,
            self._admission.returned,
        )


def _training_devices(plan: Plan) -> list[str]:
    return [device for placement in plan.placements if placement.role == "train" for device in placement.devices]


def _core(plan: Plan) -> tuple[int, int, int]:
    """The shape of a replica: what joins or leaves training changes the number of replicas only."""
    return plan.strategy.tp, plan.strategy.ep, plan.strategy.pp
