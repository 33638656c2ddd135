"""C-MLFQ beside the baselines on drifting synthetic traces and on recorded ones: accuracy, moved tokens, makespan, over
seeds.

``cd tests && ../.venv/bin/python -m benchmarks.compare_policies [--seeds 5] [--first 0] [--slack …]``
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replay import COSTS, Cluster, Outcome, replay
from traces import Trace, Workload, drifting, epochs, quantile_bounds, read, scaled

from benchmarks.rows import Row, Rows
from libra.resources.types import Bucket
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.cmlfq.router import RouterConfig
from libra.scheduler_plugin.policy.base import BucketPolicy
from libra.scheduler_plugin.policy.embedding_like import EmbeddingLike, EmbeddingLikeConfig, PromptSample
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.policy.length_threshold import LengthThreshold
from libra.scheduler_plugin.policy.mlfq import Mlfq
from libra.scheduler_plugin.policy.oracle import Oracle

Steps = Sequence[Sequence[Trace]]
Found = Mapping[str, Sequence[Outcome]]
CLUSTER = Cluster(
    buckets=(Bucket(1, 2_600), Bucket(2, 6_500), Bucket(4, 13_500), Bucket(8, None)), counts=(4, 2, 1, 1), slots=256
)
"""24 devices; bounds in the valleys between the workload's kinds."""
MEANS = (4_000.0, 11_000.0)
"""Mean length in tokens of the first and the last step."""
OPTIONS: Mapping[str, Any] = {"cost": COSTS.model_dump(exclude_unset=True), "half_life": 512}
RECORDED_SCALE = 100
Measure = tuple[str, str, Callable[[Outcome], float]]
MEASURES: tuple[Measure, ...] = (
    ("decision_accuracy", "", lambda outcome: outcome.decision_accuracy),
    ("trajectory_accuracy", "", lambda outcome: outcome.trajectory_accuracy),
    ("moved_share", "", lambda outcome: outcome.moved_share),
    ("makespan", "s", lambda outcome: outcome.makespan),
)


def policies(steps: Steps, options: Mapping[str, Any] = OPTIONS) -> dict[str, Callable[[], BucketPolicy]]:
    """The policies; `embedding_like` is fitted on the first step, as one that is fitted offline would be. ``options``:
    C-MLFQ's."""

    def embedding_like() -> BucketPolicy:
        seen = (PromptSample(t.prompt, t.prompt_tokens, t.final) for t in steps[0])
        return EmbeddingLike(EmbeddingLikeConfig.fit(seen).model_dump())

    final = {trace.name: trace.final for traces in steps for trace in traces}
    return {
        "least_loaded": lambda: LeastLoaded({}),
        "mlfq": lambda: Mlfq({}),
        "length_threshold": lambda: LengthThreshold({}),
        "embedding_like": embedding_like,
        "cmlfq": lambda: CMlfq(options),
        "oracle": lambda: Oracle({"final": final}),
    }


def synthetic(seeds: Sequence[int], steps: int = 4, groups: int = 24, members: int = 8) -> list[Steps]:
    """A drifting workload for each seed."""
    return [drifting(Workload(seed), steps, MEANS, groups, members) for seed in seeds]


def recorded(seeds: Sequence[int]) -> list[Steps]:
    """The recorded trajectories of `hop`, at a hundred times their tokens, in four steps; a seed says which members of
    a prompt come in which step, and in what order prompts arrive."""
    traces = scaled(read(), RECORDED_SCALE)
    return [epochs(traces, 2, seed) for seed in seeds]


def recorded_cluster() -> Cluster:
    """Eight devices, for the recorded trajectories; bounds at quantiles of their lengths."""
    bounds = quantile_bounds(scaled(read(), RECORDED_SCALE), (0.4, 0.75))
    return Cluster((Bucket(1, bounds[0]), Bucket(2, bounds[1]), Bucket(4, None)), (2, 1, 1), slots=64)


def race(
    runs: Sequence[Steps], cluster: Cluster = CLUSTER, only: Sequence[str] = (), options: Mapping[str, Any] = OPTIONS
) -> Found:
    """Outcomes by policy, one a run; its first step is for learning."""
    found: dict[str, list[Outcome]] = {}
    for played in runs:
        for name, make in policies(played, options).items():
            if not only or name in only:
                found.setdefault(name, []).append(replay(make(), cluster, played, skip=1))
    return found


def run(seeds: int = 5) -> Rows:
    """Rows for the table of benchmarks: means over the seeds, each beside C-MLFQ's peer `mlfq` where that has one."""
    rows: Rows = {}
    for kind, found in comparisons(range(seeds)).items():
        sys.stdout.write(f"{kind}, {seeds} seeds: mean (standard deviation)\n{table(found)}\n")
        for name, outcomes in found.items():
            for measure, unit, of in MEASURES:
                value = statistics.mean(of(outcome) for outcome in outcomes)
                peer = statistics.mean(of(outcome) for outcome in found["mlfq"])
                deviation = statistics.stdev(of(outcome) for outcome in outcomes)
                rows[f"cmlfq.compare.{kind}.{name}.{measure}"] = Row(value, unit, peer, f"mlfq; sd {deviation:.3g}")
    return rows


def comparisons(seeds: Sequence[int]) -> dict[str, Found]:
    """Every policy on both kinds of traces."""
    return {"synthetic": race(synthetic(seeds)), "recorded": race(recorded(seeds), recorded_cluster())}


def table(found: Found) -> str:
    """The comparison as text: mean and, in brackets, the standard deviation over seeds."""
    lines = [f"{'policy':18}{'decision %':>15}{'trajectory %':>15}{'moved %':>15}{'makespan s':>17}{'/ mlfq':>14}"]
    for name, outcomes in found.items():
        ratios = [o.makespan / m.makespan for o, m in zip(outcomes, found["mlfq"], strict=True)]
        columns = (
            _spread([100 * o.decision_accuracy for o in outcomes], 1),
            _spread([100 * o.trajectory_accuracy for o in outcomes], 1),
            _spread([100 * o.moved_share for o in outcomes], 1),
            _spread([o.makespan for o in outcomes], 0),
            _spread(ratios, 3),
        )
        lines.append(f"{name:18}{columns[0]:>15}{columns[1]:>15}{columns[2]:>15}{columns[3]:>17}{columns[4]:>14}")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ({deviation:.{digits}f})"


def main() -> None:
    """Print the tables, as markdown if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seeds", 5), ("first", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--slack", type=float, default=RouterConfig().slack)
    asked = parser.parse_args()
    seeds, options = range(asked.first, asked.first + asked.seeds), {**OPTIONS, "router": {"slack": asked.slack}}
    for kind, runs, cluster in (
        ("synthetic", synthetic(seeds), CLUSTER),
        ("recorded", recorded(seeds), recorded_cluster()),
    ):
        sys.stdout.write(f"{kind}\n{table(race(runs, cluster, options=options))}\n")


if __name__ == "__main__":
    main()
