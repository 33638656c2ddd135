"""Baseline ``length_threshold``: promotion by the present context at fixed thresholds, before it outgrows its bucket.

Invariant: as `mlfq`, with each bucket's bound replaced by its threshold for the purpose of promotion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from libra.resources.types import Bucket
from libra.scheduler_plugin.policy.balance import smallest_holding
from libra.scheduler_plugin.policy.mlfq import Mlfq, MlfqConfig
from libra.scheduler_plugin.policy.options import parsed


class LengthThresholdConfig(MlfqConfig):
    """Options of ``length_threshold``."""

    share: float = Field(default=0.5, gt=0, le=1)
    """The threshold of a bucket, as a share of its bound."""


class LengthThreshold(Mlfq):
    """Takes a context of more than ``share`` of a bucket's bound for one that will outgrow it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__({name: value for name, value in options.items() if name in MlfqConfig.model_fields})
        self.options = dict(options)
        self._thresholds = parsed(LengthThresholdConfig, "length_threshold", options)

    def _level(self, context: int, buckets: Sequence[Bucket]) -> int:
        level = smallest_holding(context, buckets)
        bound = buckets[level].max_context
        while level + 1 < len(buckets) and bound is not None and context > self._thresholds.share * bound:
            level += 1
            bound = buckets[level].max_context
        return level
