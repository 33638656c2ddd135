"""Figures that need runs: the long tail, drift, routing, and the ablation.

Workloads are those of the shipped generator; its free parameters are named wherever a figure hangs on one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from libra.pipeline.simulate.paper.costs import Part
from libra.pipeline.simulate.paper.judged import Figure, incomparable, judged
from libra.pipeline.simulate.paper.plots import Plot, Points
from libra.pipeline.simulate.paper.published import BY_KEY
from libra.pipeline.simulate.scenario import Scenario
from libra.pipeline.simulate.variants import Compared, compare
from libra.pipeline.simulate.workload import Workload, WorkloadConfig
from libra.resources.cost_model import RolloutCosts
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import Bucket
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.policy.base import BucketPolicy
from libra.scheduler_plugin.policy.embedding_like import EmbeddingLike, EmbeddingLikeConfig, PromptSample
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.policy.mlfq import Mlfq
from libra.scheduler_plugin.simulation import Ended, Engine, Moves, RolloutSimulation


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated. ``seeds``; ``steps`` and ``groups`` of the ablation's runs; ``rescore``: plans simulated
    for each choice among them; ``points``: steps of drift that tail and routing are looked at."""

    seeds: int = 3
    steps: int = 10
    groups: int = 32
    rescore: int = 8
    points: int = 5


def tail(size: Size) -> Part:
    """How much of a rollout the longest tenth takes, by three readings, over the drift: batches of 2,048 on six TP-4
    instances, routed least loaded."""
    shares: dict[str, list[float]] = {"tail.tokens": [], "tail.life": [], "tail.makespan": []}
    curves: dict[str, Points] = {}
    for seed in range(size.seeds):
        workload = Workload(WorkloadConfig(), seed, size.points, 128, 16)
        batches = [_rolled_out(workload, step) for step in range(size.points)]
        for key in shares:
            shares[key].append(float(np.mean([_longest_tenth(key, ended) for ended in batches])))
        if not seed:
            for step in sorted({0, size.points // 2, size.points - 1}):
                curves[f"mean {workload.mean_at(step):,.0f} tokens"] = _ended_over_time(batches[step])
    why = "Mean over the drift from 2.5K to 11.5K tokens; early in it the share is larger, late smaller."
    reading = f"{why} The published wording leaves the reading open."
    lengths = "the workload's kinds of work, whose lengths and weights are assumed"
    figures = [judged(BY_KEY[key], values, why, lengths, reading) for key, values in shares.items()]
    dots = {"published: over half of the time for the last tenth": [(0.5, 0.9)]}
    return figures, [Plot("The tail: trajectories ended over a rollout", "share of the rollout's time",
                          "share of trajectories", curves, dots)]  # fmt: skip


def _rolled_out(workload: Workload, step: int) -> list[Ended]:
    costs = RolloutCosts.from_specs(load_model("Qwen3-14B"), load_hardware("a800_80g"))
    engines = [Engine(f"e{i}", f"n{i // 2}", costs.of(4)) for i in range(6)]
    simulation = RolloutSimulation(engines, [Bucket(4, None)], LeastLoaded({}), _moves())
    return _played(simulation, workload, step)


def _played(simulation: RolloutSimulation, workload: Workload, step: int) -> list[Ended]:
    for trace in workload.batch(step):
        simulation.submit(trace)
    ended = []
    while (what := simulation.step()) is not None:
        assert isinstance(what, Ended)
        ended.append(what)
    return ended


def _moves() -> Moves:
    hardware = load_hardware("a800_80g")
    kv = float(load_model("Qwen3-14B").kv_bytes_per_token)
    return Moves(kv, hardware.host_copy_gb_per_s * 1e9, hardware.network)


def _longest_tenth(key: str, ended: Sequence[Ended]) -> float:
    """Percent; see the figures' names."""
    if key == "tail.makespan":
        times = sorted(each.time for each in ended)
        return 100 * (1 - times[int(0.9 * len(times))] / times[-1])
    spent = [e.trace.record().kvint if key == "tail.tokens" else e.engine_seconds for e in ended]
    order = np.argsort([-e.trace.final for e in ended])[: len(ended) // 10]
    return 100 * float(np.array(spent, float)[order].sum() / sum(spent))


def _ended_over_time(ended: Sequence[Ended]) -> Points:
    times = sorted(each.time for each in ended)
    at = np.linspace(0, 1, 60)
    return [(float(x), float(np.searchsorted(times, x * times[-1], side="right") / len(times))) for x in at]


def drift(size: Size) -> Part:
    """Realised lengths of the workload over a run's steps."""
    finals = [
        [np.array([t.final for t in workload.batch(step)]) for step in range(size.steps)]
        for workload in (Workload(WorkloadConfig(), seed, size.steps, size.groups, 16) for seed in range(size.seeds))
    ]
    first, last = ([float(of_seed[step].mean()) for of_seed in finals] for step in (0, -1))
    most = [float(of_seed[-1].max()) for of_seed in finals]
    why = "Kinds of work have lengths of their own; the tilt meets the mean only nearly."
    figures = [
        judged(BY_KEY["drift.first"], first, why, "the workload's mean_from"),
        judged(BY_KEY["drift.last"], last, why, "the workload's mean_to"),
        judged(BY_KEY["tools.extreme"], most, "No trajectory reached it.",
               "the workload's limit (40,960) and its longest kind of work (33,000)"),
    ]  # fmt: skip
    lines = {
        "mean": [(float(s + 1), float(np.mean([f[s].mean() for f in finals]))) for s in range(size.steps)],
        "99th percentile": [
            (float(s + 1), float(np.mean([np.percentile(f[s], 99) for f in finals]))) for s in range(size.steps)
        ],
    }
    dots = {"published mean": [(1.0, 2500.0), (float(size.steps), 11_500.0)]}
    return figures, [Plot("Drift of lengths", "step", "tokens of a trajectory", lines, dots)]


def routing(size: Size) -> Part:
    """Three routers on one static layout (8 × TP 1, 6 × TP 2, 3 × TP 4, one TP 8) under drift."""
    right: dict[str, list[float]] = {"cmlfq": [], "embedding": [], "mlfq": []}
    moved: dict[str, list[float]] = {"cmlfq": [], "embedding": [], "mlfq": []}
    for seed in range(size.seeds):
        config = WorkloadConfig(prompts=128)
        workload = Workload(config, seed, size.points, 48, 16)
        policies: Mapping[str, BucketPolicy] = {"cmlfq": CMlfq({}), "embedding": _embedding(config, seed),
                                                "mlfq": Mlfq({})}  # fmt: skip
        for name, policy in policies.items():
            totals = _routed(policy, workload, size.points, seed).totals
            right[name].append(100 * totals.right / totals.decisions)
            moved[name].append(100 * totals.moved / totals.context)
    text = (
        "Per decision at a tool return; the definition and the bounds (2.5K, 6.5K, 13.5K) move it more than the router."
    )
    lean = "how much prompts differ (the workload's lean, 0.4), which is not published"
    return [
        judged(BY_KEY["routing.cmlfq"], right["cmlfq"], text,
               "the workload's switch and misreport rates (0.032 each)", text),
        judged(BY_KEY["routing.embedding"], right["embedding"],
               f"{text} A ridge regression on the prompt, fitted to a run at the mean of the drift.", lean, text),
        judged(BY_KEY["routing.mlfq"], right["mlfq"], text, good=text),
        judged(BY_KEY["moved.cmlfq"], moved["cmlfq"],
               "Counts every change of instance; most are the first move away from the shortest bucket."),
        judged(BY_KEY["moved.mlfq"], moved["mlfq"], "Each promotion is counted once with its context."),
    ], []  # fmt: skip


def _embedding(config: WorkloadConfig, seed: int) -> EmbeddingLike:
    """Fitted offline, as such a predictor is: to other trajectories of the same prompts, at the drift's mean."""
    middle = (config.mean_from + config.mean_to) / 2
    steady = config.model_copy(update={"mean_from": middle, "mean_to": middle})
    offline = Workload(steady, seed, 1, config.prompts, 8)
    traces = [trace for number in range(config.prompts) for trace in offline.group(10_000 + number)]
    fitted = EmbeddingLikeConfig.fit(PromptSample(t.prompt, t.prompt_tokens, t.final) for t in traces)
    return EmbeddingLike(fitted.model_dump())


def _routed(policy: BucketPolicy, workload: Workload, steps: int, seed: int) -> RolloutSimulation:
    costs = RolloutCosts.from_specs(load_model("Qwen3-14B"), load_hardware("a800_80g"))
    buckets = [Bucket(1, 2500), Bucket(2, 6500), Bucket(4, 13_500), Bucket(8, None)]
    degrees = [1] * 8 + [2] * 6 + [4] * 3 + [8]
    engines = [Engine(f"e{i}", f"n{i // 6}", costs.of(tp)) for i, tp in enumerate(degrees)]
    simulation = RolloutSimulation(engines, buckets, policy, _moves(), seed=seed)
    for step in range(steps):
        _played(simulation, workload, step)
    return simulation


_LADDER = ("static_uniform", "planner", "heterogeneous", "cmlfq", "elastic")
_RUNGS = ("uniform", "planner", "heterogeneous", "cmlfq", "elastic")


def ablation(size: Size, progress: Callable[[str], None]) -> Part:
    """The ablation ladder under drift, a colocated system beside it: by derived costs, and by the published profile's
    (fitted to the published throughput points)."""
    figures: list[Figure] = []
    lines: dict[str, Points] = {}
    for profile, label in ((None, "derived costs"), ("a800_published", "published profile")):
        scenario = Scenario.model_validate(
            {
                "name": "ablation", "profile": profile, "steps": size.steps, "groups": size.groups,
                "rescore": size.rescore, "variants": (*_LADDER, "colocated"), "seeds": tuple(range(size.seeds)),
            }
        )  # fmt: skip
        results = compare(scenario, progress)
        figures += _ladder(results[:-1], results[-1], label)
        lines[f"simulated, {label}"] = [(float(i), r.throughput) for i, r in enumerate(results[:-1])]
        if profile is None:
            figures += _switching(scenario, results[len(_LADDER) - 1])
    ladder = [BY_KEY[f"ablation.{rung}"] for rung in _RUNGS]
    dots = {"published": [(float(i), figure.value) for i, figure in enumerate(ladder)]}
    title = "Ablation: 0 static uniform, 1 + planner, 2 + heterogeneous TP, 3 + C-MLFQ, 4 + elastic"
    return figures, [Plot(title, "rung", "tok/s/GPU", lines, dots)]


def _ladder(rungs: Sequence[Compared], colocated: Compared, label: str) -> list[Figure]:
    tuned = "" if label == "derived costs" else "rollout costs, fitted to the published throughput points"
    absolute = "The absolute figure depends on workload and batch size, which are not published."
    changes = sum(result.changes for result in rungs[-1].results)
    reasons = {
        "planner": "Likely: TP 8 on half of the devices is already close to the best homogeneous plan.",
        "heterogeneous": "Likely: TP 4 and 8 are better in throughput and in latency beyond short contexts, so mixing "
        "degrees gains little.",
        "cmlfq": "Likely: least-loaded routing balances what routing by length leaves idle, and with KV in host "
        "memory a change of instance costs it little.",
        "elastic": f"The replanner made {changes} change(s) in {len(rungs[-1].results)} run(s): both sides slow down "
        "as lengths drift, and the best split moves little.",
    }
    if tuned:
        reasons["planner"] = "Likely: the fitted costs penalise TP 8, the uniform layout, at short contexts."
    why = "The sum of the steps; see each."
    by_seed = [[result.throughput for result in rung.results] for rung in rungs]
    figures = [
        judged(BY_KEY[f"ablation.{key}"], values, absolute, tuned, variant=label)
        for key, values in zip(_RUNGS, by_seed, strict=True)
    ]
    for i, key in enumerate(_RUNGS[1:], 1):
        gains = [after - before for before, after in zip(by_seed[i - 1], by_seed[i], strict=True)]
        figures.append(judged(BY_KEY[f"ablation.gain.{key}"], gains, reasons[key], tuned, variant=label))
    total = [100 * (last / first - 1) for first, last in zip(by_seed[0], by_seed[-1], strict=True)]
    figures.append(judged(BY_KEY["ablation.total"], total, why, tuned, variant=label))
    over = [100 * e / c.throughput for e, c in zip(by_seed[-1], colocated.results, strict=True)]
    peer = "Against the simulated colocated policy, which lacks what another system's runs cost beside its schedule."
    figures.append(judged(BY_KEY["gain.swe"], over, peer, tuned, peer, label))
    return figures


def _switching(scenario: Scenario, elastic: Compared) -> list[Figure]:
    """Step time and switching share of the elastic runs."""
    steps = [float(np.mean([s.seconds for s in r.steps[1:]])) for r in elastic.results]
    cost = scenario.activation_seconds + scenario.join_seconds
    shares = [100 * r.changes * cost / r.seconds for r in elastic.results]
    changes = sum(r.changes for r in elastic.results)
    size = f"{scenario.groups * scenario.members} trajectories a step here; the published batch size is not known."
    arithmetic = "By the published seconds alone, (10.8 + 4.4) / 454.16 = 3.3 %; with the snapshot's 3.6 s 4.1 %."
    share = BY_KEY["switch.share"]
    none = f"Nothing was switched in these runs. {arithmetic}"
    what = f"{changes} changes in {len(shares)} run(s). {arithmetic}"
    return [
        judged(BY_KEY["switch.step"], steps, size, "the number of trajectories a step, which is not published", size),
        judged(share, shares, what, "seconds of a change, which are the published ones", what)
        if changes
        else incomparable(share, shares, none),
    ]
