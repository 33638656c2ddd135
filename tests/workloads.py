"""Synthetic records that many planner tests share."""

from __future__ import annotations

import numpy as np

from libra.resources.types import Plan, RequestRecord
from libra.scheduler_plugin.planner import Planner


def records(count: int, seed: int = 0, mean: float = 8000.0, tools: bool = True) -> list[RequestRecord]:
    """Multi-turn requests with a long tail: three quarters short, a quarter several times longer."""
    rng = np.random.default_rng(seed)
    short = rng.random(count) < 0.75
    lengths = np.where(
        short, rng.lognormal(np.log(mean * 0.45), 0.7, count), rng.lognormal(np.log(mean * 2.2), 0.45, count)
    )
    found = []
    for i, length in enumerate(np.clip(lengths, 200, 40000)):
        turns = int(rng.integers(1, 7)) if tools else 1
        part = max(2, int(length / (2 * turns)))
        waits = rng.exponential(3.0, turns) if tools else np.zeros(turns)
        chain = [(part, part if t < turns - 1 and tools else 0, float(waits[t])) for t in range(turns)]
        found.append(RequestRecord.from_turns(f"g0m{i}", 200, chain))
    return found


def checked_plan(plan: Plan, planner: Planner) -> None:
    """A plan fits its inventory: every device is named once, or idle, and placements are what the plan says."""
    used = [device for placement in plan.placements for device in placement.devices]
    assert len(used) == len(set(used))
    assert set(used) | set(plan.idle) == {d.id for d in planner.inventory.devices}
    assert not set(used) & set(plan.idle)
    node = {d.id: d.node for d in planner.inventory.devices}
    for placement in plan.placements:
        assert placement.size == len(placement.devices)
        assert len({node[device] for device in placement.devices}) == 1
    trained = sum(p.size for p in plan.placements if p.role == "train")
    assert trained == plan.strategy.gpus
    assert sum(p.size for p in plan.placements if p.role != "train") == plan.rollout_gpus
