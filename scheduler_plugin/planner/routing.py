"""Routing as a plan wants it.

Invariant: where the plan's layout is mixed (every bucket unbounded, several degrees), segments go to the least loaded
instance of any degree; elsewhere the configured policy decides. That one is told of every end and move, whoever
decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra.resources.types import Bucket, Plan, RolloutInstance
from libra.scheduler_plugin.policy.base import BucketPolicy, FinishedTrajectory, Placement, PlacementRequest
from libra.scheduler_plugin.policy.least_loaded import LeastLoaded
from libra.scheduler_plugin.policy.moves import MoveOutcome


class PlanRouting(BucketPolicy):
    """``policy`` within bounded buckets, least loaded in a mixed one."""

    def __init__(self, policy: BucketPolicy) -> None:
        super().__init__({})
        self._policy, self._mixed = policy, LeastLoaded({})

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        mixed = len(buckets) > 1 and all(bucket.max_context is None for bucket in buckets)
        return (self._mixed if mixed else self._policy).place(request, instances, buckets)

    def observe(self, finished: FinishedTrajectory) -> None:
        self._policy.observe(finished)

    def moved(self, outcome: MoveOutcome) -> None:
        self._policy.moved(outcome)

    def metrics(self) -> dict[str, float]:
        return self._policy.metrics()

    def learned(self) -> bytes | None:
        return self._policy.learned()

    def relearn(self, data: bytes, keep: float) -> None:
        self._policy.relearn(data, keep)


def buckets_of(plan: Plan) -> tuple[Bucket, ...]:
    """The plan's buckets as policies take them. A mixed bucket is one unbounded bucket of every degree it has; a plan
    on several kinds of hardware is mixed, since buckets tell degrees apart and not kinds."""
    if len(plan.rollout) > 1:
        return tuple(Bucket(tp, None) for tp in sorted({tp for part in plan.rollout for tp in part.layout.degrees}))
    layout = plan.layout
    if any(bucket.tp is None for bucket in layout.buckets):
        return tuple(Bucket(tp, None) for tp in layout.counts())
    return tuple(Bucket(bucket.tp, bucket.max_context) for bucket in layout.buckets if bucket.tp is not None)
