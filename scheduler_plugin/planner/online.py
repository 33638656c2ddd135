"""Planning for a run that runs: workers as devices, the plan in force as what they do, records of its last steps.

One worker that may roll out or train is one device; an instance of TP k takes the worker that its engine runs on and
the k − 1 beside it, which idle. Costs follow the machine (`Following`); of the best plans as predicted the one that is
fastest as simulated is the candidate, if somebody simulates them. Pure: no Dask, no clock, no process;
`Online.figures` computes (for long, on large clusters) and changes nothing, `Online.decide` decides. Invariants: a
device keeps what it does wherever the new plan allows; where the training side is fixed it is never touched; a plan is
judged by costs that stand still meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from libra.resources.calibration import load_profile
from libra.resources.config import Config
from libra.resources.errors import ConfigError, LibraError
from libra.resources.inventory import Device, Inventory
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import (
    BucketPlan,
    InstancePlan,
    KindLayout,
    Placement,
    Plan,
    RequestRecord,
    RolloutLayout,
    TrainStrategy,
)
from libra.scheduler_plugin.assignment import duties_of
from libra.scheduler_plugin.planner.classes import DomainShares
from libra.scheduler_plugin.planner.following import Following
from libra.scheduler_plugin.planner.planner import Planner, PlannerConfig, Profiles
from libra.scheduler_plugin.planner.replan import Decision, Outlook, ReplanConfig, Replanner
from libra.scheduler_plugin.planner.rescore import SECONDS, Job, Rescored
from libra.scheduler_plugin.planner.rollout_only import rollout_plans
from libra.scheduler_plugin.roles import Duty


class OnlineConfig(Config):
    """Replanning while a run runs; off unless asked for."""

    enabled: bool = False
    model: str | None = None
    """A shipped model spec, a spec file or a HF checkpoint: what is planned for. Read where the scheduler runs."""
    hardware: str = "cpu"
    """Kind of device that a worker is, unless it says so itself by a resource ``hardware:<kind>``."""
    profile: str | None = None
    """A profile (``libra profile``) that replaces derived costs. Read where the scheduler runs."""
    train: Literal["fixed", "move"] = "fixed"
    """``fixed``: training keeps its workers, rollout is laid out anew; ``move``: workers change sides too (a trainer of
    several ranks that may join and leave, and workers that may take both roles)."""
    seconds: float = Field(default=10.0, gt=0)
    """How long making a plan may take."""
    rescore_seconds: float = Field(default=SECONDS, ge=0)
    """How long, of that, the best plans are simulated in a child process, to choose among them; 0: never."""
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
    replan: ReplanConfig = Field(default_factory=ReplanConfig)

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if self.enabled and self.model is None:
            raise ValueError("planning needs 'model' (a shipped spec such as qwen3_0_6b, a spec file or a checkpoint)")
        if self.rescore_seconds > self.seconds:
            raise ValueError(
                f"rescore_seconds = {self.rescore_seconds:g} is above seconds = {self.seconds:g}, which holds it: "
                "raise seconds, or lower rescore_seconds (0: plans are not simulated)"
            )
        return self


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """A worker as a device. ``able``: whether it may both roll out and train; ``duty``: what it does; ``kind``: of
    hardware, if it says so."""

    name: str
    node: str
    able: bool
    duty: Duty | None
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A step of the run: its number, its seconds, what its requests took, and the seconds of its update (None: not
    told)."""

    step: int
    seconds: float
    records: tuple[RequestRecord, ...]
    train_seconds: float | None = None


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


class Online:
    """One run's planning. ``policy``: the run's bucket policy (``kind`` and options), for simulation."""

    def __init__(
        self, config: OnlineConfig, workers: Sequence[WorkerDevice], policy: Mapping[str, Any] | None = None
    ) -> None:
        """Raises `ConfigError` for specs that do not exist and for workers that cannot do what ``train`` says."""
        assert config.model is not None
        self.config = config
        self._policy = dict(policy or {"kind": "cmlfq"})
        if config.train == "move" and (unable := [w.name for w in workers if not w.able]):
            raise ConfigError(
                f"planner.train is 'move', but {', '.join(unable)} may not both roll out and train; start workers with "
                "both capable:rollout and capable:train, or set planner.train to 'fixed'"
            )
        inventory = _inventory(config, workers)
        profiles = Profiles.of(load_profile(config.profile)) if config.profile else Profiles()
        if config.profile and not set(inventory.kinds) & set(profiles.rollout):
            known = ", ".join(profiles.rollout) or "no rollout costs"
            kinds = ", ".join(inventory.kinds)
            raise ConfigError(f"planner.profile {config.profile} is of {known}, planner.hardware is {kinds}")
        if len(inventory.kinds) > 1:
            _check_kinds(config, inventory)
        self.planner = Planner(load_model(config.model), inventory, config.planner, profiles)
        self.replanner = Replanner(config.replan, self._in_force(workers))
        self.following = Following()
        self.domains = DomainShares()
        self._recent: deque[Seen] = deque(maxlen=config.replan.window)

    def saw(self, seen: Seen) -> None:
        """A step has ended: its records join the window, and the domains' prefill shares."""
        self._recent.append(seen)
        self.domains.observe(seen.records, self.planner.rollout_costs(self.planner.inventory.hardware[0]).steps[0])

    def window(self) -> tuple[RequestRecord, ...]:
        """Records of the last steps, as many as one step has: the mix of the window, the size of a batch."""
        records = [record for seen in self._recent for record in seen.records]
        return tuple(records[:: max(1, len(self._recent))])

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
            fixed, kind = self.config.train == "fixed", str(options.pop("kind"))
            found = simulate(Job(planner, window, (), current, fixed, kind, options, planner.config.overlap - 1))
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

    def classes(self, plan: Plan) -> dict[str, str]:
        """Which kind of hardware every request class goes to under ``plan``; empty on one kind."""
        if len(self.planner.inventory.kinds) == 1:
            return {}
        return {name: part.kind for part in plan.rollout for name in part.classes}

    def duties(self, plan: Plan) -> dict[str, Duty | None]:
        """What every worker does under ``plan``."""
        devices = [device.id for device in self.planner.inventory.devices]
        return {_worker(device): duty for device, duty in duties_of(plan.placements, devices).items()}

    def _best(self, planner: Planner, current: Plan, window: Sequence[RequestRecord]) -> Plan:
        """The best plan as predicted."""
        if self.config.train == "move":
            return planner.plan(window, current)
        return rollout_plans(planner, current, window, best_only=True)[0]

    def _outlook(self, planner: Planner, current: Plan, candidate: Plan, window: Sequence[RequestRecord]) -> Outlook:
        tilt = self.following.tilt
        now, then = planner.evaluate(current, window), planner.evaluate(candidate, window)
        return Outlook(max(now[0], tilt * now[1]), max(then[0], tilt * then[1]))

    def _in_force(self, workers: Sequence[WorkerDevice]) -> Plan:
        """What the workers do as the run begins: instances of TP 1, a training rank each."""
        placements: list[Placement] = []
        training: list[str] = []
        counts: dict[str, int] = {}
        for worker, device in zip(workers, self.planner.inventory.devices, strict=True):
            if worker.duty is None:
                continue
            if worker.duty.role == "train":
                training.append(device.hardware)
                placements.append(Placement("train", 1, (device.id,)))
            else:
                tp = worker.duty.tp or 1
                if tp > 1:
                    raise ConfigError(
                        f"planning begins from instances of TP 1 (a worker is a device); {worker.name} has TP {tp}"
                    )
                counts[device.hardware] = counts.get(device.hardware, 0) + 1
                placements.append(Placement("rollout", 1, (device.id,)))
        if len(set(training)) > 1:
            raise ConfigError(f"training ranks are on {', '.join(sorted(set(training)))}; start them on one kind")
        parts = tuple(
            KindLayout(
                kind, ("all",),
                RolloutLayout(
                    "homogeneous", 0.0, (InstancePlan(1, 0, 0, 0, 0.0),) * count, (BucketPlan(1, None, count),)
                ),
            )
            for kind, count in sorted(counts.items())
        )  # fmt: skip
        kind = training[0] if training else self.planner.inventory.hardware[0].name
        strategy = TrainStrategy(1, 1, 1, max(1, len(training)), 1, "none")
        return Plan(strategy, kind, parts, 0.0, 0.0, tuple(placements), (), (), "as the run began")


def _inventory(config: OnlineConfig, workers: Sequence[WorkerDevice]) -> Inventory:
    """A device a worker."""
    kinds = {w.kind or config.hardware: load_hardware(w.kind or config.hardware) for w in workers}
    hardware = {spec.name: spec for spec in kinds.values()}
    devices = tuple(
        Device(f"{w.node}:{w.name}", w.node, i, spec.name, int(spec.memory), w.node)
        for i, w in enumerate(workers)
        for spec in (kinds[w.kind or config.hardware],)
    )
    return Inventory(devices, tuple(hardware.values()))


def _check_kinds(config: OnlineConfig, inventory: Inventory) -> None:
    kinds = ", ".join(inventory.kinds)
    if config.train == "fixed":
        raise ConfigError(
            f"workers are of several kinds ({kinds}) and planner.train is 'fixed', which lays out one kind; set "
            "planner.train to 'move'"
        )
    if config.planner.split_prefill:
        raise ConfigError(
            "planner.split_prefill splits prefill off in 'libra plan' only: no engine takes part of it yet"
        )


def _simulated(plain: Outlook, found: Rescored) -> tuple[Outlook, float]:
    """The outlook that simulation gives, on the scale of the prediction of the plan in force, and the candidate's
    simulated over predicted beside that of the plan in force."""
    now, then = plain.current_seconds, plain.candidate_seconds
    if found.current is None or not 0 < found.current < inf or not 0 < now < inf or not 0 < then < inf:
        return plain, 1.0
    share = found.seconds / found.current
    return Outlook(now, now * share), share * now / then


def _worker(device: str) -> str:
    return device.partition(":")[2]
