"""Planning for a run that runs: workers as devices, the plan in force as what they do, records of its last steps.

One worker that may roll out or train is one device; an instance of TP k takes the worker that its engine runs on and
the k − 1 beside it, which idle. Pure: no Dask, no clock; `Online.figures` computes (for long, on large clusters) and
changes nothing, `Online.decide` decides. Invariants: a device keeps what it does wherever the new plan allows; where
the training side is fixed it is never touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import Field, model_validator

from libra.resources.calibration import load_profile
from libra.resources.config import Config
from libra.resources.cost_model import Requests
from libra.resources.errors import ConfigError
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
from libra.scheduler_plugin.planner.layouts import RolloutSide
from libra.scheduler_plugin.planner.placement import place
from libra.scheduler_plugin.planner.planner import Planner, PlannerConfig, Profiles, layouts_for
from libra.scheduler_plugin.planner.replan import Decision, Outlook, ReplanConfig, Replanner
from libra.scheduler_plugin.roles import Duty


class OnlineConfig(Config):
    """Replanning while a run runs; off unless asked for."""

    enabled: bool = False
    model: str | None = None
    """A shipped model spec, a spec file or a HF checkpoint: what is planned for. Read where the scheduler runs."""
    hardware: str = "cpu"
    """Kind of device that a worker is."""
    profile: str | None = None
    """A profile (``libra profile``) that replaces derived costs. Read where the scheduler runs."""
    train: Literal["fixed", "move"] = "fixed"
    """``fixed``: training keeps its workers, rollout is laid out anew; ``move``: workers change sides too (a trainer of
    several ranks that may join and leave, and workers that may take both roles)."""
    seconds: float = Field(default=10.0, gt=0)
    """How long making a plan may take."""
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
    replan: ReplanConfig = Field(default_factory=ReplanConfig)

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if self.enabled and self.model is None:
            raise ValueError("planning needs 'model' (a shipped spec such as qwen3_0_6b, a spec file or a checkpoint)")
        return self


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """A worker as a device. ``able``: whether it may both roll out and train; ``duty``: what it does."""

    name: str
    node: str
    able: bool
    duty: Duty | None


@dataclass(frozen=True, slots=True)
class Seen:
    """A step of the run: its number, its seconds, and what its requests took."""

    step: int
    seconds: float
    records: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """``predicted``: seconds of the step seen under the plan in force; a candidate and the outlook if one was due."""

    predicted: float
    candidate: Plan | None = None
    outlook: Outlook | None = None


class Online:
    """One run's planning."""

    def __init__(self, config: OnlineConfig, workers: Sequence[WorkerDevice]) -> None:
        """Raises `ConfigError` for specs that do not exist and for workers that cannot do what ``train`` says."""
        assert config.model is not None
        self.config = config
        if config.train == "move" and (unable := [w.name for w in workers if not w.able]):
            raise ConfigError(
                f"planner.train is 'move', but {', '.join(unable)} may not both roll out and train; start workers with "
                "both capable:rollout and capable:train, or set planner.train to 'fixed'"
            )
        hardware = load_hardware(config.hardware)
        devices = tuple(
            Device(f"{w.node}:{w.name}", w.node, i, hardware.name, int(hardware.memory), w.node)
            for i, w in enumerate(workers)
        )
        profiles = Profiles.of(load_profile(config.profile)) if config.profile else Profiles()
        if config.profile and hardware.name not in profiles.rollout:
            known = ", ".join(profiles.rollout) or "no rollout costs"
            raise ConfigError(f"planner.profile {config.profile} is of {known}, planner.hardware is {hardware.name}")
        self.planner = Planner(load_model(config.model), Inventory(devices, (hardware,)), config.planner, profiles)
        self.replanner = Replanner(config.replan, self._in_force(workers, devices))
        self._recent: deque[Seen] = deque(maxlen=config.replan.window)

    def saw(self, seen: Seen) -> None:
        """A step has ended: its records join the window."""
        self._recent.append(seen)

    def window(self) -> tuple[RequestRecord, ...]:
        """Records of the last steps, as many as one step has: the mix of the window, the size of a batch."""
        records = [record for seen in self._recent for record in seen.records]
        return tuple(records[:: max(1, len(self._recent))])

    def figures(self, seen: Seen, window: Sequence[RequestRecord]) -> Figures:
        """What ``seen`` should have taken, and, when a look is due, the best plan for ``window``."""
        current, planner = self.replanner.current, self.planner
        predicted = max(planner.evaluate(current, seen.records))
        if not self.replanner.due(seen.step):
            return Figures(predicted)
        candidate = planner.plan(window, current) if self.config.train == "move" else self._rollout_only(window)
        outlook = Outlook(max(planner.evaluate(current, window)), max(planner.evaluate(candidate, window)))
        return Figures(predicted, candidate, outlook)

    def decide(self, seen: Seen, figures: Figures) -> Decision:
        """What to do after the step: keep, apply or roll back."""
        decision = self.replanner.observe(seen.step, seen.seconds, figures.predicted)
        if decision.action == "keep" and figures.candidate is not None and figures.outlook is not None:
            decision = self.replanner.consider(seen.step, figures.candidate, figures.outlook)
        return decision

    def duties(self, plan: Plan) -> dict[str, Duty | None]:
        """What every worker does under ``plan``."""
        devices = [device.id for device in self.planner.inventory.devices]
        return {_worker(device): duty for device, duty in duties_of(plan.placements, devices).items()}

    def _rollout_only(self, window: Sequence[RequestRecord]) -> Plan:
        """The plan in force with its rollout side laid out as well as its devices can."""
        current, planner = self.replanner.current, self.planner
        training = [p for p in current.placements if p.role == "train"]
        busy = {device for p in training for device in p.devices}
        free = [device for device in planner.inventory.devices if device.id not in busy]
        costs = planner.rollout_costs(planner.inventory.hardware[0])
        side = RolloutSide(Requests.from_records(window), costs)
        layouts = list(layouts_for(side, len(free)))
        if best := side.best_counts(side.homogeneous_counts(len(free))):
            layouts.append(side.mixed(best[0]))
        if not layouts:
            raise ConfigError(f"no layout on {len(free)} devices holds the longest of {len(window)} requests")
        layout = min(layouts, key=lambda each: each.seconds)
        kept = [p for p in current.placements if p.role != "train"]
        placed = place([("rollout", tp) for tp in layout.degrees], free, kept)
        parts = (replace(current.rollout[0], layout=layout),)
        return replace(
            current, rollout=parts, rollout_seconds=layout.seconds, placements=(*training, *placed), alternatives=()
        )

    def _in_force(self, workers: Sequence[WorkerDevice], devices: Sequence[Device]) -> Plan:
        """What the workers do as the run begins: instances of TP 1, a training rank each."""
        placements: list[Placement] = []
        training = 0
        for worker, device in zip(workers, devices, strict=True):
            if worker.duty is None:
                continue
            if worker.duty.role == "train":
                training += 1
                placements.append(Placement("train", 1, (device.id,)))
            else:
                tp = worker.duty.tp or 1
                if tp > 1:
                    raise ConfigError(
                        f"planning begins from instances of TP 1 (a worker is a device); {worker.name} has TP {tp}"
                    )
                placements.append(Placement("rollout", 1, (device.id,)))
        count = len(placements) - training
        instances = (InstancePlan(1, 0, 0, 0, 0.0),) * count
        layout = RolloutLayout("homogeneous", 0.0, instances, (BucketPlan(1, None, count),))
        kind = self.planner.inventory.hardware[0].name
        parts = (KindLayout(kind, ("all",), layout),)
        strategy = TrainStrategy(1, 1, 1, max(1, training), 1, "none")
        return Plan(strategy, kind, parts, 0.0, 0.0, tuple(placements), (), (), "as the run began")


def _worker(device: str) -> str:
    return device.partition(":")[2]
