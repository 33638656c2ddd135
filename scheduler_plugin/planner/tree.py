"""The tree of training strategies: TP inside a node, then EP, then PP, then DP, pruned with reasons.

    gpus ─ TP 1, 2, 4, 8 ─ EP divides the experts ─ PP divides the layers ─ DP = gpus / (TP·EP·PP), an integer
         ─ MB sequences of a micro-batch ─ RC activations recomputed: none, selective, full

Invariants: every child of a kept node appears in the trace, kept or pruned, with the reason; the searches (`best`,
`fewest`) look at exactly the leaves that traces of some number of devices keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

from libra.resources.cost_model import TrainingCosts
from libra.resources.cost_model.strategies import RECOMPUTE, Strategies
from libra.resources.errors import ConfigError
from libra.resources.launches import Launches
from libra.resources.types import Recompute, TrainStrategy
from libra.scheduler_plugin.planner.train_table import TrainTable

Level = Literal["TP", "EP", "PP", "DP", "MB", "RC"]
LEVELS: tuple[Level, ...] = ("TP", "EP", "PP", "DP", "MB", "RC")


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


PLANNED = {"megatron": Launches(tp=None, ep=None, pp=None, dp=None)}
"""Trainers that can be planned for although none of this package launches them (yet): Megatron-core's strategies."""


def limits_of(trainer: str, launches: Launches | None = None) -> Limits:
    """The limits of a trainer that can launch ``launches``; None: of one of `PLANNED`. Raises `ConfigError` for a name
    that is not among them."""
    if launches is None and trainer not in PLANNED:
        raise ConfigError(
            f"nobody says what trainer {trainer!r} can launch; give planner.launches, or plan for {', '.join(PLANNED)}"
        )
    return Limits(trainer, **(launches or PLANNED[trainer]).model_dump())


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the tree. ``degrees``: (tp, ep, pp, dp, micro-batch) as far as decided, 0 beyond; ``recompute`` of an
    RC node. ``strategy`` and ``seconds``: of a kept leaf, and of the best leaf below a kept DP or MB node."""

    level: Level
    degrees: tuple[int, int, int, int, int]
    kept: bool
    reason: str
    seconds: float | None = None
    strategy: TrainStrategy | None = None
    recompute: Recompute | None = None

    @property
    def label(self) -> str:
        """What is decided here: ``PP 4``, ``RC full``."""
        at = LEVELS.index(self.level)
        return f"{self.level} {self.recompute if self.level == 'RC' else self.degrees[at]}"

    def to_plain(self) -> dict[str, Any]:
        """Plain values; the strategy is the degrees and the recompute policy."""
        return {
            "level": self.level, "degrees": list(self.degrees), "kept": self.kept, "reason": self.reason,
            "seconds": self.seconds, "recompute": self.recompute,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A micro-batch size judged: ``cut`` says why no policy was looked at, else ``needs`` are the bytes under each."""

    cut: str
    needs: tuple[float, ...] = ()
    strategy: TrainStrategy | None = None
    seconds: float | None = None


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
                for tp in self._degrees("TP", (0, 0, 0))
                for ep in self._degrees("EP", (tp, 0, 0))
                for pp in self._degrees("PP", (tp, ep, 0))
                for micro in self.limits.micro
            ]
            self._table = TrainTable(self.costs, structures, gpus, self.limits.bubble, self.limits.dp)
        return self._table

    def expand(self, gpus: int) -> list[Node]:
        """Every kept and pruned node for exactly ``gpus`` devices, depth first."""
        return list(self._walk(gpus))

    def best(self, gpus: int) -> tuple[TrainStrategy, float] | None:
        """The fastest strategy on at most ``gpus`` devices and its seconds; None when none fits."""
        return self.table(gpus).best(gpus)

    def loses(self, gpus: int, slower: Callable[[float], bool]) -> bool | None:
        """``slower`` of the seconds of `best`, None when nothing fits; ``slower`` is true of every time above one of
        which it is true."""
        return self.table(gpus).loses(gpus, slower)

    def fewest(self, seconds: float, gpus: int) -> tuple[TrainStrategy, float] | None:
        """A strategy with the fewest devices, at most ``gpus``, that ends within ``seconds``; None when none does."""
        return self.table(gpus).fewest(seconds, gpus)

    def _leaf(self, strategy: TrainStrategy) -> _Leaf:
        """Judge a strategy with the lightest recompute that fits in memory (its own is not looked at)."""
        limits, costs = self.limits, self.costs
        if limits.dp is not None and strategy.replicas > limits.dp:
            return _Leaf(f"the {limits.trainer} trainer launches at most {limits.dp} data-parallel rank(s)")
        if strategy.replicas > len(costs.lengths):
            return _Leaf(f"{strategy.replicas} ranks for {len(costs.lengths)} sequences: some would idle")
        policies = Strategies.of(replace(strategy, recompute=policy) for policy in RECOMPUTE)
        micro = int(costs.micro_batches(policies)[0])
        bubble = (strategy.pp - 1) / (strategy.pp - 1 + micro)
        if bubble > limits.bubble:
            return _Leaf(f"pipeline bubble {bubble:.0%} with {micro} micro-batches, over {limits.bubble:.0%}")
        needs = tuple(float(each) for each in costs.memory(policies).total)
        fits = [i for i, needed in enumerate(needs) if needed <= costs.hardware.memory]
        if not fits:
            return _Leaf("", needs)
        chosen = policies.row(fits[0])
        return _Leaf("", needs, chosen, costs.seconds(chosen))

    def _degrees(self, level: Level, path: tuple[int, int, int]) -> list[int]:
        return [degree for degree, reason in self._options(level, path) if not reason]

    def _options(self, level: Level, path: tuple[int, int, int]) -> Iterator[tuple[int, str]]:
        """Degrees of a level below ``path``, each with the reason it is cut for any number of devices (empty: kept)."""
        model, limits, tp = self.costs.model, self.limits, path[0]
        if level == "TP":
            for degree in (1, 2, 4, 8):
                yield degree, self._cut_tp(degree)
        elif level == "EP":
            for degree in _divisors(max(1, model.experts)):
                yield degree, self._cut_ep(tp, degree)
        elif level == "PP":
            for degree in _divisors(model.layers):
                over = limits.pp is not None and degree > limits.pp
                yield degree, f"the {limits.trainer} trainer launches at most PP {limits.pp}" if over else ""

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

    def _cut_ep(self, tp: int, ep: int) -> str:
        hw, limits = self.costs.hardware, self.limits
        if limits.ep is not None and ep > limits.ep:
            return f"the {limits.trainer} trainer launches at most EP {limits.ep}"
        if tp * ep > hw.gpus_per_node:
            return f"TP·EP = {tp * ep} would take the all-to-all out of a node of {hw.gpus_per_node}"
        if ep > 1 and hw.gpus_per_node % (tp * ep):
            return f"TP·EP = {tp * ep} does not divide a node of {hw.gpus_per_node}: groups would straddle nodes"
        if ep > 1 and (ratio := self._communication(tp, ep)) > limits.communication:
            return f"communication/compute {ratio:.2f}, over {limits.communication:.2f}"
        return ""

    def _communication(self, tp: int, ep: int) -> float:
        return float(self.costs.communication_ratio(Strategies.of([TrainStrategy(tp, ep, 1, 1)]))[0])

    def _walk(self, gpus: int) -> Iterator[Node]:
        for tp, reason in self._options("TP", (0, 0, 0)):
            reason = reason or _indivisible(gpus, tp)
            yield Node("TP", (tp, 0, 0, 0, 0), not reason, reason or "inside a node")
            if reason:
                continue
            for ep, cut in self._options("EP", (tp, 0, 0)):
                cut = cut or _indivisible(gpus, tp * ep)
                whole = "experts are not divided" if self.costs.model.is_moe else "no experts to divide"
                kept = whole if ep == 1 else "all-to-all inside a node"
                yield Node("EP", (tp, ep, 0, 0, 0), not cut, cut or kept)
                if not cut:
                    yield from self._walk_stages(gpus, tp, ep)

    def _walk_stages(self, gpus: int, tp: int, ep: int) -> Iterator[Node]:
        for pp, reason in self._options("PP", (tp, ep, 0)):
            reason = reason or _indivisible(gpus, tp * ep * pp)
            yield Node(
                "PP", (tp, ep, pp, 0, 0), not reason, reason or f"{self.costs.model.layers // pp} layers a stage"
            )
            if not reason:
                yield from self._walk_replicas(TrainStrategy(tp, ep, pp, gpus // (tp * ep * pp)))

    def _walk_replicas(self, base: TrainStrategy) -> Iterator[Node]:
        """The only data-parallel degree of a branch, and the micro-batches and recompute policies below it."""
        leaves = {micro: self._leaf(replace(base, micro_batch=micro)) for micro in self.limits.micro}
        known = [leaf for leaf in leaves.values() if leaf.seconds is not None]
        best = min(known, key=lambda leaf: leaf.seconds or 0.0, default=None)
        head = (base.tp, base.ep, base.pp, base.dp)
        at_best = f"{base.replicas} rank(s) of sequences" if best else self._why_not(list(leaves.values()))
        seconds, strategy = (best.seconds, best.strategy) if best else (None, None)
        yield Node("DP", (*head, 0), best is not None, at_best, seconds, strategy)
        for micro, leaf in leaves.items():
            count = ceil(ceil(len(self.costs.lengths) / base.replicas) / micro)
            why = leaf.cut or (f"{count} micro-batches a rank" if leaf.strategy else self._why_not([leaf]))
            yield Node("MB", (*head, micro), leaf.strategy is not None, why, leaf.seconds, leaf.strategy)
            yield from self._walk_policies(leaf, (*head, micro))

    def _walk_policies(self, leaf: _Leaf, degrees: tuple[int, int, int, int, int]) -> Iterator[Node]:
        have = self.costs.hardware.memory
        for policy, needed in zip(RECOMPUTE, leaf.needs, strict=False):
            size = f"{needed / 2**30:.1f} GiB a device"
            if needed > have:
                yield Node("RC", degrees, False, f"needs {size}, has {have / 2**30:.1f}", recompute=policy)
            elif leaf.strategy is not None and leaf.strategy.recompute == policy:
                yield Node("RC", degrees, True, size, leaf.seconds, leaf.strategy, policy)
            else:
                lighter = leaf.strategy.recompute if leaf.strategy else ""
                why = f"{size}: fits, but {lighter} recompute fits with less work"
                yield Node("RC", degrees, False, why, recompute=policy)

    def _why_not(self, leaves: Sequence[_Leaf]) -> str:
        """Why none of ``leaves`` is kept: the one that got furthest says it."""
        short = [leaf.needs[-1] for leaf in leaves if leaf.needs]
        if not short:
            return leaves[0].cut
        have = self.costs.hardware.memory / 2**30
        return f"needs {min(short) / 2**30:.1f} GiB a device with full recompute, has {have:.1f}"


def _indivisible(gpus: int, size: int) -> str:
    if size > gpus:
        return f"needs {size} devices, there are {gpus}"
    return f"{gpus} devices are not divisible by {size}" if gpus % size else ""


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]
