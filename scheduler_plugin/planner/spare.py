"""What to do with devices that cannot shorten the step.

When the longest request or sequence bounds the step, fewer devices than there are reach the optimum. The others are not
left idle: lengths will drift and rollout runs ahead of training, so both sides grow in proportion to the fewest devices
that each needs. Invariant: the step's predicted seconds do not rise.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from libra.resources.types import InstancePlan, RolloutLayout
from libra.scheduler_plugin.planner.joint import TOLERANCE, Split
from libra.scheduler_plugin.planner.layouts import RolloutSide, scaled
from libra.scheduler_plugin.planner.tree import TrainTree


def rebalance(tree: TrainTree, rollout: RolloutSide, best: Split, budget: int) -> Split:
    """The split with spare devices put to use: by an exact partition, in proportion to what both sides need; beside a
    mixed layout, those that its instances leave over train."""
    if best.counts is not None:
        used = sum(count * tp for count, tp in zip(best.counts, rollout.degrees, strict=True))
        trained = tree.best(budget - used)
        assert trained is not None
        return replace(best, train=trained[0], train_seconds=trained[1])
    limit = best.seconds * (1 + TOLERANCE)
    needed = rollout.solver.probe(limit, budget - best.train.gpus).gpus
    least = tree.fewest(limit, budget - needed)
    assert least is not None
    spare = budget - needed - least[0].gpus
    trained = tree.best(least[0].gpus + spare * least[0].gpus // (least[0].gpus + needed))
    assert trained is not None
    return replace(best, train=trained[0], train_seconds=trained[1], rollout_gpus=budget - trained[0].gpus)


def spread(rollout: RolloutSide, layout: RolloutLayout, gpus: int, limit: float) -> RolloutLayout:
    """The partition's layout with its counts grown in proportion to ``gpus`` devices, each bucket's requests dealt anew
    among its instances; the layout itself when that would take longer than ``limit``."""
    degrees = rollout.degrees
    counts = scaled(rollout.counts_of(layout), degrees, gpus)
    if sum(counts) <= len(layout.instances):
        return layout
    instances: list[InstancePlan] = []
    buckets = []
    planned, at = iter(layout.instances), 0
    for bucket in layout.buckets:
        # By number, not by context: equal contexts may lie on both sides of a bound.
        end = at + sum(instance.requests for instance in islice(planned, bucket.instances))
        mine, at = rollout.requests.take(slice(at, end)), end
        level = degrees.index(bucket.tp or degrees[0])
        count = counts[level]
        part = RolloutSide(mine, rollout.costs)
        seconds, where = part.solver.mix(tuple(count if i == level else 0 for i in range(len(degrees))))
        for number in range(count):
            own = mine.context[where == number]
            span = (int(own[0]), int(own[-1])) if len(own) else (0, 0)
            instances.append(InstancePlan(degrees[level], *span, len(own), seconds))
        buckets.append(replace(bucket, instances=count))
    slowest = max(instance.seconds for instance in instances)
    if not np.isfinite(slowest) or slowest > limit:
        return layout
    return RolloutLayout(layout.kind, slowest, tuple(instances), tuple(buckets))
