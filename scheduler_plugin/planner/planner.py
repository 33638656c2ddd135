"""The planner's front: records and an inventory in, a `Plan` out.

Pure. Invariants: every device of the inventory is named once (in a placement or as idle); the plan's seconds are those
of the same evaluator that prices the alternatives beside it; a plan can be priced again for other records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from libra.resources.calibration import Profile
from libra.resources.config import Config
from libra.resources.cost_model import Requests, RolloutCosts, TrainingCosts
from libra.resources.cost_model.rollout import DEFAULT_SLOTS, DEGREES
from libra.resources.cost_model.training import TrainingFactors
from libra.resources.errors import ConfigError
from libra.resources.inventory import Inventory
from libra.resources.launches import Launches
from libra.resources.specs import HardwareSpec, ModelSpec
from libra.resources.types import (
    Alternative,
    KindLayout,
    Placement,
    Plan,
    RequestRecord,
    RolloutLayout,
    TrainStrategy,
)
from libra.scheduler_plugin.planner import kinds as kinds_of_hardware
from libra.scheduler_plugin.planner.classes import classify
from libra.scheduler_plugin.planner.joint import Search, Split, search
from libra.scheduler_plugin.planner.layouts import RolloutSide
from libra.scheduler_plugin.planner.placement import Unit, place
from libra.scheduler_plugin.planner.pricing import dealt, layout_seconds
from libra.scheduler_plugin.planner.spare import rebalance, spread
from libra.scheduler_plugin.planner.tree import Limits, TrainTree, limits_of


class PlannerConfig(Config):
    """What plans may look like."""

    trainer: str = "megatron"
    """Kind of the trainer: only strategies that it can launch are offered. A run plans for its own."""
    launches: Launches | None = None
    """What that trainer can launch; None: it is one of those known for planning alone (`PLANNED`)."""
    slots: int = Field(default=DEFAULT_SLOTS, ge=1)
    """Sequences of one instance at once."""
    overlap: int = Field(default=1, ge=1)
    """Batches in flight at once: α + 1 for a run that rolls out α steps ahead; see `QueueModel`."""
    degrees: tuple[int, ...] = DEGREES
    """TP degrees that instances may have."""
    communication: float = Field(default=0.5, gt=0)
    """Largest ratio of communication to compute of a training strategy."""
    bubble: float = Field(default=0.3, gt=0, lt=1)
    """Largest pipeline bubble."""
    layouts: Literal["any", "homogeneous"] = "any"
    """``homogeneous``: instances of one degree only (for comparison; one kind of hardware)."""
    split_prefill: bool = False
    """Whether plans with prefill split from decode instances are considered (several kinds of hardware only)."""


@dataclass(frozen=True, slots=True)
class Profiles:
    """Measured costs that replace derived ones: rollout by kind of hardware, and the trainer's factors by kind."""

    rollout: Mapping[str, RolloutCosts] = field(default_factory=dict)
    training: Mapping[str, TrainingFactors] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """What one profile holds."""
        kind, costs, factors = profile.hardware, profile.rollout_costs(), profile.training_factors()
        rollout = {kind: costs} if costs else {}
        return cls(rollout, {kind: factors} if factors else {}, {kind: profile.title} if factors else {})


@dataclass(eq=False)
class Planner:
    """Plans for one model on one inventory."""

    model: ModelSpec
    inventory: Inventory
    config: PlannerConfig = field(default_factory=PlannerConfig)
    profiles: Profiles = field(default_factory=Profiles)
    shares: Mapping[str, float] = field(default_factory=dict)
    """Prefill shares of task domains as a run measures them (`DomainShares`); none: of the records planned for."""

    @property
    def limits(self) -> Limits:
        """What the trainer can launch, with this config's thresholds."""
        base = limits_of(self.config.trainer, self.config.launches)
        return replace(base, communication=self.config.communication, bubble=self.config.bubble)

    def rollout_costs(self, hardware: HardwareSpec) -> RolloutCosts:
        """Of one kind: measured if there is a profile, else derived."""
        measured = self.profiles.rollout.get(hardware.name)
        if measured is not None:
            costs = replace(measured, steps=tuple(s for s in measured.steps if s.tp in self.config.degrees))
        else:
            costs = RolloutCosts.from_specs(self.model, hardware, self.config.slots, self.config.degrees)
        return replace(costs, queue=replace(costs.queue, overlap=self.config.overlap))

    def train_tree(self, hardware: HardwareSpec, records: Sequence[RequestRecord]) -> TrainTree:
        """The tree of strategies for a batch of these records."""
        return self._tree(hardware, np.array([float(record.context) for record in records]))

    def _tree(self, hardware: HardwareSpec, lengths: NDArray[np.float64]) -> TrainTree:
        factors = self.profiles.training.get(hardware.name, TrainingFactors())
        return TrainTree(TrainingCosts(self.model, hardware, lengths, factors), self.limits)

    def plan(self, records: Sequence[RequestRecord], old: Plan | None = None) -> Plan:
        """The best plan for a batch like ``records`` (every record is rolled out and trained on once a step); devices
        keep what they do in ``old`` where they can. Raises `ConfigError` that says why nothing fits."""
        if not records:
            raise ConfigError("there are no request records to plan for; give a workload or a run that recorded some")
        if len(self.inventory) < 2:
            raise ConfigError(
                f"a plan needs at least two devices, one to train and one to roll out; there are {len(self.inventory)}"
            )
        if len(self.inventory.kinds) == 1:
            return self._plan_one_kind(records, old)
        return self._plan_kinds(records, old)

    def searches(
        self, records: Sequence[RequestRecord], hardware: HardwareSpec
    ) -> tuple[TrainTree, RolloutSide, Search]:
        """The joint search on one kind, and the two sides that it used."""
        requests = Requests.from_records(records)
        tree = self._tree(hardware, requests.context)
        side = RolloutSide(requests, self.rollout_costs(hardware))
        return tree, side, search(tree, side, len(self.inventory.of(hardware.name)))

    def _plan_one_kind(self, records: Sequence[RequestRecord], old: Plan | None) -> Plan:
        hardware = self.inventory.hardware[0]
        tree, side, found = self.searches(records, hardware)
        best = found.best if self.config.layouts == "any" else found.homogeneous
        if best is None:
            raise ConfigError(self._why_nothing(tree, side, hardware))
        gpus = len(self.inventory.of(hardware.name))
        found_best, best = best, rebalance(tree, side, best, gpus)
        layout = self._layout(side, best)
        if layout.kind == "partition":
            layout = spread(side, layout, best.rollout_gpus, found_best.seconds * (1 + 1e-9))
        parts = (KindLayout(hardware.name, ("all",), layout),)
        placements = self._place(
            best.train.tp * best.train.ep, best.train.pp * best.train.dp, hardware.name, parts, old
        )
        return Plan(
            best.train, hardware.name, parts, best.train_seconds, layout.seconds, placements, self._idle(placements),
            self._alternatives(side, found, found_best), self._provenance([hardware], side.costs),
            {"probes": found.probes, "strategies": tree.evaluated},
        )  # fmt: skip

    def candidates(self, records: Sequence[RequestRecord], count: int, old: Plan | None = None) -> list[Plan]:
        """Up to ``count`` different plans, the fastest as predicted first: the winner, and at splits around it the
        exact partition over every choice of TP degrees, homogeneous layouts, and mixing. On one kind of hardware."""
        return [self._placed(plan, old) for plan in self.ranked(records, old)[:count]]

    def ranked(self, records: Sequence[RequestRecord], old: Plan | None = None) -> list[Plan]:
        """All that `candidates` chooses among, the fastest as predicted first, without placements: packing thousands of
        devices takes longer than pricing them."""
        winner = replace(self.plan(records, old), placements=(), idle=())
        hardware = self.inventory.hardware[0]
        tree = self.train_tree(hardware, records)
        requests, costs = Requests.from_records(records), self.rollout_costs(hardware)
        budget, node = len(self.inventory), max(1, min(hardware.gpus_per_node, len(self.inventory) // 8))
        found: dict[object, Plan] = {_shape(winner.strategy, winner.layout): winner}
        subsets = [s for n in range(1, len(costs.steps) + 1) for s in combinations(costs.steps, n)]
        for shift in range(-3, 4):
            trained = (
                tree.best(winner.strategy.gpus + shift * node) if winner.strategy.gpus + shift * node > 0 else None
            )
            if trained is None or trained[0].gpus >= budget:
                continue
            left = budget - trained[0].gpus
            for steps in subsets:
                side = RolloutSide(requests, replace(costs, steps=steps))
                for layout in layouts_for(side, left):
                    if self.config.layouts == "homogeneous" and len(layout.counts()) > 1:
                        continue
                    key = _shape(trained[0], layout)
                    seconds = max(trained[1], layout.seconds)
                    if key not in found or seconds < found[key].seconds:
                        parts = (KindLayout(hardware.name, ("all",), layout),)
                        found[key] = replace(
                            winner, strategy=trained[0], rollout=parts, train_seconds=trained[1],
                            rollout_seconds=layout.seconds,
                        )  # fmt: skip
        return sorted(found.values(), key=lambda plan: plan.seconds)

    def _placed(self, plan: Plan, old: Plan | None) -> Plan:
        groups = plan.strategy.pp * plan.strategy.dp
        placements = self._place(plan.strategy.tp * plan.strategy.ep, groups, plan.train_kind, plan.rollout, old)
        return replace(plan, placements=placements, idle=self._idle(placements))

    def fixed(self, records: Sequence[RequestRecord], train_gpus: int, tp: int, old: Plan | None = None) -> Plan:
        """A plan that was not searched for: ``train_gpus`` devices train as well as they can, all others roll out in
        instances of ``tp`` devices. On one kind of hardware. Raises `ConfigError` when either side cannot."""
        hardware = self.inventory.hardware[0]
        tree = self.train_tree(hardware, records)
        side = RolloutSide(Requests.from_records(records), self.rollout_costs(hardware))
        trained = tree.best(train_gpus)
        count = (len(self.inventory) - train_gpus) // tp
        counts = tuple(count if each == tp else 0 for each in side.degrees)
        if trained is None or not any(counts) or side.mixed_seconds(counts) == float("inf"):
            raise ConfigError(
                f"{train_gpus} devices to train and TP {tp} on the other {len(self.inventory) - train_gpus} "
                f"do not work for {self.model.name}; choose another split"
            )
        layout = side.mixed(counts)
        parts = (KindLayout(hardware.name, ("all",), layout),)
        groups = trained[0].pp * trained[0].dp
        placements = self._place(trained[0].tp * trained[0].ep, groups, hardware.name, parts, old)
        return Plan(
            trained[0], hardware.name, parts, trained[1], layout.seconds, placements, self._idle(placements), (),
            self._provenance([hardware], side.costs),
        )  # fmt: skip

    def colocated(self, records: Sequence[RequestRecord]) -> Plan:
        """A plan whose sides take turns on all devices, each laid out as well as one degree can: its placements are
        those of rollout. On one kind of hardware. Raises `ConfigError` when either side cannot."""
        hardware = self.inventory.hardware[0]
        tree = self.train_tree(hardware, records)
        side = RolloutSide(Requests.from_records(records), self.rollout_costs(hardware))
        trained = tree.best(len(self.inventory))
        rolled = side.best_counts(side.homogeneous_counts(len(self.inventory)))
        if trained is None or rolled is None:
            raise ConfigError(f"{self.model.name} cannot take turns on {len(self.inventory)} {hardware.name}")
        layout = side.mixed(rolled[0])
        units: list[Unit] = [("rollout", tp) for tp in layout.degrees]
        placements = place(units, self.inventory.devices)
        return Plan(
            trained[0], hardware.name, (KindLayout(hardware.name, ("all",), layout),), trained[1], layout.seconds,
            placements, self._idle(placements), (), self._provenance([hardware], side.costs),
        )  # fmt: skip

    @staticmethod
    def _layout(side: RolloutSide, split: Split) -> RolloutLayout:
        if split.counts is not None:
            return side.mixed(split.counts)
        layout = side.partition(split.rollout_gpus)
        assert layout is not None
        return layout

    def _alternatives(self, side: RolloutSide, found: Search, best: Split) -> tuple[Alternative, ...]:
        """What stood beside the winner, the closest first."""
        named = {"exact partition": found.partition, "mixing": found.mixing, "homogeneous": found.homogeneous}
        rows = []
        for name, split in named.items():
            if split is None or split == best:
                continue
            layout = self._layout(side, split)
            bound = "training" if split.train_seconds > split.rollout_seconds else "rollout"
            over = split.seconds / best.seconds - 1
            reason = f"{over:+.1%}, bound by {bound}" if over > 1e-9 else "as fast"
            rows.append(Alternative(f"{name}: train {split.train}, roll out {layout}", split.seconds, reason))
        # Mixing over one degree is the homogeneous layout: listed once.
        distinct = {row.what.partition(": ")[2]: row for row in rows}
        return tuple(sorted(distinct.values(), key=lambda row: row.seconds))

    def _plan_kinds(self, records: Sequence[RequestRecord], old: Plan | None) -> Plan:
        kinds = [self.inventory.spec(kind) for kind in self.inventory.kinds]
        costs = {kind.name: self.rollout_costs(kind) for kind in kinds}
        trees = {kind.name: self.train_tree(kind, records) for kind in kinds}
        have = {kind.name: len(self.inventory.of(kind.name)) for kind in kinds}
        classes = classify(records, costs[kinds[0].name].steps[0], self.shares)
        found = kinds_of_hardware.search_kinds(
            kinds_of_hardware.choices(self.model, kinds, classes, costs, self.config.split_prefill), trees, have
        )
        if not found:
            raise ConfigError(
                f"{self.model.name} fits no split of {', '.join(f'{n} {k}' for k, n in have.items())}: no training "
                "strategy and rollout layout fit together; try more devices or a smaller model"
            )
        best = found[0]
        parts = []
        for kind, chosen, side in best.choice.rollout:
            gpus = best.rollout_gpus[kind]
            partition = side.partition(gpus)
            mixed = side.best_mixed(gpus)
            assert partition is not None
            layout = partition if mixed is None or partition.seconds <= mixed[1] else side.mixed(mixed[0])
            mine = [classes[i] for i in chosen]
            serves = tuple((c.domain, c.upto) for c in mine)
            parts.append(KindLayout(kind, tuple(c.name for c in mine), layout, serves=serves))
        if best.choice.prefill is not None and best.prefill is not None:
            empty = RolloutLayout("partition", 0.0, (), ())
            parts.append(KindLayout(best.choice.prefill[0], ("prefill of all",), empty, *best.prefill))
        strategy = best.train
        groups = strategy.pp * strategy.dp
        placements = self._place(strategy.tp * strategy.ep, groups, best.choice.train_kind, tuple(parts), old)
        rollout = max(part.layout.seconds for part in parts)
        alternatives = tuple(
            Alternative(_describe_kinds(split), split.seconds, f"{split.seconds / best.seconds - 1:+.1%}")
            for split in found[1:6]
        )
        return Plan(
            strategy, best.choice.train_kind, tuple(parts), best.train_seconds, rollout, placements,
            self._idle(placements), alternatives, self._provenance(kinds, *costs.values()),
            {"choices": float(len(found)), "strategies": float(sum(t.evaluated for t in trees.values()))},
        )  # fmt: skip

    def evaluate(self, plan: Plan, records: Sequence[RequestRecord]) -> tuple[float, float]:
        """(training, rollout) seconds of ``plan`` for other records: each where its class is served, and there in the
        first bucket that holds its final context. Prefill that is split off is priced as if it were not."""
        train = self.train_tree(self.inventory.spec(plan.train_kind), records).costs.seconds(plan.strategy)
        shares = zip(plan.rollout, dealt(plan.rollout, records), strict=True)
        return train, max(
            layout_seconds(part.layout, mine, self.rollout_costs(self.inventory.spec(part.kind)))
            for part, mine in shares
        )

    def _place(
        self, group: int, groups: int, train_kind: str, parts: Sequence[KindLayout], old: Plan | None
    ) -> tuple[Placement, ...]:
        units: dict[str, list[Unit]] = {kind: [] for kind in self.inventory.kinds}
        units[train_kind] += [("train", group)] * groups
        for part in parts:
            units[part.kind] += [("rollout", tp) for tp in part.layout.degrees]
            units[part.kind] += [("prefill", part.prefill_tp)] * part.prefill_instances
        before = old.placements if old else ()
        placed: list[Placement] = []
        for kind, wanted in units.items():
            placed += place(wanted, self.inventory.of(kind), before)
        return tuple(placed)

    def _idle(self, placements: Sequence[Placement]) -> tuple[str, ...]:
        busy = {device for placement in placements for device in placement.devices}
        return tuple(device.id for device in self.inventory.devices if device.id not in busy)

    def _provenance(self, hardware: Sequence[HardwareSpec], *costs: RolloutCosts) -> str:
        parts = list(dict.fromkeys(each.provenance for each in costs))
        parts += [f"training {self.profiles.provenance.get(h.name, 'derived')} on {h.name}" for h in hardware]
        return "; ".join(parts)

    def _why_nothing(self, tree: TrainTree, side: RolloutSide, hardware: HardwareSpec) -> str:
        gpus = len(self.inventory.of(hardware.name))
        text = f"no plan for {self.model.name} on {gpus} {hardware.name}: "
        if not side.smallest:
            longest, most = int(side.requests.context[-1]), max(int(s.capacity) for s in side.costs.steps)
            return (
                text + f"the longest request has {longest} tokens, the largest instance holds {most}; shorten contexts"
            )
        if tree.best(gpus - 1) is None:
            reasons = [n.reason for n in tree.expand(gpus - side.smallest) if n.level == "DP" and not n.kept]
            memory = [reason for reason in reasons if "GiB" in reason]
            why = (memory or reasons or ["every branch is cut"])[-1]
            return (
                text + f"no training strategy fits ({why}); more devices, a smaller model or another trainer would do"
            )
        return text + f"training leaves fewer than the {side.smallest} devices that the longest request needs"


def _shape(strategy: TrainStrategy, layout: RolloutLayout) -> tuple[object, ...]:
    return strategy.gpus, layout.kind, layout.degrees


def layouts_for(side: RolloutSide, gpus: int) -> Iterator[RolloutLayout]:
    """The exact partition with all of the side's degrees grown to ``gpus`` devices, and mixing over the same
    degrees."""
    partition = side.partition(gpus)
    if partition is None:
        return
    grown = spread(side, partition, gpus, partition.seconds * (1 + 1e-9))
    yield grown
    counts = side.counts_of(grown)
    if side.mixed_seconds(counts) < float("inf"):
        yield side.mixed(counts)


def _describe_kinds(split: kinds_of_hardware.KindSplit) -> str:
    parts = [f"train on {split.choice.train_kind} ({split.train})"]
    parts += [f"{len(chosen)} class(es) on {kind}" for kind, chosen, _ in split.choice.rollout]
    if split.choice.prefill is not None:
        parts.append(f"prefill on {split.choice.prefill[0]}")
    return ", ".join(parts)
