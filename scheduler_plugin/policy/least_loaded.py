"""Baseline ``least_loaded``: lengths are ignored, load decides.

Invariant: of the instances whose bucket holds the context, the first segment goes to the one with the smallest share of
its capacity in use; later ones stay, unless the bucket no longer holds the context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from libra.resources.config import Config
from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.policy.balance import index_of, instance_at, placement, smallest_holding
from libra.scheduler_plugin.policy.base import BucketPolicy, Placement, PlacementRequest
from libra.scheduler_plugin.policy.options import parsed


class LeastLoadedConfig(Config):
    """Options of ``least_loaded``."""

    balance_margin: float = Field(default=0.5, ge=0)
    """How much more loaded, as a fraction, the present instance may be before a segment leaves it."""


class LeastLoaded(BucketPolicy):
    """Load is resident tokens for each device (a TP degree's worth of memory bandwidth and KV room)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._config = parsed(LeastLoadedConfig, "least_loaded", options)

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        smallest = smallest_holding(request.context, buckets)
        holding = {bucket.tp: bucket for bucket in buckets[smallest:]}
        able = [instance for instance in instances if instance.tp in holding]
        if not able:
            return placement(buckets[smallest], None)
        best = min(able, key=lambda instance: (instance.tokens / instance.tp, instance.sequences, instance.name))
        current = instance_at(request.current, able)
        if current is not None:
            there = (best.tokens + request.context) / best.tp
            if current.tokens / current.tp <= (1.0 + self._config.balance_margin) * there:
                best = current
        index = index_of(best.tp, buckets)
        assert index is not None
        return placement(buckets[index], best)
