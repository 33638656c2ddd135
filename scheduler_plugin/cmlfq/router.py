"""The decision at a tool return: stay, or bind the continuation to another bucket.

In order: a context that its bucket no longer holds is *forced* up. Otherwise a move needs mean and P90 of the final
context in one bucket, another than the present one (*agreed*); a distance from the bound that grows with the moves the
trajectory has made (*damped*); room for the KV; and a gain, in decode seconds, above what the move takes (*pays*).

Invariants: the answer's bucket holds the context; a trajectory makes at most ``max_moves`` moves that are not forced;
a decision costs O(depth of the tree's path + instances).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from libra.resources.config import Config
from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.cmlfq.cost import CostModel, MoveEstimate
from libra.scheduler_plugin.cmlfq.estimate import Estimate
from libra.scheduler_plugin.policy.balance import bucket_of, choose, index_of, smallest_holding

Reason = Literal["entry", "lost", "forced", "predicted", "no evidence", "agrees", "split", "damped", "full", "dear"]
"""Why a bucket was chosen. Placed: first segment (entry), KV gone (lost), outgrown (forced), moved (predicted). Stayed:
nothing known (no evidence), in the right bucket (agrees), mean and P90 in two buckets (split), too near a bound or too
many moves (damped), no room or no ready instance there (full), the move does not pay (dear)."""


class RouterConfig(Config):
    """How eagerly to move."""

    balance_margin: float = Field(default=0.5, ge=0)
    """Within a bucket: how much more loaded, as a fraction, the present instance may be before a segment leaves it."""
    damping: float = Field(default=0.05, ge=0, lt=1)
    """Distance from a bucket's bound that a move needs, as a fraction of the bound, for each move made before."""
    rest: int = Field(default=1, ge=0)
    """Tool returns after a move during which only a forced move may follow."""
    max_moves: int = Field(default=4, ge=0)
    """Moves of a trajectory that are not forced, at most."""
    gain: float = Field(default=1.0, ge=0)
    """A move pays when the decode seconds it saves exceed this many times the seconds it takes."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A trajectory at a return. ``context`` in tokens; ``current``: the instance that holds its KV, if it is ready;
    ``address``: where the KV is, ready or not; ``moves`` made between buckets; ``rested``: returns since the last one;
    ``first``: no segment has run yet."""

    context: int
    current: RolloutInstance | None
    address: str | None
    moves: int
    rested: int
    first: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """Bucket (by index) and instance (None: none is ready there) with the reason, and what was known: the estimate, how
    the KV gets there, and the decode seconds saved by the move that was considered (0 when none was)."""

    bucket: int
    instance: RolloutInstance | None
    reason: Reason
    estimate: Estimate | None = None
    move: MoveEstimate | None = None
    saves: float = 0.0


@dataclass(frozen=True, slots=True)
class _Case:
    """What one decision is about."""

    at: Standing
    estimate: Estimate | None
    instances: Sequence[RolloutInstance]
    buckets: Sequence[Bucket]


class Router:
    """Pure: what it answers depends on its arguments and on the rates that its cost model was told."""

    def __init__(self, config: RouterConfig, costs: CostModel) -> None:
        self.config, self.costs = config, costs

    def decide(
        self,
        at: Standing,
        estimate: Estimate | None,
        instances: Sequence[RolloutInstance],
        buckets: Sequence[Bucket],
    ) -> Decision:
        """Raises `ValueError` when no bucket holds the context."""
        case = _Case(at, estimate, instances, buckets)
        smallest = self._smallest(case)
        if at.first:
            return self._bind(case, smallest, "entry")
        present = None if at.current is None else index_of(at.current.tp, buckets)
        target = _agreed(case)
        if present is None or present < smallest or not self.costs.holds(buckets[present].tp, at.context):
            wanted = smallest if target is None or not self._room(case, target) else max(smallest, target)
            return self._bind(case, wanted, "lost" if present is None else "forced")
        if target is None:
            return self._bind(case, present, "no evidence" if estimate is None else "split")
        target = max(target, smallest)
        if target == present:
            return self._bind(case, present, "agrees")
        if self._damped(case, present, target):
            return self._bind(case, present, "damped")
        if not self._room(case, target):
            return self._bind(case, present, "full")
        return self._weigh(case, present, target)

    def _weigh(self, case: _Case, present: int, target: int) -> Decision:
        """Move from bucket ``present`` to ``target`` if it pays."""
        at, estimate = case.at, case.estimate
        there = choose(case.instances, case.buckets[target].tp, at.context, None, self.config.balance_margin)
        stay = self._bind(case, present, "dear" if there is not None else "full")
        if there is None or stay.instance is None or estimate is None:
            return stay
        grows = estimate.mean - at.context
        saves = self.costs.decode_seconds(stay.instance, at.context, grows, stay.instance is at.current)
        saves -= self.costs.decode_seconds(there, at.context, grows, False)
        move = self.costs.move(at.context, at.address, there)
        if saves > self.config.gain * move.seconds:
            return Decision(target, there, "predicted", estimate, move, saves)
        return Decision(present, stay.instance, "dear", estimate, stay.move, saves)

    def _damped(self, case: _Case, present: int, target: int) -> bool:
        at, estimate = case.at, case.estimate
        if at.moves >= self.config.max_moves or at.rested < self.config.rest or estimate is None:
            return True
        distance = self.config.damping * at.moves
        if target > present:
            bound = case.buckets[target - 1].max_context
            return bound is not None and estimate.mean < bound * (1.0 + distance)
        bound = case.buckets[target].max_context
        return bound is not None and estimate.p90 > bound * (1.0 - distance)

    def _bind(self, case: _Case, bucket: int, reason: Reason) -> Decision:
        at = case.at
        found = choose(case.instances, case.buckets[bucket].tp, at.context, at.current, self.config.balance_margin)
        move = None if found is None else self.costs.move(at.context, at.address, found)
        return Decision(bucket, found, reason, case.estimate, move)

    def _smallest(self, case: _Case) -> int:
        """The first bucket whose bound and whose KV hold the context."""
        context, buckets = case.at.context, case.buckets
        for index in range(smallest_holding(context, buckets), len(buckets)):
            if self.costs.holds(buckets[index].tp, context):
                return index
        raise ValueError(
            f"no bucket's KV holds a context of {context} tokens (cost.kv_tokens: {self.costs.config.kv_tokens}); "
            "use a larger TP degree for the last bucket"
        )

    def _room(self, case: _Case, bucket: int) -> bool:
        """Whether the bucket's KV holds what the trajectory may come to."""
        return case.estimate is not None and self.costs.holds(case.buckets[bucket].tp, case.estimate.p90)


def _agreed(case: _Case) -> int | None:
    """The bucket of mean and P90 if it is one."""
    if case.estimate is None:
        return None
    by_mean, by_p90 = bucket_of(case.estimate.mean, case.buckets), bucket_of(case.estimate.p90, case.buckets)
    return by_mean if by_mean == by_p90 else None
