"""Speed of the planner and the simulator, and the closed form against the simulator.

``cd tests && ../.venv/bin/python -m benchmarks.planner``: prints the rows and plots the scaling curve to
``build/planner_scaling.svg``. CPU seconds of the process, medians of 7.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from workloads import records

from benchmarks.rows import Row, Rows
from libra.pipeline.simulate.workload import Workload, WorkloadConfig
from libra.resources.cost_model import Requests, RolloutCosts, TrainingCosts
from libra.resources.cost_model.rollout import QueueModel, set_seconds
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import Bucket
from libra.scheduler_plugin.planner import TrainTree, limits_of
from libra.scheduler_plugin.planner.joint import search
from libra.scheduler_plugin.planner.layouts import RolloutSide
from libra.scheduler_plugin.policy.context_bounds import ContextBounds
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.simulation import Engine, Moves, RolloutSimulation

LIMIT_MS = {128: 20.0, 1024: 100.0, 10_240: 1000.0}
PUBLISHED_MS = 1900.0
"""Published search time at 128 GPUs (12.3 s without memoisation); another machine."""
EVENTS = 50_000.0
REPEATS = 7


def plan_ms(gpus: int, requests: Requests) -> float:
    """Median CPU milliseconds of the whole search: tree, exact partition, mixing and homogeneous beside it."""
    model, hardware = load_model("Qwen3-14B"), load_hardware("a800_80g")
    costs = RolloutCosts.from_specs(model, hardware)

    def once() -> float:
        began = process_time()
        tree = TrainTree(TrainingCosts(model, hardware, requests.context), limits_of("megatron"))
        search(tree, RolloutSide(requests, costs), gpus)
        return process_time() - began

    once()
    return 1000 * median(once() for _ in range(REPEATS))


def events_per_s() -> float:
    """Events a CPU second: 2,048 trajectories on 24 instances, routed least loaded."""
    model, hardware = load_model("Qwen3-14B"), load_hardware("a800_80g")
    cost = RolloutCosts.from_specs(model, hardware).of(1)
    traces = Workload(WorkloadConfig(), 0, 1, 128, 16).batch(0)
    rates = []
    for _ in range(REPEATS):
        engines = [Engine(f"e{i}", f"n{i // 8}", cost) for i in range(24)]
        moves = Moves(float(model.kv_bytes_per_token), 19.85e9, 16.25e9)
        simulation = RolloutSimulation(engines, [Bucket(1, None)], LeastLoaded({}), moves)
        began = process_time()
        for trace in traces:
            simulation.submit(trace)
        while simulation.step() is not None:
            pass
        rates.append(simulation.totals.events / (process_time() - began))
    return median(rates)


def closed_form_errors(instances: int = 70) -> dict[str, float]:
    """Mean absolute relative error of the closed form against simulated single instances that it was not fitted to,
    with its queueing terms and without."""
    rng = np.random.default_rng(99)
    errors: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(instances):
        model = load_model(str(rng.choice(["Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"])))
        costs = RolloutCosts.from_specs(model, load_hardware("a800_80g"), slots=int(rng.choice([64, 256])))
        step = costs.steps[int(rng.integers(len(costs.steps)))]
        mean, scale = float(rng.uniform(1800, 14_000)), float(rng.choice([0, 1, 3]))
        config = WorkloadConfig(mean_from=mean, tool_scale=scale)
        batch = Workload(config, 1000 + number, 1, int(rng.integers(2, 40)), 8).batch(0)
        traces = [trace for trace in batch if trace.final < step.capacity]
        moves = Moves(float(model.kv_bytes_per_token), 19.85e9, 16.25e9)
        simulation = RolloutSimulation([Engine("e", "n", step)], [Bucket(step.tp, None)], ContextBounds({}), moves)
        for trace in traces:
            simulation.submit(trace)
        while simulation.step() is not None:
            pass
        requests = Requests.from_records([trace.record() for trace in traces])
        for name, queue in (("with", costs.queue), ("without", QueueModel(1, 1, 0, 0))):
            errors[name].append(abs(set_seconds(requests, step, queue) / simulation.now - 1))
    return {name: 100 * float(np.mean(values)) for name, values in errors.items()}


def run() -> Rows:
    """All rows."""
    requests = Requests.from_records(records(8192))
    rows = {f"planner.plan_ms.g{g}": Row(plan_ms(g, requests), "ms", limit) for g, limit in LIMIT_MS.items()}
    rows["planner.plan_over_published.g128"] = Row(rows["planner.plan_ms.g128"].value, "ms", PUBLISHED_MS)
    rows["simulator.events_per_s"] = Row(events_per_s(), "1/s", EVENTS)
    errors = closed_form_errors()
    rows["planner.closed_form_held_out_mape"] = Row(errors["with"], "%", errors["without"])
    return rows


def plot(path: Path) -> None:
    """CPU milliseconds of the search over the number of GPUs, both logarithmic."""
    requests = Requests.from_records(records(8192))
    sizes = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_240]
    times = [plan_ms(g, requests) for g in sizes]
    xs = [60 + 700 * np.log(g / 16) / np.log(640) for g in sizes]
    ys = [300 - 260 * np.log(t / 5) / np.log(400) for t in times]
    points = " ".join(f"{x:.0f},{y:.0f}" for x, y in zip(xs, ys, strict=True))
    labels = "".join(
        f"<text x='{x:.0f}' y='318' text-anchor='middle'>{g}</text><text x='{x:.0f}' y='{y - 8:.0f}' "
        f"text-anchor='middle'>{t:.0f}</text>"
        for x, y, g, t in zip(xs, ys, sizes, times, strict=True)
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 820 330' font-family='sans-serif' font-size='12'>"
        "<rect width='820' height='330' fill='white'/><text x='60' y='20'>planner search, CPU ms over GPUs, 8,192 "
        f"requests</text><polyline points='{points}' fill='none' stroke='#3867d6' stroke-width='2'/>{labels}</svg>"
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: row.to_json() for name, row in run().items()}, indent=1) + "\n")
    plot(Path(__file__).resolve().parents[2] / "build" / "planner_scaling.svg")
