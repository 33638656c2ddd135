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
from libra.scheduler_plugin.planner import Planner
from libra.scheduler_plugin.planner.sharing import Demand, Feedback, demand_driven, equal_shares


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its model and workload, groups of a batch and their members, what a node's worth of it needs beside
    GPUs, its quotas in nodes, and the hidden factor on its step times."""

    name: str
    model: str
    workload: WorkloadConfig
    groups: int = 64
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

    @cache
    def predicted(index: int, units: int, progress: int) -> float:
        job = jobs[index]
        steps = max(1, int(seconds / every))
        batch = Workload(job.workload, seed + index, steps, job.groups, job.members).batch(min(progress, steps - 1))
        planner = Planner(load_model(job.model), uniform(kind, units * per))
        return planner.plan([trace.record() for trace in batch]).seconds

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

    for tick in range(max(1, int(seconds / every))):
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
