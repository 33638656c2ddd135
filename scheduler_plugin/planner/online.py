"""Planning for a run that runs: workers as devices, the plan in force as what they do, records of its last steps.

One worker that may roll out or train is one device; an instance of TP k takes the worker that its engine runs on and
the k − 1 beside it, which idle. What is decided, and how, is `Steering`'s. Pure: no Dask, no clock, no process.
Invariant: a device keeps what it does wherever the new plan allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from libra.resources.calibration import load_profile
from libra.resources.config import Config
from libra.resources.errors import ConfigError
from libra.resources.inventory import Device, Inventory
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import (
    BucketPlan,
    InstancePlan,
    KindLayout,
    Placement,
    Plan,
    RolloutLayout,
    TrainStrategy,
)
from libra.scheduler_plugin.assignment import duties_of
from libra.scheduler_plugin.planner.planner import Planner, PlannerConfig, Profiles
from libra.scheduler_plugin.planner.replan import ReplanConfig
from libra.scheduler_plugin.planner.rescore import SECONDS
from libra.scheduler_plugin.planner.steering import Steering
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
    steps: int | None = Field(default=None, ge=1)
    """The run's last step, after which no change pays; None: not known. A run says its own."""
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


class Online(Steering):
    """One run's planning. ``policy``: the run's bucket policy (``kind`` and options), for simulation."""

    def __init__(
        self, config: OnlineConfig, workers: Sequence[WorkerDevice], policy: Mapping[str, Any] | None = None
    ) -> None:
        """Raises `ConfigError` for specs that do not exist and for workers that cannot do what ``train`` says."""
        assert config.model is not None
        self.config = config
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
        planner = Planner(load_model(config.model), inventory, config.planner, profiles)
        plan = _in_force(planner, workers)
        fixed = config.train == "fixed"
        super().__init__(planner, config.replan, plan, policy or {"kind": "cmlfq"}, fixed, last=config.steps)

    def classes(self, plan: Plan) -> dict[str, str]:
        """Which kind of hardware every request class goes to under ``plan``; empty on one kind."""
        if len(self.planner.inventory.kinds) == 1:
            return {}
        return {name: part.kind for part in plan.rollout for name in part.classes}

    def duties(self, plan: Plan) -> dict[str, Duty | None]:
        """What every worker does under ``plan``."""
        devices = [device.id for device in self.planner.inventory.devices]
        return {_worker(device): duty for device, duty in duties_of(plan.placements, devices).items()}


def _in_force(planner: Planner, workers: Sequence[WorkerDevice]) -> Plan:
    """What the workers do as the run begins: instances of TP 1, a training rank each."""
    placements: list[Placement] = []
    training: list[str] = []
    counts: dict[str, int] = {}
    for worker, device in zip(workers, planner.inventory.devices, strict=True):
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
    kind = training[0] if training else planner.inventory.hardware[0].name
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


def _worker(device: str) -> str:
    return device.partition(":")[2]
