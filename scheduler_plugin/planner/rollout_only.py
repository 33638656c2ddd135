"""Plans that keep the training side as it is and lay out the other devices anew.

Pure. Invariant: placements of training ranks are those of the plan in force; rollout instances stay where they are
wherever the new layout allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from libra.resources.cost_model import Requests
from libra.resources.errors import ConfigError
from libra.resources.types import Plan, RequestRecord, RolloutLayout
from libra.scheduler_plugin.planner.layouts import RolloutSide
from libra.scheduler_plugin.planner.placement import place
from libra.scheduler_plugin.planner.planner import Planner, layouts_for


def rollout_plans(
    planner: Planner, current: Plan, records: Sequence[RequestRecord], best_only: bool = False
) -> list[Plan]:
    """Plans for ``records`` beside the training side of ``current``, the fastest as predicted first: over every choice
    of TP degrees (``best_only``: over all degrees at once) the exact partition and mixing, and homogeneous layouts. On
    one kind of hardware. Raises `ConfigError` when none holds the longest request."""
    training = [p for p in current.placements if p.role == "train"]
    busy = {device for p in training for device in p.devices}
    free = [device for device in planner.inventory.devices if device.id not in busy]
    costs = planner.rollout_costs(planner.inventory.hardware[0])
    requests = Requests.from_records(records)
    side = RolloutSide(requests, costs)
    levels = len(costs.steps)
    subsets = (
        [s for n in range(1, levels + 1) for s in combinations(costs.steps, n)] if not best_only else [costs.steps]
    )
    found: dict[object, RolloutLayout] = {}
    for steps in subsets:
        for layout in layouts_for(RolloutSide(requests, replace(costs, steps=steps)), len(free)):
            _keep(found, layout)
    for counts in side.homogeneous_counts(len(free)):
        if side.mixed_seconds(counts) < float("inf"):
            _keep(found, side.mixed(counts))
    if not found:
        raise ConfigError(f"no layout on {len(free)} devices holds the longest of {len(records)} requests")
    kept = [p for p in current.placements if p.role != "train"]
    ranked = sorted(found.values(), key=lambda layout: layout.seconds)
    plans = []
    for layout in ranked[:1] if best_only else ranked:
        placed = place([("rollout", tp) for tp in layout.degrees], free, kept)
        parts = (replace(current.rollout[0], layout=layout),)
        plans.append(
            replace(
                current, rollout=parts, rollout_seconds=layout.seconds, placements=(*training, *placed), alternatives=()
            )
        )
    return plans


def _keep(found: dict[object, RolloutLayout], layout: RolloutLayout) -> None:
    """The faster of two layouts with the same instances."""
    key = (layout.kind, layout.degrees)
    if key not in found or layout.seconds < found[key].seconds:
        found[key] = layout
