"""Binding by a length that is known, or guessed, before the trajectory starts. The base of two baselines.

Invariant: a trajectory's bucket is that of its told final context as long as it holds the present one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.policy.balance import bucket_of, choose, instance_at, placement, smallest_holding
from libra.scheduler_plugin.policy.base import BucketPolicy, Placement, PlacementRequest


class StaticPolicy(BucketPolicy):
    """Asks `final_context` and binds to its bucket."""

    balance_margin = 0.5

    @abstractmethod
    def final_context(self, request: PlacementRequest) -> float:
        """The final context in tokens that the trajectory is taken to have."""

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        smallest = smallest_holding(request.context, buckets)
        level = max(smallest, bucket_of(self.final_context(request), buckets))
        current = instance_at(request.current, instances)
        found = choose(instances, buckets[level].tp, request.context, current, self.balance_margin)
        return placement(buckets[level], found)
