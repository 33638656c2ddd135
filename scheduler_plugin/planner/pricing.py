"""What a plan costs for other requests than those that it was made for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from libra.resources.cost_model import Requests, RolloutCosts
from libra.resources.types import KindLayout, RequestRecord, RolloutLayout
from libra.scheduler_plugin.planner.layouts import RolloutSide


def layout_seconds(layout: RolloutLayout, records: Sequence[RequestRecord], costs: RolloutCosts) -> float:
    """Rollout seconds of ``layout``: each request in the first bucket that holds its final context, dealt there longest
    work first to the least loaded. Infinite when a request fits no instance of its bucket."""
    if not records:
        return 0.0
    requests = Requests.from_records(records)
    slowest, lower = 0.0, -1.0
    for bucket in layout.buckets:
        upper = float("inf") if bucket.max_context is None else float(bucket.max_context)
        mine = requests.take((requests.context > lower) & (requests.context <= upper))
        lower = upper
        if not len(mine):
            continue
        side = RolloutSide(mine, costs)
        counts = (
            side.counts_of(layout)
            if bucket.tp is None
            else tuple(bucket.instances if tp == bucket.tp else 0 for tp in side.degrees)
        )
        slowest = max(slowest, side.mixed_seconds(counts))
    return slowest


def dealt(parts: Sequence[KindLayout], records: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    """Which records each part serves: by their class; a record of a domain that no part names goes where the longest
    contexts go; parts that serve whatever comes get shares by their devices, long and short alike."""
    rolling = [i for i, part in enumerate(parts) if part.layout.instances]
    found: list[list[RequestRecord]] = [[] for _ in parts]
    if len(rolling) == 1:
        found[rolling[0]] = list(records)
        return found
    given = [(domain, upto, i) for i in rolling for domain, upto in parts[i].serves]
    if not given:
        weights = [parts[i].layout.gpus for i in rolling]
        for record in sorted(records, key=lambda r: r.context):
            least = min(range(len(rolling)), key=lambda k: (len(found[rolling[k]]) + 1) / weights[k])
            found[rolling[least]].append(record)
        return found
    for record in records:
        mine = [(float("inf") if upto is None else upto, i) for domain, upto, i in given if domain == record.domain]
        fitting = [each for each in mine if record.context <= each[0]]
        found[min(fitting)[1] if fitting else given[-1][2]].append(record)
    return found
