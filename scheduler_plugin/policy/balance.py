"""Choosing among buckets and, within one, among its instances. Shared by the policies; pure.

Invariants: a chosen bucket holds the context; within a bucket a trajectory stays where its KV is unless another
instance, with the trajectory on it, would still be less loaded by more than ``margin``. (Eager rebalancing pays a move
for every small difference; pure stickiness leaves instances idle.)
"""

from __future__ import annotations

from collections.abc import Sequence

from libra.resources.tags import rollout_tag
from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.policy.base import Placement


def bucket_of(length: float, buckets: Sequence[Bucket]) -> int:
    """Index of the first bucket whose bound is at least ``length`` tokens, the last one's when none is."""
    for index, bucket in enumerate(buckets):
        if bucket.max_context is None or length <= bucket.max_context:
            return index
    return len(buckets) - 1


def smallest_holding(context: int, buckets: Sequence[Bucket]) -> int:
    """Index of the first bucket that holds ``context`` tokens; `ValueError` when none does."""
    index = bucket_of(context, buckets)
    bound = buckets[index].max_context
    if bound is not None and context > bound:
        bounds = ", ".join(f"tp {bucket.tp}: {bucket.max_context}" for bucket in buckets)
        raise ValueError(
            f"no bucket holds a context of {context} tokens (bounds: {bounds}); raise the last bucket's bound"
        )
    return index


def instance_at(address: str | None, instances: Sequence[RolloutInstance]) -> RolloutInstance | None:
    """The instance at ``address`` if it is ready."""
    if address is not None:
        for instance in instances:
            if instance.address == address:
                return instance
    return None


def index_of(tp: int, buckets: Sequence[Bucket]) -> int | None:
    """Index of the bucket of TP degree ``tp``."""
    for index, bucket in enumerate(buckets):
        if bucket.tp == tp:
            return index
    return None


def least_loaded(instances: Sequence[RolloutInstance]) -> RolloutInstance | None:
    """The instance with the fewest resident tokens (then sequences, then by name); None of none."""
    best: RolloutInstance | None = None
    for instance in instances:
        if best is None or _load(instance) < _load(best):
            best = instance
    return best


def choose(
    instances: Sequence[RolloutInstance], tp: int, context: int, current: RolloutInstance | None, margin: float
) -> RolloutInstance | None:
    """The instance of degree ``tp`` for a trajectory of ``context`` tokens; None when none is ready. ``current``: the
    instance that holds its KV, whose load counts it already."""
    best = least_loaded([instance for instance in instances if instance.tp == tp])
    if current is None or current.tp != tp or best is None:
        return best
    # Compare the load that would be there with the load that is there, both with this trajectory.
    return best if current.tokens > (1.0 + margin) * (best.tokens + context) else current


def placement(bucket: Bucket, instance: RolloutInstance | None) -> Placement:
    """Under the bucket's tag, on ``instance`` or whichever is ready first."""
    return Placement(rollout_tag(bucket.tp), None if instance is None else instance.address)


def _load(instance: RolloutInstance) -> tuple[int, int, str]:
    return instance.tokens, instance.sequences, instance.name
