"""Rollout layouts on a number of devices: the exact partition, greedy mixing, and the best homogeneous one.

Invariant: all three are priced by the same evaluator, and `best` is never above the homogeneous one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from libra.native.partition import PartitionSolver, Solution
from libra.resources.cost_model import Requests, RolloutCosts, partition_solver
from libra.resources.types import BucketPlan, InstancePlan, RolloutLayout
from libra.resources.types.planning import LayoutKind

Counts = tuple[int, ...]
"""Instances of each level of the costs."""


@dataclass(eq=False)
class RolloutSide:
    """Layouts for these requests and costs."""

    requests: Requests
    costs: RolloutCosts
    _mixed: dict[Counts, float] = field(default_factory=dict, repr=False)
    _solved: dict[int, Solution] = field(default_factory=dict, repr=False)
    _best_mixed: dict[int, tuple[Counts, float] | None] = field(default_factory=dict, repr=False)

    @cached_property
    def solver(self) -> PartitionSolver:
        """The exact solver; its arrays are built once."""
        return partition_solver(self.requests, self.costs)

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degree of each level."""
        return tuple(step.tp for step in self.costs.steps)

    @property
    def smallest(self) -> int:
        """Fewest devices that hold the longest request."""
        longest = float(self.requests.context[-1])
        fitting = [step.tp for step in self.costs.steps if step.capacity >= longest]
        return min(fitting, default=0)

    def solve(self, gpus: int) -> Solution:
        """The exact optimum of contiguous intervals, TP ascending."""
        if gpus not in self._solved:
            self._solved[gpus] = self.solver.solve(gpus)
        return self._solved[gpus]

    def partition(self, gpus: int) -> RolloutLayout | None:
        """The layout of `solve`; None when the longest request fits nowhere."""
        solution = self.solve(gpus)
        return self._from_pieces(solution) if solution.pieces else None

    def _from_pieces(self, solution: Solution) -> RolloutLayout:
        context = self.requests.context
        instances = tuple(
            InstancePlan(
                self.degrees[p.level], int(context[p.first]), int(context[p.last - 1]), p.last - p.first,
                self.solver.cost(p),
            )
            for p in solution.pieces
        )  # fmt: skip
        return RolloutLayout("partition", solution.seconds, instances, _buckets(instances))

    def homogeneous_counts(self, gpus: int) -> list[Counts]:
        """As many instances as fit of one degree, for each degree."""
        levels = len(self.degrees)
        return [
            tuple(gpus // tp if i == level else 0 for i in range(levels))
            for level, tp in enumerate(self.degrees)
            if tp <= gpus
        ]

    def mixed_seconds(self, counts: Counts) -> float:
        """Makespan of greedy mixing over ``counts``; infinite when a request fits no instance."""
        if counts not in self._mixed:
            self._mixed[counts] = self.solver.mix_seconds(counts)
        return self._mixed[counts]

    def best_mixed(self, gpus: int) -> tuple[Counts, float] | None:
        """The mixing that ends first of every homogeneous layout on ``gpus`` devices and of the exact partition's
        degrees."""
        if gpus not in self._best_mixed:
            layout = self.partition(gpus)
            own = [] if layout is None else [self.counts_of(layout)]
            self._best_mixed[gpus] = self.best_counts([*self.homogeneous_counts(gpus), *own])
        return self._best_mixed[gpus]

    def best_counts(self, candidates: Iterable[Counts]) -> tuple[Counts, float] | None:
        """The candidate whose mixing ends first."""
        priced = [(self.mixed_seconds(counts), counts) for counts in candidates]
        finite = [each for each in priced if each[0] < float("inf")]
        if not finite:
            return None
        seconds, counts = min(finite)
        return counts, seconds

    def mixed(self, counts: Counts) -> RolloutLayout:
        """The layout of greedy mixing over ``counts``: one unbounded bucket, routed least-loaded."""
        seconds, where = self.solver.mix(counts)
        kind: LayoutKind = "homogeneous" if sum(c > 0 for c in counts) == 1 else "mixing"
        context = self.requests.context
        instances, number = [], 0
        for level, count in enumerate(counts):
            for _ in range(count):
                mine = context[where == number]
                number += 1
                tp = self.degrees[level]
                first, last = (int(mine[0]), int(mine[-1])) if len(mine) else (0, 0)
                instances.append(InstancePlan(tp, first, last, len(mine), seconds))
        tp_of = self.degrees[next(i for i, c in enumerate(counts) if c)] if kind == "homogeneous" else None
        return RolloutLayout(kind, seconds, tuple(instances), (BucketPlan(tp_of, None, len(instances)),))

    def counts_of(self, layout: RolloutLayout) -> Counts:
        """Instances of each level."""
        return tuple(layout.degrees.count(tp) for tp in self.degrees)


def scaled(counts: Counts, degrees: tuple[int, ...], gpus: int) -> Counts:
    """About the same shares of devices on another number of them: floor of each share, what is left filled from the
    largest degree down, among those that ``counts`` uses."""
    used = sum(c * tp for c, tp in zip(counts, degrees, strict=True))
    found = [int(c * gpus // used) for c in counts]
    left = gpus - sum(c * tp for c, tp in zip(found, degrees, strict=True))
    for level in reversed(range(len(counts))):
        if counts[level]:
            found[level] += left // degrees[level]
            left %= degrees[level]
    return tuple(found)


def _buckets(instances: tuple[InstancePlan, ...]) -> tuple[BucketPlan, ...]:
    """Runs of equal TP, at most one a degree; the last one has no bound."""
    found: list[BucketPlan] = []
    for instance in instances:
        if found and found[-1].tp == instance.tp:
            found[-1] = BucketPlan(instance.tp, instance.last_context, found[-1].instances + 1)
        else:
            found.append(BucketPlan(instance.tp, instance.last_context, 1))
    if found:
        found[-1] = BucketPlan(found[-1].tp, None, found[-1].instances)
    return tuple(found)
