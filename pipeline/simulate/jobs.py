"""Several runs sharing a cluster in virtual time: equal shares beside demand-driven ones with feedback.

A run's step times are simulated, under the plan that it would choose for the devices that it has. What it would take
on other units is the curve of the last period's workload (the first period's own), simulated at doubling numbers of
units and drawn straight between them in logarithms; feedback corrects it by what steps then took. Whoever gets other
units stands still for the switching cost, and shares change only where that pays. Invariants: both ways see the same
workloads; a file and a seed determine every figure; every need and quota holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field

from libra.pipeline.simulate.workload import Workload, WorkloadConfig
from libra.resources.config import Config
from libra.resources.inventory import uniform
from libra.resources.specs import files, load_hardware, load_model
from libra.resources.types import RequestRecord
from libra.scheduler_plugin.planner import Planner, PlannerConfig
from libra.scheduler_plugin.planner.rescore import grouped, simulated_seconds
from libra.scheduler_plugin.planner.sharing import Demand, Feedback, demand_driven, equal_shares, pays

GB = 1e9


class Needs(Config):
    """What one unit of a run takes."""

    gpus: int = Field(default=8, ge=1)
    gpu_memory_gb: float = Field(default=640, ge=0)
    cpu: float = Field(default=32, ge=0)
    host_memory_gb: float = Field(default=256, ge=0)
    network_gb_per_s: float = Field(default=1, ge=0)

    def amounts(self) -> dict[str, float]:
        """By dimension, in devices, bytes, cores, bytes and bytes/s."""
        return {
            "gpu": float(self.gpus), "gpu-memory": self.gpu_memory_gb * GB, "cpu": self.cpu,
            "host-memory": self.host_memory_gb * GB, "network": self.network_gb_per_s * GB,
        }  # fmt: skip


class NodeConfig(Config):
    """What a node has beside its GPUs."""

    cpu: float = Field(default=128, gt=0)
    host_memory_gb: float = Field(default=1000, gt=0)
    network_gb_per_s: float = Field(default=25, gt=0)


class Job(Config):
    """One run. ``least``, ``most``: its quotas in units."""

    name: str
    model: str
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    groups: int = Field(default=16, ge=1)
    members: int = Field(default=8, ge=1)
    least: int = Field(default=1, ge=1)
    most: int = Field(default=64, ge=1)
    needs: Needs = Field(default_factory=Needs)


class SharedScenario(Config):
    """See conf/sim/jobs.yaml."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: str
    hardware: str = "a800_80g"
    nodes: int = Field(default=12, ge=1)
    node: NodeConfig = Field(default_factory=NodeConfig)
    seconds: float = Field(default=7200, gt=0)
    """Virtual time."""
    every: float = Field(default=1800, gt=0)
    """Between looks at the shares."""
    switch_seconds: float = Field(default=18.8, ge=0)
    """For which a run stands still when its share changes."""
    alpha: int = Field(default=1, ge=0)
    """Staleness bound of the runs."""
    jobs: tuple[Job, ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2), min_length=1)

    @property
    def periods(self) -> int:
        """Times that shares are looked at."""
        return max(1, int(self.seconds / self.every))

    def capacity(self) -> dict[str, float]:
        """Of the cluster, by dimension."""
        kind, node = load_hardware(self.hardware), self.node
        gpus = float(self.nodes * kind.gpus_per_node)
        return {
            "gpu": gpus, "gpu-memory": gpus * kind.memory, "cpu": self.nodes * node.cpu,
            "host-memory": self.nodes * node.host_memory_gb * GB, "network": self.nodes * node.network_gb_per_s * GB,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedResult:
    """``steps``: done by each run; ``progress``: geometric mean over the runs of steps, by which ways are compared;
    ``shares``: units of each run in every period; ``stood``: seconds that runs stood still for changes, all together;
    ``factors``: what feedback found, taken over predicted."""

    steps: dict[str, float]
    progress: float
    shares: list[dict[str, int]]
    stood: float
    factors: Mapping[str, float]


class Truth:
    """Step times of the jobs of one scenario and seed, each simulated once, whichever ways of sharing ask for it."""

    def __init__(self, scenario: SharedScenario, seed: int) -> None:
        self._scenario, self._kind = scenario, load_hardware(scenario.hardware)
        self._workloads = [
            Workload(job.workload, seed + i, scenario.periods, job.groups, job.members)
            for i, job in enumerate(scenario.jobs)
        ]
        self.predicted = cache(self._predicted)
        self.simulated = cache(self._simulated)
        self._records = cache(self._records_of)

    def _records_of(self, index: int, period: int) -> list[RequestRecord]:
        return [trace.record() for trace in self._workloads[index].batch(period)]

    def _planner(self, index: int, units: int) -> Planner:
        job = self._scenario.jobs[index]
        config = PlannerConfig(overlap=self._scenario.alpha + 1)
        return Planner(load_model(job.model), uniform(self._kind, units * job.needs.gpus), config)

    def _predicted(self, index: int, units: int, period: int) -> float:
        job = self._scenario.jobs[index]
        most = min(job.most, self._scenario.nodes)
        grid = sorted({min(job.least * 2**k, most) for k in range(most.bit_length())})
        # More units never take longer: those that would are left idle.
        times = np.minimum.accumulate([self.simulated(index, at, period) for at in grid])
        return float(np.exp(np.interp(np.log(units), np.log(grid), np.log(times))))

    def _simulated(self, index: int, units: int, period: int) -> float:
        planner = self._planner(index, units)
        plan = planner.plan(self._records(index, period))
        groups = grouped(self._workloads[index].batch(period))
        return simulated_seconds(planner, plan, groups, "least_loaded", self._scenario.alpha)


def share(scenario: SharedScenario, demand: bool, truth: Truth) -> SharedResult:
    """Run the jobs of ``scenario``, reallocated every period by ``demand``, or in equal shares, with the step times of
    ``truth``. Raises `ConfigError` when quotas do not fit."""
    capacity, feedback = scenario.capacity(), Feedback()
    done = {job.name: 0.0 for job in scenario.jobs}
    shares: list[dict[str, int]] = []
    stood = 0.0
    for period in range(scenario.periods):
        demands = [_demand(scenario, i, period, truth, feedback) for i in range(len(scenario.jobs))]
        units = demand_driven(capacity, demands) if demand else equal_shares(capacity, demands)
        before = shares[-1] if shares else units
        if not pays(before, units, demands, scenario.every, scenario.switch_seconds):
            units = before
        shares.append(units)
        for i, job in enumerate(scenario.jobs):
            standing = min(scenario.every, scenario.switch_seconds) if units[job.name] != before[job.name] else 0.0
            stood += standing
            took = truth.simulated(i, units[job.name], period)
            done[job.name] += (scenario.every - standing) / took
            feedback.observe(job.name, truth.predicted(i, units[job.name], max(0, period - 1)), took)
    progress = exp(mean(log(max(value, 1e-9)) for value in done.values()))
    return SharedResult(done, progress, shares, stood, dict(feedback.factors))


def _demand(scenario: SharedScenario, index: int, period: int, truth: Truth, feedback: Feedback) -> Demand:
    job = scenario.jobs[index]
    return Demand(
        job.name, job.needs.amounts(), job.least, job.most,
        lambda units: feedback.predicted(job.name, truth.predicted(index, units, max(0, period - 1))),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shared:
    """One way to share, over the seeds: mean steps of each run, mean progress, its spread (standard deviation; 0 for
    one seed) and the single values, mean number of changes of shares and seconds stood still for them, and the units
    of each run at the end of the first seed."""

    way: str
    steps: dict[str, float]
    progress: float
    spread: float
    values: tuple[float, ...]
    changes: float
    stood: float
    last: dict[str, int]


def compare_shares(scenario: SharedScenario) -> list[Shared]:
    """Equal shares and demand-driven ones on the same workloads."""
    found = []
    truths = [Truth(scenario, seed) for seed in scenario.seeds]
    for way, demand in (("static equal", False), ("demand-driven with feedback", True)):
        results = [share(scenario, demand, truth) for truth in truths]
        values = tuple(result.progress for result in results)
        steps = {job.name: mean(result.steps[job.name] for result in results) for job in scenario.jobs}
        changes = mean(sum(a != b for a, b in zip(r.shares, r.shares[1:], strict=False)) for r in results)
        found.append(
            Shared(
                way, steps, mean(values), stdev(values) if len(values) > 1 else 0.0, values, changes,
                mean(result.stood for result in results), results[0].shares[-1],
            )
        )  # fmt: skip
    return found


def is_shared(name: str) -> bool:
    """Whether a scenario is one of several runs: it has ``jobs``. Raises `ConfigError` for one that does not exist."""
    return "jobs" in _read(name)[1]


def load_shared(name: str | Path) -> SharedScenario:
    """A shipped scenario of several runs by name, or one from a YAML file. Raises `ConfigError`."""
    source, data = _read(name)
    return files.parse(SharedScenario, data, source)


def _read(name: str | Path) -> tuple[str, dict[str, Any]]:
    source, data = files.read(name, "sim", "scenario")
    return str(source), dict(data)
