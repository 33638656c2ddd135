"""Plans over several kinds of hardware: one kind trains (and may roll out too), each kind rolls out some classes.

For a choice of training kind and classes a makespan T is feasible when training has few enough devices to leave every
kind those that roll out its classes within T: by the exact partition, by mixing its degrees, or homogeneously. The
least T of each choice is found by bisection, on few devices by looking at every split (mixing need not fall with every
device); choices that cannot beat the best one so far cost a single probe. Optionally prefill runs on the compute-rich
kind and decode on another, the KV going over the network in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from libra.resources.cost_model import Requests, RolloutCosts
from libra.resources.specs import HardwareSpec, ModelSpec
from libra.resources.types import TrainStrategy
from libra.scheduler_plugin.planner.classes import RequestClass, assignments, prefill_seconds
from libra.scheduler_plugin.planner.joint import INFINITY, TOLERANCE
from libra.scheduler_plugin.planner.layouts import RolloutSide
from libra.scheduler_plugin.planner.tree import TrainTree

_EXHAUSTIVE = 16
"""Devices up to which every split of a choice is looked at."""


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """Prefill of all requests on one kind: seconds of work and of the longest one, per TP degree.

    Turns of different requests overlap, so the pool must only get through its work in time; its own queueing is not
    priced, which flatters a split when the pool is nearly full."""

    work: tuple[tuple[int, float, float], ...]

    def options(self, gpus: int) -> list[tuple[int, int, float]]:
        """(TP degree, instances, seconds) of every pool of at most ``gpus`` devices."""
        return [
            (tp, count, max(total / count, longest))
            for tp, total, longest in self.work
            for count in range(1, gpus // tp + 1)
        ]

    def fewest(self, limit: float) -> tuple[int, int] | None:
        """(TP degree, instances) with the fewest devices that prefill within ``limit`` seconds."""
        options = [(tp * ceil(total / limit), tp) for tp, total, longest in self.work if longest <= limit]
        if not options:
            return None
        gpus, tp = min(options)
        return tp, gpus // tp


@dataclass(frozen=True, slots=True)
class KindChoice:
    """One way to use the kinds: who trains, which classes each rolls out (indices), where prefill is split off to."""

    train_kind: str
    rollout: tuple[tuple[str, tuple[int, ...], RolloutSide], ...]
    prefill: tuple[str, PrefillPool] | None = None


@dataclass(frozen=True, slots=True)
class KindSplit:
    """A choice at its least makespan: devices of each kind for rollout, what trains, and the prefill instances."""

    choice: KindChoice
    train: TrainStrategy
    train_seconds: float
    seconds: float
    rollout_gpus: Mapping[str, int]
    prefill: tuple[int, int] | None = None


def choices(
    model: ModelSpec,
    kinds: Sequence[HardwareSpec],
    classes: Sequence[RequestClass],
    costs: Mapping[str, RolloutCosts],
    split_prefill: bool,
) -> list[KindChoice]:
    """All choices of training kind and classes per kind (runs in order of heaviness), and the split ones if asked."""
    sides: dict[tuple[str, tuple[int, ...]], RolloutSide] = {}
    found: list[KindChoice] = []
    for given in assignments(classes, kinds):
        rollout = []
        for kind, chosen in given.items():
            if not chosen:
                continue
            key = (kind, tuple(chosen))
            if key not in sides:
                records = [record for i in chosen for record in classes[i].records]
                sides[key] = RolloutSide(Requests.from_records(records), costs[kind])
            rollout.append((kind, tuple(chosen), sides[key]))
        found += [KindChoice(kind.name, tuple(rollout)) for kind in kinds]
    if split_prefill and len(kinds) > 1:
        found += _split_choices(model, kinds, classes, costs)
    return found


def _split_choices(
    model: ModelSpec, kinds: Sequence[HardwareSpec], classes: Sequence[RequestClass], costs: Mapping[str, RolloutCosts]
) -> list[KindChoice]:
    ordered = sorted(kinds, key=lambda k: k.hbm / k.flops)
    compute = ordered[0]
    requests = Requests.from_records([record for c in classes for record in c.records])
    pool = PrefillPool(
        tuple(
            (step.tp, float(seconds.sum()), float(seconds.max()))
            for step in costs[compute.name].steps
            for seconds in (prefill_seconds(requests, step),)
        )
    )
    everything = tuple(range(len(classes)))
    found = []
    for decode in ordered[1:]:
        # A request waits for its prefills, and for their KV to cross the network once, as it waits for a tool.
        link = min(compute.network, decode.network)
        moved = requests.prefill_tokens * model.kv_bytes_per_token / link
        own = prefill_seconds(requests, costs[compute.name].steps[-1])
        waiting = replace(requests, tool_seconds=requests.tool_seconds + moved + own)
        steps = tuple(
            replace(step, admission=0.0, prefill_token=0.0, prefill_pair=0.0) for step in costs[decode.name].steps
        )
        side = RolloutSide(waiting, replace(costs[decode.name], steps=steps))
        found += [KindChoice(kind.name, ((decode.name, everything, side),), (compute.name, pool)) for kind in kinds]
    return found


def least(
    choice: KindChoice, trees: Mapping[str, TrainTree], have: Mapping[str, int], below: float
) -> KindSplit | None:
    """The choice at its least makespan; None when nothing under ``below`` is feasible."""
    if sum(have.values()) <= _EXHAUSTIVE:
        return min(
            (split for split in _every(choice, trees, have) if split.seconds <= below),
            key=lambda split: split.seconds,
            default=None,
        )
    best = _probe(choice, trees, have, below)
    if best is None:
        return None
    low, high = 0.0, best.seconds
    while high - low > TOLERANCE * high:
        middle = (low * high) ** 0.5 if low > 0 and high > 4 * low else low + 0.5 * (high - low)
        split = _probe(choice, trees, have, middle)
        if split is None:
            low = middle
        else:
            best, high = split, min(high, split.seconds)
    return best


def _probe(
    choice: KindChoice, trees: Mapping[str, TrainTree], have: Mapping[str, int], limit: float
) -> KindSplit | None:
    left = dict(have)
    trained = trees[choice.train_kind].fewest(limit, left[choice.train_kind])
    if trained is None:
        return None
    left[choice.train_kind] -= trained[0].gpus
    prefill: tuple[int, int] | None = None
    seconds = trained[1]
    if choice.prefill is not None:
        kind, pool = choice.prefill
        prefill = pool.fewest(limit)
        if prefill is None or prefill[0] * prefill[1] > left[kind]:
            return None
        left[kind] -= prefill[0] * prefill[1]
    for kind, _, side in choice.rollout:
        within = _within(side, left[kind], limit)
        if within is None:
            return None
        seconds = max(seconds, within)
    rollout_gpus = {kind: left[kind] for kind, _, _ in choice.rollout}
    return KindSplit(choice, trained[0], trained[1], seconds, rollout_gpus, prefill)


def _within(side: RolloutSide, gpus: int, limit: float) -> float | None:
    """Seconds of a layout on ``gpus`` devices that ends within ``limit``; None if there is none."""
    probe = side.solver.probe(limit, gpus)
    if probe.gpus <= gpus:
        return float(probe.seconds)
    mixed = side.best_mixed(gpus)
    return mixed[1] if mixed is not None and mixed[1] <= limit else None


def _every(choice: KindChoice, trees: Mapping[str, TrainTree], have: Mapping[str, int]) -> Iterator[KindSplit]:
    """The choice with every number of training devices, and every prefill pool beside it."""
    for gpus in range(1, have[choice.train_kind] + 1):
        trained = trees[choice.train_kind].best(gpus)
        if trained is None:
            continue
        left = dict(have)
        left[choice.train_kind] -= trained[0].gpus
        if choice.prefill is None:
            pools: list[tuple[int, int, float]] = [(0, 0, 0.0)]
        else:
            pools = choice.prefill[1].options(left[choice.prefill[0]])
        for tp, count, prefilled in pools:
            free = dict(left)
            if choice.prefill is not None:
                free[choice.prefill[0]] -= tp * count
            rolled = [best_seconds(side, free[kind]) for kind, _, side in choice.rollout]
            seconds = max(trained[1], prefilled, *rolled)
            if seconds < INFINITY:
                rollout_gpus = {kind: free[kind] for kind, _, _ in choice.rollout}
                yield KindSplit(choice, trained[0], trained[1], seconds, rollout_gpus, (tp, count) if count else None)


def best_seconds(side: RolloutSide, gpus: int) -> float:
    """Of the best layout on ``gpus`` devices; infinite when none holds the requests."""
    if gpus < 1:
        return INFINITY
    mixed = side.best_mixed(gpus)
    return min(side.solve(gpus).seconds, INFINITY if mixed is None else mixed[1])


def search_kinds(
    found: Sequence[KindChoice], trees: Mapping[str, TrainTree], have: Mapping[str, int]
) -> list[KindSplit]:
    """The best splits, the best first: each choice that beat those before it."""
    best = INFINITY
    kept: list[KindSplit] = []
    for choice in found:
        ceiling = best if best < INFINITY else _ceiling(choice, trees, have)
        split = least(choice, trees, have, ceiling * (1 - 1e-9)) if ceiling < INFINITY else None
        if split is not None:
            best = min(best, split.seconds)
            kept.append(split)
    return sorted(kept, key=lambda split: split.seconds)


def _ceiling(choice: KindChoice, trees: Mapping[str, TrainTree], have: Mapping[str, int]) -> float:
    """A makespan at which the choice is feasible, found by doubling; infinite when none is up to a year."""
    limit = float(np.max([side.requests.generated.max() for _, _, side in choice.rollout])) * 1e-3
    while limit < 3.2e7:
        if _probe(choice, trees, have, limit) is not None:
            return limit * (1 + 1e-8)
        limit *= 2
    return INFINITY
