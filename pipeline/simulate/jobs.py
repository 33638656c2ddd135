"""Several runs sharing a cluster in virtual time: equal shares beside demand-driven ones with feedback.

Each run's step time follows its planner on the devices it has and the workload of its step; the true step time differs
from the prediction by a hidden factor, which feedback has to find. Invariant: both ways see the same workloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp, log

import numpy as np

from libra.pipeline.simulate.workload import Workload, WorkloadConfig
from libra.resources.inventory import uniform
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import RequestRecord
from libra.scheduler_plugin.planner import Planner
from libra.scheduler_plugin.planner.sharing import Demand, Feedback, demand_driven, equal_shares


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its model and workload, groups of a batch and their members, what a node's worth of it needs beside
    GPUs, its quotas in nodes, and the hidden factor on its step times."""

    name: str
    model: str
    workload: WorkloadConfig
    groups: int = 32
    members: int = 16
    least: int = 1
    most: int = 64
    cpu_per_node: float = 32.0
    host_memory_per_node: float = 256e9
    network_per_node: float = 1e9
    hidden: float = 1.0


@dataclass(frozen=True, slots=True)
class SharedResult:
    """``steps``: done by each run; ``progress``: geometric mean over the runs of steps, by which ways are compared;
    ``shares``: nodes of each run at every reallocation."""

    steps: dict[str, float]
    progress: float
    shares: list[dict[str, int]] = field(default_factory=list)


def share(
    jobs: Sequence[Job],
    nodes: int,
    seconds: float,
    every: float,
    demand: bool,
    hardware: str = "a800_80g",
    others: Mapping[str, float] | None = None,
    seed: int = 0,
) -> SharedResult:
    """Run ``jobs`` for ``seconds`` of virtual time on ``nodes`` nodes, reallocated each ``every`` seconds by demand, or
    in equal shares. ``others``: what the cluster has beside GPUs (none: 128 cores, 1 TB and 25 GB/s a node)."""
    kind = load_hardware(hardware)
    per = kind.gpus_per_node
    capacity = {"gpu": float(nodes * per), "gpu-memory": nodes * per * kind.memory}
    capacity |= others or {"cpu": 128.0 * nodes, "host-memory": 1e12 * nodes, "network": 25e9 * nodes}
    feedback = Feedback()
    done = {job.name: 0.0 for job in jobs}
    rng = np.random.default_rng(seed)
    shares: list[dict[str, int]] = []

    ticks = max(1, int(seconds / every))

    @cache
    def records(index: int, progress: int) -> list[RequestRecord]:
        job = jobs[index]
        workload = Workload(job.workload, seed + index, ticks, job.groups, job.members)
        return [trace.record() for trace in workload.batch(progress)]

    @cache
    def predicted(index: int, units: int, progress: int) -> float:
        planner = Planner(load_model(jobs[index].model), uniform(kind, units * per))
        found = planner.searches(records(index, progress), kind)[2].best
        return found.seconds if found else 1e9

    def demand_of(index: int, progress: int) -> Demand:
        job = jobs[index]
        unit = {
            "gpu": float(per), "gpu-memory": per * kind.memory, "cpu": job.cpu_per_node,
            "host-memory": job.host_memory_per_node, "network": job.network_per_node,
        }  # fmt: skip
        return Demand(
            job.name, unit, job.least, min(job.most, nodes),
            lambda units: feedback.predicted(job.name, predicted(index, units, progress)),
        )  # fmt: skip

    for tick in range(ticks):
        demands = [demand_of(i, tick) for i in range(len(jobs))]
        units = demand_driven(capacity, demands) if demand else equal_shares(capacity, demands)
        shares.append(units)
        for i, job in enumerate(jobs):
            expected = predicted(i, units[job.name], tick)
            took = expected * job.hidden * float(np.exp(rng.normal(0, 0.05)))
            done[job.name] += every / took
            feedback.observe(job.name, expected, took)
    progress = exp(sum(log(max(value, 1e-9)) for value in done.values()) / len(done))
    return SharedResult(done, progress, shares)


@dataclass(frozen=True, slots=True)
class Shared:
    """Three runs on 12 nodes, one way to share over the seeds: mean steps of each run, mean progress and its spread,
    and the nodes of each run at the end of the first seed."""

    way: str
    steps: dict[str, float]
    progress: float
    spread: float
    last: dict[str, int]


EXAMPLE = (
    Job("search", "Qwen3-4B", WorkloadConfig(mean_from=1800, mean_to=3000), most=6),
    Job("math", "Qwen3-8B", WorkloadConfig(mean_from=4000, mean_to=11_000), hidden=1.3),
    Job("code", "Qwen3-14B", WorkloadConfig(mean_from=2500, mean_to=11_500), least=2, cpu_per_node=96.0),
)
"""A small model on short work, one whose work grows, and one that is heavy in CPUs (sandboxes)."""


def example(seeds: int, jobs: Sequence[Job] = EXAMPLE, nodes: int = 12) -> list[Shared]:
    """Equal shares and demand-driven ones on the same workloads: an hour and a half, reallocated each half hour."""
    found = []
    for way, demand in (("static equal", False), ("demand-driven with feedback", True)):
        results = [share(jobs, nodes, 5400.0, 1800.0, demand, seed=seed) for seed in range(seeds)]
        values = [result.progress for result in results]
        steps = {job.name: float(np.mean([result.steps[job.name] for result in results])) for job in jobs}
        spread = float(np.std(values, ddof=1)) if seeds > 1 else 0.0
        found.append(Shared(way, steps, float(np.mean(values)), spread, results[0].shares[-1]))
    return found
