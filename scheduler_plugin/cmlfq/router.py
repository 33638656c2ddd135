"""The decision at a tool return: stay, or bind the continuation to another bucket.

In order: a context that its bucket no longer holds is *forced* up, to the bucket that is done with it first among those
from the smallest to the lower one of mean's and P90's. Otherwise a move needs mean and P90 of the final
context in one bucket, another than the present one (*agreed*); a distance from the bound that grows with the moves the
trajectory has made (*damped*); room for the KV; and to *pay*: the seconds saved must exceed the move's. Seconds saved
are those by which the trajectory would be done earlier there than here, a bucket's instances sharing all the work
before them (`outlook`), plus ``slack`` of those here: what the comparison leaves out is that a trajectory which stays
will be forced there later, with more KV.

Invariants: the answer's bucket holds the context; a trajectory makes at most ``max_moves`` moves that are not forced;
a decision costs O(depth of the tree's path + instances).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from libra.resources.config import Config
from libra.resources.types import Bucket, RolloutInstance
from libra.scheduler_plugin.cmlfq.cost import CostModel
from libra.scheduler_plugin.cmlfq.estimate import Estimate
from libra.scheduler_plugin.policy.balance import bucket_of, choose, index_of, smallest_holding
from libra.scheduler_plugin.policy.moves import MoveEstimate

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
    slack: float = Field(default=0.75, ge=0)
    """How much later, as a fraction, a trajectory may be done in the bucket it belongs in than where it could also run:
    with 0, a move is made only if this trajectory gains by it. *Tuned* on traces in virtual time, five seeds
    (``benchmarks.compare_policies --slack``); synthetic, 0 → 0.75: right decisions 79 → 92 %, moved tokens 49 → 24 % of
    all, makespan 0.945 → 0.935 of ``mlfq``'s; recorded ones do not tell the two apart (60 %, 55 → 51 %, 0.855 → 0.852).
    More than 1 overloads the last bucket when the cluster is full."""
    gain: float = Field(default=1.0, ge=0)
    """A move pays when the seconds it saves exceed this many times the seconds it takes."""


@dataclass(slots=True)
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
    the KV gets there, and the seconds that the considered move saves (0 when none was considered)."""

    bucket: int
    instance: RolloutInstance | None
    reason: Reason
    estimate: Estimate | None = None
    move: MoveEstimate | None = None
    saves: float = 0.0


@dataclass(slots=True)
class _Case:
    """What one decision is about."""

    at: Standing
    estimate: Estimate | None
    instances: Sequence[RolloutInstance]
    buckets: Sequence[Bucket]
    before: Mapping[int, float]


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
        before: Mapping[int, float],
    ) -> Decision:
        """``before``: seconds of work that the instances of a TP degree have before them, all together, without this
        trajectory. Raises `ValueError` when no bucket holds the context."""
        case = _Case(at, estimate, instances, buckets, before)
        smallest = self._smallest(case)
        if at.first:
            return self._bind(case, smallest, "entry")
        present = None if at.current is None else index_of(at.current.tp, buckets)
        expected = _expected(case)
        if present is None or present < smallest or not self.costs.holds(buckets[present].tp, at.context):
            return self._bind(case, self._up_to(case, smallest, expected), "lost" if present is None else "forced")
        if expected is None:
            return self._bind(case, present, "no evidence")
        if expected[0] != expected[1]:
            return self._bind(case, present, "split")
        target = max(expected[0], smallest)
        if target == present:
            return self._bind(case, present, "agrees")
        if self._damped(case, present, target):
            return self._bind(case, present, "damped")
        if not self._room(case, target):
            return self._bind(case, present, "full")
        return self._weigh(case, present, target)

    def _up_to(self, case: _Case, smallest: int, expected: tuple[int, int] | None) -> int:
        """For a trajectory that has to be placed anew: the bucket that is done with it first, from ``smallest`` to the
        lower one of those of mean and P90. (One in between is no mistake: the context will force it on.)"""
        target = smallest if expected is None else min(expected)
        if target <= smallest or case.estimate is None or not self._room(case, target):
            return smallest
        final = case.estimate.mean
        done = [self._done_in(case, bucket, final) for bucket in range(smallest, target + 1)]
        if done[-1] <= (1.0 + self.config.slack) * min(done):
            return target
        return smallest + done.index(min(done))

    def _weigh(self, case: _Case, present: int, target: int) -> Decision:
        """Move from bucket ``present`` to ``target`` if it pays."""
        at, estimate = case.at, case.estimate
        there = choose(case.instances, case.buckets[target].tp, at.context, None, self.config.balance_margin)
        stay = self._bind(case, present, "dear" if there is not None else "full")
        if there is None or estimate is None:
            return stay
        here, then = self._done_in(case, present, estimate.mean), self._done_in(case, target, estimate.mean)
        move = self.costs.move(at.context, at.address, there)
        saves = here - then
        if saves + self.config.slack * here > self.config.gain * move.seconds:
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

    def _done_in(self, case: _Case, bucket: int, final: float) -> float:
        """Seconds until the trajectory is done if all that is left of it runs in ``bucket``."""
        tp, context = case.buckets[bucket].tp, case.at.context
        ready = sum(instance.tp == tp for instance in case.instances)
        work = case.before.get(tp, 0.0) + self.costs.work_seconds(tp, context, final)
        return self.costs.step_seconds(tp, final - context) + work / max(1, ready)

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
            f"no bucket's KV holds a context of {context} tokens (by TP degree: {self.costs.kv_tokens}); "
            "use a larger TP degree for the last bucket"
        )

    def _room(self, case: _Case, bucket: int) -> bool:
        """Whether the bucket's KV holds what the trajectory may come to."""
        return case.estimate is not None and self.costs.holds(case.buckets[bucket].tp, case.estimate.p90)


def _expected(case: _Case) -> tuple[int, int] | None:
    """The buckets of mean and P90."""
    if case.estimate is None:
        return None
    return bucket_of(case.estimate.mean, case.buckets), bucket_of(case.estimate.p90, case.buckets)
