"""Buckets by context: the smallest bucket that holds the context, sticky and least loaded within it.

Invariants: a segment never goes to a bucket whose bound is below its context; it stays where its KV is unless that
instance's bucket no longer holds it, or another instance of the bucket is less loaded by more than ``margin``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError

from libra.resources.config import Config
from libra.resources.errors import ConfigError
from libra.resources.tags import rollout_tag
from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.policy.base import BucketPolicy, Placement, PlacementRequest


class ContextBoundsConfig(Config):
    """Options of ``context_bounds``."""

    margin: float = Field(default=0.5, ge=0)
    """How much more loaded, as a fraction of the least loaded instance's resident tokens plus the context, the present
    instance may be before the segment moves; moving costs a prefill of the whole context."""


class ContextBounds(BucketPolicy):
    """The shipped policy."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        try:
            self._config = ContextBoundsConfig(**options)
        except ValidationError as error:
            problems = "; ".join(f"policy.{e['loc'][0]}: {e['msg']} (got {e['input']!r})" for e in error.errors())
            raise ConfigError(
                f"{problems}; context_bounds takes {', '.join(ContextBoundsConfig.model_fields)}"
            ) from None

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        tag_tp = _smallest(request.context, buckets).tp
        least = present = None
        for instance in instances:
            if instance.tp != tag_tp:
                continue
            if least is None or _load(instance) < _load(least):
                least = instance
            if instance.address == request.current:
                present = instance
        tag = rollout_tag(tag_tp)
        if least is None:
            return Placement(tag)
        if present is not None and not self._worth_moving(request.context, present, least):
            return Placement(tag, present.address)
        return Placement(tag, least.address)

    def _worth_moving(self, context: int, present: RolloutInstance, least: RolloutInstance) -> bool:
        # The present instance already counts this sequence; compare as if it were on neither.
        return present.tokens - context > (1.0 + self._config.margin) * (least.tokens + context)


def _smallest(context: int, buckets: Sequence[Bucket]) -> Bucket:
    for bucket in buckets:
        if bucket.max_context is None or context <= bucket.max_context:
            return bucket
    bounds = ", ".join(f"tp {bucket.tp}: {bucket.max_context}" for bucket in buckets)
    raise ValueError(f"no bucket holds a context of {context} tokens (bounds: {bounds}); raise the last bucket's bound")


def _load(instance: RolloutInstance) -> tuple[int, int, str]:
    return instance.tokens, instance.sequences, instance.name
