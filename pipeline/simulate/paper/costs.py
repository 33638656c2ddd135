"""Figures that follow from the cost models alone, without a run: growth with length, throughput by TP degree, moving
KV, and the planner's own time.

Costs are derived from the specs (conf/models, conf/hardware); nothing is fitted here.
"""

from __future__ import annotations

from statistics import median
from time import process_time

import numpy as np

from libra.pipeline.simulate.paper.judged import Figure, incomparable, judged
from libra.pipeline.simulate.paper.plots import Plot
from libra.pipeline.simulate.paper.published import BY_KEY
from libra.pipeline.simulate.workload import Workload, WorkloadConfig
from libra.resources.calibration import load_profile
from libra.resources.cost_model import Requests, RolloutCosts, TrainingCosts
from libra.resources.cost_model.rollout import set_seconds
from libra.resources.inventory import uniform
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import TrainStrategy
from libra.scheduler_plugin.planner import Planner
from libra.scheduler_plugin.simulation import Moves

Part = tuple[list[Figure], list[Plot]]
_LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)


def growth() -> Part:
    """Rollout and training time by length: a 32B model, requests of equal length, the published layouts."""
    model, hardware = load_model("Qwen3-32B"), load_hardware("a800_80g")
    costs = RolloutCosts.from_specs(model, hardware)
    rollout = [
        set_seconds(Requests.from_lengths(np.full(128, float(n)), prompt=32), costs.of(8), costs.queue)
        for n in _LENGTHS
    ]
    strategy = TrainStrategy(4, 1, 2, 2)
    training = [TrainingCosts(model, hardware, np.full(4096, float(n))).seconds(strategy) for n in _LENGTHS]
    figures = [
        judged(BY_KEY["growth.rollout"], [rollout[-1] / rollout[0]],
               "Requests of equal length; queueing near the KV limit is priced."),
        judged(BY_KEY["growth.training"], [training[-1] / training[0]],
               "32 times the tokens and attention's quadratic part; the published factor needs a cost about 12 times "
               "the compute at 1K that does not depend on length, for which there is no mechanism in the model."),
    ]  # fmt: skip
    lines = {"rollout": rollout, "training": training}
    series = {f"{name}, simulated": [(n, s / line[0]) for n, s in zip(_LENGTHS, line, strict=True)]
              for name, line in lines.items()}  # fmt: skip
    dots = {"published": [(32_768.0, 95.0), (32_768.0, 3.9)]}
    plot = Plot("Time over that at 1K tokens", "tokens of a sequence", "×", series, dots, log_x=True, log_y=True)
    return figures, [plot]


def throughput() -> Part:
    """Tokens/s of one of 8 GPUs by TP degree and length class: 512 requests, lengths uniform in the class."""
    model, hardware = load_model("Qwen3-14B"), load_hardware("a800_80g")
    derived = RolloutCosts.from_specs(model, hardware, slots=512)
    fitted = load_profile("a800_published").rollout_costs()
    assert fitted is not None
    figures, rates = [], {}
    for name, (low, high) in {"short": (64, 2048), "long": (16_384, 32_768)}.items():
        for tp in (1, 8):
            found, other = (_rate(costs, tp, low, high) for costs in (derived, fitted))
            why = f"No linear step cost gives all four points; the profile fitted to them gives {other:.0f}."
            figures.append(judged(BY_KEY[f"points.tp{tp}.{name}"], [found], why))
            rates[name, tp] = found
    steep = "Weights are streamed once a step at any degree, so degrees differ less than published."
    figures += [
        judged(BY_KEY["points.ratio.short"], [rates["short", 1] / rates["short", 8]], steep),
        judged(BY_KEY["points.ratio.long"], [rates["long", 8] / rates["long", 1]], steep),
    ]
    series = {
        f"TP {tp}, simulated": [(float(n), _rate(derived, tp, 0.9 * n, 1.1 * n)) for n in _LENGTHS]
        for tp in (1, 2, 4, 8)
    }
    dots = {"TP 1, published": [(1024.0, 1852.0), (24_576.0, 430.0)],
            "TP 8, published": [(1024.0, 591.0), (24_576.0, 1220.0)]}  # fmt: skip
    plot = Plot("Throughput by context and TP degree, 8 GPUs, batch 512", "tokens of a sequence", "tok/s/GPU", series,
                dots, log_x=True, log_y=True)  # fmt: skip
    return figures, [plot]


def _rate(costs: RolloutCosts, tp: int, low: float, high: float) -> float:
    """Generated tokens/s and GPU of one of the 8 / tp instances, with its share of 512 requests."""
    lengths = np.sort(np.random.default_rng(0).uniform(low, high, 512))[:: 8 // tp]
    requests = Requests.from_lengths(lengths, prompt=32)
    return float(requests.generated.sum()) / set_seconds(requests, costs.of(tp), costs.queue) / tp


def migration() -> Part:
    """KV of 40K tokens of the 14B model: through host memory, and on to another node."""
    kv, hardware = load_model("Qwen3-14B").kv_bytes_per_token, load_hardware("a800_80g")
    moves = Moves(float(kv), hardware.host_copy_gb_per_s * 1e9, hardware.network)
    within, across = (1000 * moves.seconds(40_000, same) for same in (True, False))
    full = 40_000 * kv / (hardware.pcie_gb_per_s * 1e9) * 1000
    host = f"host_copy_gb_per_s, set to the published 330 ms (at the full PCIe rate it is {full:.0f} ms)"
    network = f"{host}; the second hop is at {hardware.efficiency.network:.0%} of 200 Gb/s"
    return [
        judged(BY_KEY["migration.same"], [within], "The host copy rate is too low.", host),
        judged(BY_KEY["migration.other"], [across], "The second hop is too slow.", network),
    ], []


def search_time(repeats: int = 5) -> Part:
    """CPU time of the joint search over the number of GPUs, 8,192 requests; records are made into columns within it."""
    records = [t.record() for t in Workload(WorkloadConfig(mean_from=8000, mean_to=8000), 0, 1, 512, 16).batch(0)]
    hardware, points = load_hardware("a800_80g"), []
    for gpus in (16, 64, 128, 512, 1024):
        planner, times = Planner(load_model("Qwen3-14B"), uniform(hardware, gpus)), []
        for _ in range(repeats):
            began = process_time()
            planner.searches(records, hardware)
            times.append(process_time() - began)
        points.append((float(gpus), median(times)))
    at = dict(points)[128.0]
    why = (
        "CPU seconds of this machine, 8,192 requests: an exact parametric search, not the published table. Another "
        "algorithm on another machine: it stands beside the figure and reproduces nothing."
    )
    plot = Plot("Planner's search, 8,192 requests", "GPUs", "CPU s", {"here": points},
                {"published": [(128.0, 12.3), (128.0, 1.9)]}, log_x=True, log_y=True)  # fmt: skip
    return [incomparable(BY_KEY["search.memo"], [at], why)], [plot]
