"""The tree of training strategies: TP inside a node, then EP, then PP, then DP, pruned with reasons.

    gpus ─ TP 1, 2, 4, 8 ─ EP divides the experts ─ PP divides the layers ─ DP = gpus / (TP·EP·PP), an integer

Invariants: every child of a kept node appears in the trace, kept or pruned, with the reason; the searches (`best`,
`fewest`) look at exactly the leaves that traces of some number of devices keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from libra.resources.cost_model import TrainingCosts
from libra.resources.cost_model.strategies import RECOMPUTE, Strategies
from libra.resources.types import TrainStrategy
from libra.scheduler_plugin.planner.train_table import TrainTable

Level = Literal["TP", "EP", "PP", "DP"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the trainer can launch, and where branches are cut.

    ``tp``, ``pp``, ``ep``, ``dp``: largest degrees (None: any). ``communication``: largest ratio of TP and EP
    communication to compute. ``bubble``: largest share (pp − 1)/(pp − 1 + micro-batches). ``micro``: sequences of a
    micro-batch to try.
    """

    trainer: str
    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    dp: int | None = None
    communication: float = 0.5
    bubble: float = 0.3
    micro: tuple[int, ...] = (1, 2, 4)


_LAUNCHABLE = {
    "torch": Limits("torch", tp=1, ep=1, pp=1, dp=1),
    "scripted": Limits("scripted", tp=1, ep=1, pp=1),
    "megatron": Limits("megatron"),
}


def limits_of(trainer: str) -> Limits:
    """What the trainer of this kind can launch; one not known here is offered data parallelism alone."""
    return _LAUNCHABLE.get(trainer, Limits(trainer, tp=1, ep=1, pp=1))


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the tree. ``degrees``: (tp, ep, pp, dp) as far as decided, 0 beyond. ``seconds``: of a kept leaf."""

    level: Level
    degrees: tuple[int, int, int, int]
    kept: bool
    reason: str
    seconds: float | None = None
    strategy: TrainStrategy | None = None


@dataclass(eq=False)
class TrainTree:
    """Strategies for one model, kind of hardware and batch, under ``limits``."""

    costs: TrainingCosts
    limits: Limits
    _table: TrainTable | None = field(default=None, repr=False)

    @property
    def evaluated(self) -> int:
        """Leaves whose pipelines were simulated by the searches so far."""
        return self._table.evaluated if self._table else 0

    def table(self, gpus: int) -> TrainTable:
        """All leaves up to at least ``gpus`` devices."""
        if self._table is None or self._table.budget < gpus:
            structures = [
                (tp, ep, pp, micro)
                for tp in self._degrees("TP", (0, 0, 0, 0))
                for ep in self._degrees("EP", (tp, 0, 0, 0))
                for pp in self._degrees("PP", (tp, ep, 0, 0))
                for micro in self.limits.micro
            ]
            self._table = TrainTable(self.costs, structures, gpus, self.limits.bubble, self.limits.dp)
        return self._table

    def expand(self, gpus: int) -> list[Node]:
        """Every kept and pruned node for exactly ``gpus`` devices, depth first; leaves carry their best micro-batch."""
        return list(self._walk(gpus))

    def best(self, gpus: int) -> tuple[TrainStrategy, float] | None:
        """The fastest strategy on at most ``gpus`` devices and its seconds; None when none fits."""
        return self.table(gpus).best(gpus)

    def fewest(self, seconds: float, gpus: int) -> tuple[TrainStrategy, float] | None:
        """A strategy with the fewest devices, at most ``gpus``, that ends within ``seconds``; None when none does."""
        return self.table(gpus).fewest(seconds, gpus)

    def leaf(self, strategy: TrainStrategy) -> tuple[TrainStrategy | None, float, str]:
        """The strategy with the lightest recompute that fits in memory, its seconds, and the verdict in words; (None,
        infinity, reason) when it is pruned. ``strategy.recompute`` is not looked at."""
        limits, costs, infinity = self.limits, self.costs, float("inf")
        if limits.dp is not None and strategy.replicas > limits.dp:
            return None, infinity, f"the {limits.trainer} trainer launches at most {limits.dp} data-parallel rank(s)"
        if strategy.replicas > len(costs.lengths):
            return None, infinity, f"{strategy.replicas} ranks for {len(costs.lengths)} sequences: some would idle"
        policies = Strategies.of(replace(strategy, recompute=policy) for policy in RECOMPUTE)
        micro = int(costs.micro_batches(policies)[0])
        bubble = (strategy.pp - 1) / (strategy.pp - 1 + micro)
        if bubble > limits.bubble:
            return None, infinity, f"pipeline bubble {bubble:.0%} with {micro} micro-batches, over {limits.bubble:.0%}"
        have = costs.hardware.memory
        needed = costs.memory(policies).total
        for i, policy in enumerate(RECOMPUTE):
            if needed[i] <= have:
                verdict = f"{needed[i] / 2**30:.1f} GiB a device with {policy} recompute"
                return policies.row(i), costs.seconds(policies.row(i)), verdict
        text = f"needs {needed[-1] / 2**30:.1f} GiB a device with full recompute, has {have / 2**30:.1f}"
        return None, infinity, text

    def _degrees(self, level: Level, path: tuple[int, int, int, int]) -> list[int]:
        return [degree for degree, reason in self._options(level, path) if not reason]

    def _options(self, level: Level, path: tuple[int, int, int, int]) -> Iterator[tuple[int, str]]:
        """Degrees of a level below ``path``, each with the reason it is cut for any number of devices (empty: kept)."""
        model, hw, limits = self.costs.model, self.costs.hardware, self.limits
        tp = path[0]
        if level == "TP":
            for degree in (1, 2, 4, 8):
                yield degree, self._cut_tp(degree)
        elif level == "EP":
            degree = 1
            while degree <= max(1, model.experts):
                reason = ""
                if limits.ep is not None and degree > limits.ep:
                    reason = f"the {limits.trainer} trainer launches at most EP {limits.ep}"
                elif model.is_moe and model.experts % degree:
                    reason = f"{model.experts} experts are not divisible by EP {degree}"
                elif tp * degree > hw.gpus_per_node:
                    reason = f"TP·EP = {tp * degree} would take the all-to-all out of a node of {hw.gpus_per_node}"
                elif degree > 1 and (ratio := self._communication(tp, degree)) > limits.communication:
                    reason = f"communication/compute {ratio:.2f}, over {limits.communication:.2f}"
                yield degree, reason
                if tp * degree > hw.gpus_per_node:
                    return
                degree *= 2
        elif level == "PP":
            for degree in (d for d in range(1, model.layers + 1) if model.layers % d == 0):
                reason = ""
                if limits.pp is not None and degree > limits.pp:
                    reason = f"the {limits.trainer} trainer launches at most PP {limits.pp}"
                yield degree, reason
                if reason:
                    return

    def _cut_tp(self, tp: int) -> str:
        model, hw, limits = self.costs.model, self.costs.hardware, self.limits
        if limits.tp is not None and tp > limits.tp:
            return f"the {limits.trainer} trainer launches at most TP {limits.tp}"
        if tp > hw.gpus_per_node:
            return f"leaves its node of {hw.gpus_per_node}"
        if model.query_heads % tp:
            return f"{model.query_heads} query heads are not divisible by TP {tp}"
        ratio = self._communication(tp, 1)
        if ratio > limits.communication:
            return f"communication/compute {ratio:.2f}, over {limits.communication:.2f}"
        return ""

    def _communication(self, tp: int, ep: int) -> float:
        return float(self.costs.communication_ratio(Strategies.of([TrainStrategy(tp, ep, 1, 1)]))[0])

    def _walk(self, gpus: int) -> Iterator[Node]:
        for tp, reason in self._options("TP", (0, 0, 0, 0)):
            reason = reason or _indivisible(gpus, tp)
            yield Node("TP", (tp, 0, 0, 0), not reason, reason or "inside a node")
            if reason:
                continue
            for ep, cut in self._options("EP", (tp, 0, 0, 0)):
                cut = cut or _indivisible(gpus, tp * ep)
                yield Node("EP", (tp, ep, 0, 0), not cut, cut or "all-to-all inside a node")
                if not cut:
                    yield from self._walk_stages(gpus, tp, ep)

    def _walk_stages(self, gpus: int, tp: int, ep: int) -> Iterator[Node]:
        for pp, reason in self._options("PP", (tp, ep, 0, 0)):
            if tp * ep * pp > gpus:
                yield Node("PP", (tp, ep, pp, 0), False, f"needs {tp * ep * pp} devices, there are {gpus}")
                return
            reason = reason or _indivisible(gpus, tp * ep * pp)
            yield Node("PP", (tp, ep, pp, 0), not reason, reason or f"{self.costs.model.layers // pp} layers a stage")
            if reason:
                continue
            dp = gpus // (tp * ep * pp)
            judged = [self.leaf(TrainStrategy(tp, ep, pp, dp, micro)) for micro in self.limits.micro]
            strategy, seconds, reason = min(judged, key=lambda each: each[1])
            known = seconds if strategy else None
            yield Node("DP", (tp, ep, pp, dp), strategy is not None, reason, known, strategy)


def _indivisible(gpus: int, size: int) -> str:
    return f"{gpus} devices are not divisible by {size}" if gpus % size else ""
