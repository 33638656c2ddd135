"""Plans over two kinds of hardware against looking at every split of every choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from libra.resources.inventory import Inventory, uniform
from libra.resources.specs import load_hardware, load_model
from libra.resources.types import RequestRecord
from libra.scheduler_plugin.planner import Planner, PlannerConfig
from libra.scheduler_plugin.planner.classes import classify
from libra.scheduler_plugin.planner.kinds import KindChoice, choices

INFINITY = float("inf")
KINDS = ("h800", "h20")


def cluster(first: int, second: int) -> Inventory:
    """``first`` H800 and ``second`` H20, each on nodes of their own."""
    parts = [uniform(load_hardware(kind), count) for kind, count in zip(KINDS, (first, second), strict=True)]
    devices = [
        replace(device, id=f"{device.hardware}-{device.id}", node=f"{device.hardware}-{device.node}",
                domain=f"{device.hardware}-{device.domain}")
        for part in parts for device in part.devices
    ]  # fmt: skip
    return Inventory(tuple(devices), tuple(spec for part in parts for spec in part.hardware))


def work(seed: int, count: int) -> list[RequestRecord]:
    """Two domains: one reads much and says little, the other the reverse; lengths with a tail."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        length = int(np.clip(rng.lognormal(np.log(3000), 0.8), 300, 20_000))
        reads = rng.random() < 0.5
        turns = [(max(2, length // 20), 0, 0.0)] if reads else [(length, 0, 1.0), (length // 4, 0, 0.0)]
        found.append(RequestRecord.from_turns(f"g{i}m0", length if reads else 200, turns, "reads" if reads else "says"))
    return found


def layouts(planner: Planner, choice: KindChoice, left: dict[str, int]) -> float:
    """The slowest kind, each laid out as well as partition, mixing of its degrees, or one degree can."""
    slowest = 0.0
    for kind, _, side in choice.rollout:
        gpus = left[kind]
        if gpus < 1:
            return INFINITY
        found = [side.solver.solve(gpus).seconds]
        found += [side.mixed_seconds(counts) for counts in side.homogeneous_counts(gpus)]
        if (partition := side.partition(gpus)) is not None:
            found.append(side.mixed_seconds(side.counts_of(partition)))
        slowest = max(slowest, *[min(found)])
    return slowest


def exhaustive(planner: Planner, batch: list[RequestRecord]) -> float:
    kinds = [planner.inventory.spec(kind) for kind in planner.inventory.kinds]
    costs = {kind.name: planner.rollout_costs(kind) for kind in kinds}
    trees = {kind.name: planner.train_tree(kind, batch) for kind in kinds}
    have = {kind.name: len(planner.inventory.of(kind.name)) for kind in kinds}
    best = INFINITY
    found = choices(planner.model, kinds, classify(batch, costs[kinds[0].name].steps[0]), costs, False)
    for choice, gpus in product(found, range(1, max(have.values()) + 1)):
        if gpus > have[choice.train_kind] or (trained := trees[choice.train_kind].best(gpus)) is None:
            continue
        left = {**have, choice.train_kind: have[choice.train_kind] - trained[0].gpus}
        best = min(best, max(trained[1], layouts(planner, choice, left)))
    return best


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 2), (4, 3), (8, 4), (8, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_within_1e_9_of_exhaustive_search(seed: int, first: int, second: int) -> None:
    planner = Planner(load_model(["Qwen3-0.6B", "Qwen3-4B"][seed % 2]), cluster(first, second))
    batch = work(seed, 24)
    assert planner.plan(batch).seconds == pytest.approx(exhaustive(planner, batch), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_the_best_homogeneous_layouts(seed: int) -> None:
    planner = Planner(load_model("Qwen3-4B"), cluster(16, 16))
    batch = work(seed, 120)
    kinds = [planner.inventory.spec(kind) for kind in planner.inventory.kinds]
    costs = {kind.name: planner.rollout_costs(kind) for kind in kinds}
    have = {kind.name: len(planner.inventory.of(kind.name)) for kind in kinds}
    best = INFINITY
    for choice in choices(planner.model, kinds, classify(batch, costs[kinds[0].name].steps[0]), costs, False):
        tree = planner.train_tree(planner.inventory.spec(choice.train_kind), batch)
        for gpus in range(1, have[choice.train_kind] + 1):
            if (trained := tree.best(gpus)) is None:
                continue
            left = {**have, choice.train_kind: have[choice.train_kind] - trained[0].gpus}
            sides = [side.best_counts(side.homogeneous_counts(left[kind])) for kind, _, side in choice.rollout]
            if all(side is not None for side in sides):
                best = min(best, max(trained[1], *(side[1] for side in sides if side is not None)))
    assert planner.plan(batch).seconds <= best * (1 + 1e-9)


def test_prefill_split_from_decode_wins_where_every_request_is_heavy_in_both() -> None:
    batch = [RequestRecord.from_turns(f"g{i}m0", 30_000, [(3_000, 0, 0.0)], "both") for i in range(64)]
    model, inventory = load_model("Qwen3-8B"), cluster(8, 4)
    whole = Planner(model, inventory).plan(batch)
    split = Planner(model, inventory, PlannerConfig(split_prefill=True)).plan(batch)
    assert split.seconds < 0.8 * whole.seconds
    prefill = [part for part in split.rollout if part.prefill_instances]
    assert [part.kind for part in prefill] == ["h800"], "the compute-rich kind prefills"
    assert [part.kind for part in split.rollout if part.layout.instances] == ["h20"]
