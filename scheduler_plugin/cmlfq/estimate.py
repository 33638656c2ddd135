"""What the final context of a trajectory will be, from the deepest evidence there is.

The trajectory's tool states lead down two paths: that of its own prompt and that of all prompts. On each, the deepest
node whose evidence is at least ``min_evidence`` speaks; the deeper of the two is believed. At equal depth the answer is
the mixture of both distributions, the own one weighing n/(n + ``shrinkage``), n its evidence: a prompt seen a little
leans on all prompts, one seen often on itself. A node that is not the last return speaks of what was left *there*; of
its lengths only those count that the trajectory has not outgrown since.

Invariant: mean and P90 are taken from one distribution and are never below the present context.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from libra.scheduler_plugin.cmlfq.sketch import LENGTHS, quantiles_at
from libra.scheduler_plugin.cmlfq.tree import Node, PrefixTree

_POINTS = (0.1, 0.3, 0.5, 0.7, 0.9)

Source = Literal["own", "global", "both"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """``mean`` and ``p90`` of the final context in tokens, and ``points``: as many equally likely ones, ascending.
    ``evidence`` in trajectories of this instant; ``depth`` in tool returns: that of the node that spoke; ``source``:
    whose path it was on."""

    mean: float
    p90: float
    points: tuple[float, ...]
    evidence: float
    depth: int
    source: Source


@dataclass(slots=True)
class _Voice:
    """A node that speaks: the lengths still possible (``bins``, ``weights`` of sum ``mass``) and its evidence."""

    depth: int
    evidence: float
    mean: float
    bins: bytearray
    weights: array[float]
    mass: float


class Estimator:
    """Asks a prefix tree."""

    def __init__(self, tree: PrefixTree, *, min_evidence: float, shrinkage: float) -> None:
        """``min_evidence``, ``shrinkage``: in trajectories."""
        self.tree, self.min_evidence, self.shrinkage = tree, min_evidence, shrinkage

    def estimate(
        self, own_path: Sequence[Node], global_path: Sequence[Node], contexts: Sequence[int | None]
    ) -> Estimate | None:
        """For a trajectory whose tool states lead down the two paths, and whose context was ``contexts[i]`` at its i-th
        return (None: unknown; the last is known). None when no node has evidence enough."""
        context = contexts[-1]
        if context is None:
            raise ValueError("the present context is unknown: contexts ends in None")
        own = self._speaks(own_path, contexts, context)
        everywhere = self._speaks(global_path, contexts, context)
        if own is None and everywhere is None:
            return None
        if everywhere is None or (own is not None and own.depth > everywhere.depth):
            assert own is not None
            return _told(own, contexts, "own")
        if own is None or own.depth < everywhere.depth:
            return _told(everywhere, contexts, "global")
        return self._mixture(own, everywhere, contexts)

    def _speaks(self, path: Sequence[Node], contexts: Sequence[int | None], context: int) -> _Voice | None:
        now, half_life, last = self.tree.now, self.tree.half_life, len(contexts) - 1
        for depth in range(len(path) - 1, -1, -1):
            node, then = path[depth], contexts[depth]
            # A weight only loses worth since its stamp, so most of what is too little is seen without reckoning.
            if then is None or node.weight < self.min_evidence:
                continue
            evidence = node.weight * 2.0 ** ((node.stamp - now) / half_life)
            if evidence < self.min_evidence:
                continue
            if depth == last:
                return _Voice(depth, evidence, node.total / node.weight, node.bins, node.weights, node.weight)
            voice = _outgrown(node, depth, context - then, evidence)
            if voice is not None and voice.evidence >= self.min_evidence:
                return voice
        return None

    def _mixture(self, own: _Voice, everywhere: _Voice, contexts: Sequence[int | None]) -> Estimate:
        share = own.evidence / (own.evidence + self.shrinkage)
        # All prompts include the own one, so theirs is the evidence of both.
        merged: dict[int, float] = {}
        for voice, part in ((own, share), (everywhere, 1.0 - share)):
            part /= voice.mass
            for b, weight in zip(voice.bins, voice.weights, strict=True):
                merged[b] = merged.get(b, 0.0) + weight * part
        bins = bytearray(sorted(merged))
        mean = share * own.mean + (1.0 - share) * everywhere.mean
        weights = array("d", (merged[b] for b in bins))
        voice = _Voice(own.depth, everywhere.evidence, mean, bins, weights, 1.0)
        return _told(voice, contexts, "both")


def _outgrown(node: Node, depth: int, grown: float, evidence: float) -> _Voice | None:
    """What a node says to a trajectory that has grown by ``grown`` tokens since: its lengths beyond that."""
    at = bisect_left(node.bins, bisect_right(LENGTHS, grown))
    weights = node.weights[at:]
    left = sum(weights)
    if left <= 0.0:
        return None
    bins = node.bins[at:]
    mean = sum(LENGTHS[b] * weight for b, weight in zip(bins, weights, strict=True)) / left
    return _Voice(depth, evidence * left / node.weight, mean, bins, weights, left)


def _told(voice: _Voice, contexts: Sequence[int | None], source: Source) -> Estimate:
    then, context = contexts[voice.depth], contexts[-1]
    assert then is not None and context is not None
    p90, *points = [max(context, then + LENGTHS[voice.bins[at]]) for at in quantiles_at(voice.weights, (0.9, *_POINTS))]
    mean = max(context, then + voice.mean)
    return Estimate(mean, p90, tuple(points), voice.evidence, voice.depth, source)
