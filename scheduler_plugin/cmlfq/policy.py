"""C-MLFQ behind the seam of bucket policies.

`CMlfq.place` notes the context at each return, because that is what a finished trajectory teaches: what was left at
each. Invariants: asking again for the same return gives the same answer unless something was learned or the load
changed; a trajectory that has ended leaves only what the tree learned; at most ``max_trails`` trajectories are followed
(of one forgotten or never seen, only what is known of it counts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import Field

from libra.resources.config import Config
from libra.resources.types import Bucket, RolloutInstance, ToolState
from libra.scheduler_plugin.cmlfq.cost import CostConfig, CostModel
from libra.scheduler_plugin.cmlfq.estimate import Estimator
from libra.scheduler_plugin.cmlfq.outlook import Outlook, Shares
from libra.scheduler_plugin.cmlfq.persistence import dumps, merge
from libra.scheduler_plugin.cmlfq.router import Decision, Reason, Router, RouterConfig, Standing
from libra.scheduler_plugin.cmlfq.tree import UNSEEN, Node, PrefixTree
from libra.scheduler_plugin.policy.balance import instance_at, placement
from libra.scheduler_plugin.policy.base import BucketPolicy, FinishedTrajectory, Placement, PlacementRequest
from libra.scheduler_plugin.policy.moves import MoveOutcome
from libra.scheduler_plugin.policy.options import parsed


class CMlfqConfig(Config):
    """Options of ``cmlfq``."""

    half_life: float = Field(default=4096.0, gt=0)
    """Finished trajectories after which what was learned counts half."""
    min_evidence: float = Field(default=3.0, gt=0)
    """Trajectories, at their present worth, that a node needs to speak."""
    shrinkage: float = Field(default=8.0, ge=0)
    """Trajectories of its own with which a prompt weighs as much as all prompts."""
    max_nodes: int = Field(default=200_000, ge=2)
    """Nodes of the tree; the least useful leaves go first."""
    max_depth: int = Field(default=64, ge=1)
    """Tool returns of a trajectory that the tree tells apart."""
    max_states: int = Field(default=4096, ge=2)
    """Distinct tool states; further ones count as one."""
    max_trails: int = Field(default=65_536, ge=1)
    """Live trajectories followed."""
    router: RouterConfig = RouterConfig()
    """How eagerly to move."""
    cost: CostConfig = CostConfig()
    """What moves and decoding cost."""


class _Trail:
    """A live trajectory: ``contexts[i]`` and ``degrees[i]``, its context and the TP degree its KV was at, when the
    segment after the i-th return was placed; None: not known (nobody asked then) or no KV. ``names``: what the tree
    calls its states so far; ``own``, ``everywhere``: its paths in the tree, kept because each return only adds to them.
    ``moves``: changes of the TP degree so far, ``rested``: returns since the last one. ``shares``: what it is still
    going to cost."""

    __slots__ = ("_last", "contexts", "degrees", "everywhere", "moves", "names", "own", "rested", "shares")

    def __init__(self) -> None:
        self.contexts: list[int | None] = []
        self.degrees: list[int | None] = []
        self.names: list[int] = []
        self.own: list[Node] = []
        self.everywhere: list[Node] = []
        self.shares: Shares = ()
        self.moves = self.rested = 0
        self._last: int | None = None

    def note(self, returns: int, context: int, degree: int | None) -> None:
        """The segment after return number ``returns`` is placed; later notes are of a life before a restart."""
        known = len(self.degrees)
        for notes in (self.contexts, self.degrees):
            del notes[returns:]
            notes.extend([None] * (returns - len(notes)))
        self.contexts.append(context)
        self.degrees.append(degree)
        if returns < known:
            self._begin_count()
            known = 0
        for added in self.degrees[known:]:
            self._count(added)
        del self.names[returns:], self.own[returns + 1 :], self.everywhere[returns + 1 :]

    def follow(self, tree: PrefixTree, prompt: str, history: Sequence[ToolState]) -> None:
        """Bring names and paths up to ``history``, as deep as the tree goes."""
        names = self.names
        while names and names[-1] == UNSEEN:
            names.pop()
        names.extend(tree.names(history[len(names) : tree.max_depth]))
        tree.follow(self.own, tree.prompts.get(prompt), names)
        tree.follow(self.everywhere, tree.everywhere, names)

    def _begin_count(self) -> None:
        self.moves, self.rested, self._last = 0, 0, None

    def _count(self, degree: int | None) -> None:
        self.rested += 1
        if degree is not None:
            if self._last is not None and degree != self._last:
                self.moves, self.rested = self.moves + 1, 0
            self._last = degree


class CMlfq(BucketPolicy):
    """The causality-driven multi-level feedback queue."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.config = parsed(CMlfqConfig, "cmlfq", options)
        c = self.config
        self.tree = PrefixTree(
            max_nodes=c.max_nodes, max_depth=c.max_depth, max_states=c.max_states, half_life=c.half_life
        )
        self.costs = CostModel(c.cost)
        self._estimator = Estimator(self.tree, min_evidence=c.min_evidence, shrinkage=c.shrinkage)
        self._router = Router(c.router, self.costs)
        self._outlook = Outlook(self.costs)
        self._trails: dict[str, _Trail] = {}
        self._reasons: Counter[Reason] = Counter()

    def place(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Placement:
        decision = self.decide(request, instances, buckets)
        return replace(placement(buckets[decision.bucket], decision.instance), move=decision.move)

    def decide(
        self, request: PlacementRequest, instances: Sequence[RolloutInstance], buckets: Sequence[Bucket]
    ) -> Decision:
        """`place`, with the reasons. Raises `ValueError` when no bucket holds the context."""
        self.costs.see(instances)
        current = instance_at(request.current, instances)
        trail = self._trail(request.trajectory)
        returns = len(request.history)
        trail.note(returns, request.context, None if current is None else current.tp)
        first = returns == 0 and request.current is None
        address = None if current is None else request.current
        at = Standing(request.context, current, address, trail.moves, trail.rested, first)
        trail.follow(self.tree, request.prompt, request.history)
        estimate = self._estimator.estimate(trail.own, trail.everywhere, trail.contexts)
        self._outlook.replace(trail.shares, ())
        decision = self._router.decide(at, estimate, instances, buckets, self._outlook.by_degree)
        self._reasons[decision.reason] += 1
        trail.shares = self._outlook.shares(decision.bucket, request.context, estimate, buckets)
        self._outlook.replace((), trail.shares)
        return decision

    def observe(self, finished: FinishedTrajectory) -> None:
        trail = self._trails.pop(finished.trajectory, None)
        if trail is None:
            return
        self._outlook.replace(trail.shares, ())
        if finished.context is not None:
            self.tree.learn(finished.prompt, finished.history, trail.contexts, finished.context)

    def learned(self) -> bytes:
        return dumps(self.tree)

    def relearn(self, data: bytes, keep: float) -> None:
        merge(self.tree, data, keep)

    def metrics(self) -> dict[str, float]:
        """What the tree holds and takes (counts, and bytes), decisions by their reason, and rates in bytes a second."""
        tree = self.tree
        return {
            **{f"decided {reason}": self._reasons[reason] for reason in get_args(Reason)},
            "host_bandwidth": self.costs.host_bandwidth,
            "network_bandwidth": self.costs.network_bandwidth,
            "nodes": len(tree),
            "bytes": tree.nbytes,
            "evicted": tree.evicted,
            "learned": tree.now,
            "prompts": len(tree.prompts),
            "states": len(tree.symbols),
            "live": len(self._trails),
        }

    def moved(self, outcome: MoveOutcome) -> None:
        self.costs.measured(outcome)

    def _trail(self, trajectory: str) -> _Trail:
        found = self._trails.get(trajectory)
        if found is None:
            if len(self._trails) >= self.config.max_trails:
                forgotten = self._trails.pop(next(iter(self._trails)))
                self._outlook.replace(forgotten.shares, ())
            found = self._trails[trajectory] = _Trail()
        return found
