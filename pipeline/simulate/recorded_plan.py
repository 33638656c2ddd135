"""The plan that a recorded run ran under, from its config: one rank trains, its buckets' instances roll out.

Invariant: every instance of the config is in the plan, with its bucket's TP degree and bound; a degree that nobody
measured is scaled from one that was, and the provenance says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from libra.pipeline.config import RunConfig
from libra.resources.cost_model import RolloutCosts, StepCost
from libra.resources.inventory import Inventory
from libra.resources.types import (
    BucketPlan,
    InstancePlan,
    KindLayout,
    Placement,
    Plan,
    RolloutLayout,
    TrainStrategy,
)


def devices_of(config: RunConfig) -> int:
    """Devices that the run had: one trains, an instance of TP k has k."""
    return 1 + sum(config.degrees)


def recorded_plan(config: RunConfig, inventory: Inventory, micro_batch: int) -> Plan:
    """``inventory``: of one kind, with as many devices as `devices_of` says; ``micro_batch``: sequences."""
    degrees = config.degrees
    ids = [device.id for device in inventory.devices]
    placements, taken = [Placement("train", 1, (ids[0],))], 1
    for tp in degrees:
        placements.append(Placement("rollout", tp, tuple(ids[taken : taken + tp])))
        taken += tp
    layout = RolloutLayout(
        "partition" if len(config.buckets) > 1 else "homogeneous",
        0.0,
        tuple(InstancePlan(tp, 0, 0, 0, 0.0) for tp in degrees),
        tuple(BucketPlan(bucket.tp, bucket.max_context, bucket.instances) for bucket in config.buckets),
    )
    kind = inventory.kinds[0]
    strategy = TrainStrategy(1, 1, 1, 1, micro_batch, "none")
    parts = (KindLayout(kind, ("all",), layout),)
    return Plan(strategy, kind, parts, 0.0, 0.0, tuple(placements), (), (), "the run's config")


def with_degrees(costs: RolloutCosts, degrees: Iterable[int]) -> RolloutCosts:
    """``costs`` with every one of ``degrees``. A missing one is scaled from the nearest below (else above), as if work
    divided evenly and KV room added up: real instances gain less."""
    known = {step.tp: step for step in costs.steps}
    steps, notes = dict(known), []
    for tp in sorted(set(degrees) - set(known)):
        near = max((each for each in known if each < tp), default=min(known))
        steps[tp] = _scaled(known[near], tp)
        notes.append(f"TP {tp} scaled from TP {near} as if work divided evenly")
    return replace(
        costs, steps=tuple(steps[tp] for tp in sorted(steps)), provenance="; ".join([costs.provenance, *notes])
    )


def _scaled(step: StepCost, tp: int) -> StepCost:
    share = step.tp / tp
    return replace(
        step, tp=tp, step=step.step * share, sequence=step.sequence * share, token=step.token * share,
        prefill_token=step.prefill_token * share, prefill_pair=step.prefill_pair * share,
        capacity=step.capacity / share,
    )  # fmt: skip
