"""Speed of the planner and the simulator, and the closed form against the simulator.

``cd tests && ../.venv/bin/python -m benchmarks planner``: prints the rows, and plots the search's time over the
number of devices to ``build/planner_scaling.svg``. CPU seconds of the process, medians of 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from workloads import records

from benchmarks.rows import Row, Rows
from libra.pipeline.report import svg
from libra.pipeline.report.svg import Scale
from libra.pipeline.simulate.workload import Workload, WorkloadConfig
from libra.resources.cost_model import Requests, RolloutCosts
from libra.resources.cost_model.rollout import QueueModel, set_seconds
from libra.resources.inventory import uniform
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import Bucket, RequestRecord
from libra.scheduler_plugin.planner import Planner
from libra.scheduler_plugin.policy.context_bounds import ContextBounds
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.simulation import Engine, Moves, RolloutSimulation

LIMIT_MS = {128: 20.0, 1024: 100.0, 10_240: 1000.0}
PUBLISHED_MS = {"plain": 12_300.0, "memo": 1900.0}
"""Published search time at 128 GPUs, without and with memoised rollout searches; another machine."""
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_240)
MODELS = {"dense": "Qwen3-14B", "moe": "Qwen3-30B-A3B"}
CURVE = Path(__file__).resolve().parents[2] / "build" / "planner_scaling.svg"
EVENTS = 50_000.0
REPEATS = 7


def plan_ms(gpus: int, work: Sequence[RequestRecord], model: str = MODELS["dense"], repeats: int = REPEATS) -> float:
    """Median CPU milliseconds of the whole search: records into sorted columns, tree, exact partition, mixing and
    homogeneous beside it."""
    hardware = load_hardware("a800_80g")
    planner = Planner(load_model(model), uniform(hardware, gpus))

    def once() -> float:
        began = process_time()
        planner.searches(work, hardware)
        return process_time() - began

    once()
    return 1000 * median(once() for _ in range(repeats))


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
    """All rows; the scaling curve is drawn beside them."""
    work = records(8192)
    dense = {g: plan_ms(g, work) for g in LIMIT_MS}
    moe = {g: plan_ms(g, work, MODELS["moe"]) for g in LIMIT_MS}
    rows = {f"planner.plan_ms.g{g}": Row(dense[g], "ms", limit) for g, limit in LIMIT_MS.items()}
    rows |= {f"planner.plan_ms.moe.g{g}": Row(moe[g], "ms", limit) for g, limit in LIMIT_MS.items()}
    for name, published in PUBLISHED_MS.items():
        note = f"published, {'without memo' if name == 'plain' else 'memoised'}, on another machine"
        rows[f"planner.plan_over_published.{name}.g128"] = Row(dense[128], "ms", published, note)
    rows["simulator.events_per_s"] = Row(events_per_s(), "1/s", EVENTS)
    errors = closed_form_errors()
    rows["planner.closed_form_held_out_mape"] = Row(errors["with"], "%", errors["without"])
    curves = {
        MODELS["dense"]: [dense.get(g) or plan_ms(g, work, repeats=3) for g in SIZES],
        MODELS["moe"]: [moe.get(g) or plan_ms(g, work, MODELS["moe"], repeats=3) for g in SIZES],
    }
    CURVE.parent.mkdir(exist_ok=True)
    CURVE.write_text(plot(curves))
    slope = np.polyfit(np.log(SIZES), np.log(curves[MODELS["dense"]]), 1)[0]
    rows["planner.scaling_exponent"] = Row(
        float(slope), "", 1.0, f"1: linear in the devices; the curve: build/{CURVE.name}"
    )
    return rows


def plot(curves: Mapping[str, Sequence[float]]) -> str:
    """CPU milliseconds by model over `SIZES`, both axes logarithmic, the published figures as dots: an SVG file."""
    values = [*(t for times in curves.values() for t in times), *PUBLISHED_MS.values()]
    x = Scale(SIZES[0], SIZES[-1], 60, 740, log=True)
    y = Scale(min(values) / 1.5, max(values) * 1.5, 300, 40, log=True)
    parts = [svg.label("", 60, 20, "planner's search, CPU ms over devices, 8,192 requests")]
    for (name, times), colour in zip(curves.items(), ("#3867d6", "#e17055"), strict=True):
        places = [(x(g), y(t)) for g, t in zip(SIZES, times, strict=True)]
        parts.append(f"<g fill='none' stroke='{colour}' stroke-width='2'>{svg.polyline('', places)}</g>")
        parts.append(f"<g fill='{colour}'>{svg.label('', 746, places[-1][1] + 4, name)}</g>")
        parts += [svg.label("", px, py - 8, f"{t:.0f}", "middle") for (px, py), t in zip(places, times, strict=True)]
    parts += [svg.label("", x(g), 318, str(g), "middle") for g in SIZES]
    for name, published in PUBLISHED_MS.items():
        parts.append(svg.circle("", x(128), y(published), 4, name))
        parts.append(svg.label("", x(128) + 8, y(published) + 4, f"published, {name}: {published:,.0f}"))
    return (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 860 330' font-family='sans-serif' font-size='12'>"
        f"<rect width='860' height='330' fill='white'/>{''.join(parts)}</svg>\n"
    )
