"""What the live trajectories are still going to cost each bucket.

Each may come to any of the lengths of its estimate: it grows in its present bucket up to the bound, then in the next
ones, where its context will force it. So a bucket's outlook counts the long trajectories that are still in shorter
buckets, too: moving one early takes room from them, staying uses instances that will be idle later.

Invariant: ``by_degree[tp]`` is the sum of what the followed trajectories were last noted with; one that was dropped
counts no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from libra.resources.types import Bucket
from libra.scheduler_plugin.cmlfq.cost import CostModel
from libra.scheduler_plugin.cmlfq.estimate import Estimate
from libra.scheduler_plugin.policy.balance import bucket_of

Shares = tuple[tuple[int, float], ...]
"""(TP degree, seconds) a bucket that a trajectory will burden."""


class Outlook:
    """Seconds of work to come, by TP degree."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.by_degree: dict[int, float] = {}
        """Work that the instances of a TP degree have before them, all together."""

    def shares(self, bucket: int, context: int, estimate: Estimate | None, buckets: Sequence[Bucket]) -> Shares:
        """How a trajectory in ``bucket`` with ``context`` tokens burdens the buckets; not at all without estimate."""
        if estimate is None:
            return ()
        finals = estimate.points
        if bucket_of(finals[0], buckets) == bucket_of(finals[-1], buckets):
            finals = (estimate.mean,)
        found = []
        start = float(context)
        for index in range(bucket, len(buckets)):
            bound = buckets[index].max_context
            end = math.inf if bound is None or index == len(buckets) - 1 else float(bound)
            tp = buckets[index].tp
            linear, quadratic = self._costs.work_rates(tp)
            work, before = 0.0, start * start
            for final in finals:
                if final > start:
                    until = final if final < end else end
                    work += linear * (until - start) + quadratic * (until * until - before)
            found.append((tp, work / len(finals)))
            if end >= finals[-1]:
                break
            start = max(start, end)
        return tuple(found)

    def replace(self, old: Shares, new: Shares) -> None:
        """A trajectory that burdened the buckets with ``old`` burdens them with ``new`` from now on."""
        seconds = self.by_degree
        for tp, work in old:
            seconds[tp] -= work
        for tp, work in new:
            seconds[tp] = seconds.get(tp, 0.0) + work
