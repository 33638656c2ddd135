"""A planner whose costs are corrected by factors: what runs do beside what specs and profiles say. Pure."""

from __future__ import annotations

from dataclasses import replace

from libra.resources.cost_model.training import TrainingFactors
from libra.scheduler_plugin.planner.planner import Planner, Profiles


def scaled(planner: Planner, rollout: float, training: float) -> Planner:
    """``planner`` with engines that take ``rollout`` times and trainers that take ``training`` times as long."""
    costs, factors = {}, {}
    for hardware in planner.inventory.hardware:
        base = planner.rollout_costs(hardware)
        costs[hardware.name] = replace(base, steps=tuple(step.scaled(rollout) for step in base.steps))
        factors[hardware.name] = planner.profiles.training.get(hardware.name, TrainingFactors()).scaled(training)
    return replace(planner, profiles=Profiles(costs, factors, planner.profiles.provenance))
