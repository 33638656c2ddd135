"""C-MLFQ beside the baselines on drifting synthetic traces: accuracy, moved tokens, makespan, over seeds.

``cd tests && ../.venv/bin/python -m benchmarks.compare_policies [--seeds 5] [--first 0]
[--steps 8] [--groups 32] [--members 8]``
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replay import COSTS, Cluster, Outcome, replay
from traces import Trace, Workload, drifting

from libra.resources.types import Bucket
from libra.scheduler_plugin.cmlfq.policy import CMlfq
from libra.scheduler_plugin.policy.base import BucketPolicy
from libra.scheduler_plugin.policy.embedding_like import EmbeddingLike, EmbeddingLikeConfig, PromptSample
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.policy.length_threshold import LengthThreshold
from libra.scheduler_plugin.policy.mlfq import Mlfq
from libra.scheduler_plugin.policy.oracle import Oracle

Steps = Sequence[Sequence[Trace]]
CLUSTER = Cluster(
    buckets=(Bucket(1, 2_600), Bucket(2, 6_500), Bucket(4, 13_500), Bucket(8, None)), counts=(4, 2, 1, 1), slots=256
)
"""24 devices; bounds in the valleys between the workload's kinds."""
MEANS = (4_000.0, 11_000.0)
"""Mean length in tokens of the first and the last step."""
OPTIONS: Mapping[str, Any] = {"cost": COSTS.model_dump(exclude_unset=True), "half_life": 512}


def policies(steps: Steps) -> dict[str, Callable[[], BucketPolicy]]:
    """The policies; `embedding_like` is fitted on the first step, as one that is fitted offline would be."""

    def embedding_like() -> BucketPolicy:
        seen = (PromptSample(t.prompt, t.prompt_tokens, t.final) for t in steps[0])
        return EmbeddingLike(EmbeddingLikeConfig.fit(seen).model_dump())

    final = {trace.name: trace.final for traces in steps for trace in traces}
    return {
        "least_loaded": lambda: LeastLoaded({}),
        "mlfq": lambda: Mlfq({}),
        "length_threshold": lambda: LengthThreshold({}),
        "embedding_like": embedding_like,
        "cmlfq": lambda: CMlfq(OPTIONS),
        "oracle": lambda: Oracle({"final": final}),
    }


def compare(
    seeds: Sequence[int], steps: int, groups: int, members: int, only: Sequence[str] = (), cluster: Cluster = CLUSTER
) -> dict[str, list[Outcome]]:
    """Outcomes by policy, one a seed; the first step is for learning."""
    found: dict[str, list[Outcome]] = {}
    for seed in seeds:
        played = drifting(Workload(seed), steps, MEANS, groups, members)
        for name, make in policies(played).items():
            if not only or name in only:
                found.setdefault(name, []).append(replay(make(), cluster, played, skip=1))
    return found


def table(found: Mapping[str, Sequence[Outcome]]) -> str:
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
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seeds", 5), ("first", 0), ("steps", 8), ("groups", 32), ("members", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    found = compare(range(asked.first, asked.first + asked.seeds), asked.steps, asked.groups, asked.members)
    sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    main()
