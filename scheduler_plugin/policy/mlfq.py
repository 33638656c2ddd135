"""Baseline ``mlfq``: the classic multi-level feedback queue over contexts.

Invariant: a trajectory starts in the shortest bucket that fits and is promoted when, and only when, its context
outgrows its bucket; it is never demoted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from libra.resources.config import Config
from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.policy.balance import choose, index_of, instance_at, placement, smallest_holding
from libra.scheduler_plugin.policy.base import BucketPolicy, Placement, PlacementRequest
from libra.scheduler_plugin.policy.options import parsed


class MlfqConfig(Config):
    """Options of ``mlfq``."""

    balance_margin: float = Field(default=0.5, ge=0)
    """Within a bucket: how much more loaded, as a fraction, the present instance may be before a segment leaves it."""


class Mlfq(BucketPolicy):
    """Promotes what outgrows its bucket."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._config = parsed(MlfqConfig, "mlfq", options)

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        level = self._level(request.context, buckets)
        current = instance_at(request.current, instances)
        present = None if current is None else index_of(current.tp, buckets)
        if present is not None:
            level = max(level, present)
        margin = self._config.balance_margin
        return placement(buckets[level], choose(instances, buckets[level].tp, request.context, current, margin))

    def _level(self, context: int, buckets: Sequence[Bucket]) -> int:
        return smallest_holding(context, buckets)
