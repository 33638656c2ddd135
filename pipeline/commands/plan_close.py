"""What stood beside a plan: the plans and training strategies that nearly won, and the trees behind the strategies.

Invariant: everything here is priced by the same evaluator as the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from libra.resources.types import Plan, RequestRecord
from libra.scheduler_plugin.planner import Node, Planner

_SHOWN = 3
"""Of splits, of layouts and of strategies."""
_LOOKED_AT = 200


@dataclass(frozen=True, slots=True)
class Close:
    """``what`` takes ``seconds`` an iteration, ``over`` (a share) more than what was chosen."""

    what: str
    seconds: float
    over: float

    def __str__(self) -> str:
        return f"{self.what}, {self.seconds:.1f} s ({self.over:+.1%})"

    def to_plain(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Explained:
    """The training tree for ``gpus`` devices of ``kind``: every kept and pruned node, depth first."""

    kind: str
    gpus: int
    nodes: tuple[Node, ...]

    def to_plain(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": self.kind, "gpus": self.gpus, "nodes": [node.to_plain() for node in self.nodes]}


def close_plans(planner: Planner, records: Sequence[RequestRecord], chosen: Plan) -> list[Close]:
    """Other layouts of the plan's split, and the best of every other split around it, the fastest of each first.
    Several kinds of hardware: none (the plan's alternatives are all that was looked at)."""
    if len(planner.inventory.kinds) > 1:
        return []
    candidates = planner.ranked(records)[:_LOOKED_AT]
    layouts = [
        plan
        for plan in candidates
        if plan.strategy.gpus == chosen.strategy.gpus
        and (plan.layout.kind, plan.layout.degrees) != (chosen.layout.kind, chosen.layout.degrees)
    ]
    splits = {plan.strategy.gpus: plan for plan in reversed(candidates) if plan.strategy.gpus != chosen.strategy.gpus}
    others = sorted(splits.values(), key=lambda plan: plan.seconds)
    return [
        Close(
            f"split {plan.strategy.gpus} / {plan.rollout_gpus}: train {plan.strategy}, roll out {plan.layout} "
            f"({plan.layout.kind})",
            plan.seconds,
            plan.seconds / chosen.seconds - 1,
        )
        for plan in [*others[:_SHOWN], *layouts[:_SHOWN]]
    ]


def close_strategies(planner: Planner, records: Sequence[RequestRecord], chosen: Plan) -> list[Close]:
    """Other strategies on as many devices as the plan trains on, the fastest first. Their training seconds."""
    tree = planner.train_tree(planner.inventory.spec(chosen.train_kind), records)
    leaves = [
        (node.seconds, node.strategy)
        for node in tree.expand(chosen.strategy.gpus)
        if node.level == "MB" and node.strategy is not None and node.seconds is not None
    ]
    others = sorted((leaf for leaf in leaves if leaf[1] != chosen.strategy), key=lambda leaf: leaf[0])
    return [
        Close(f"train {strategy}", seconds, seconds / chosen.train_seconds - 1) for seconds, strategy in others[:_SHOWN]
    ]


def explained(planner: Planner, records: Sequence[RequestRecord], only: Plan | None = None) -> list[Explained]:
    """The trees of every number of devices that may train, of each kind; ``only``: of that plan's number alone."""
    kinds = planner.inventory.kinds
    trees = []
    for kind in kinds if only is None else (only.train_kind,):
        tree = planner.train_tree(planner.inventory.spec(kind), records)
        # One device at least rolls out: of another kind if there is one.
        most = len(planner.inventory.of(kind)) - (len(kinds) == 1)
        counts = range(1, most + 1) if only is None else [only.strategy.gpus]
        trees += [Explained(kind, gpus, tuple(tree.expand(gpus))) for gpus in counts]
    return trees
