"""What rollout and training cost: closed forms over records, per hardware, model and strategy.

Invariants: every formula's docstring names units and source; rollout costs never rise when an interval of requests
shrinks; an instance never ends before its longest request alone.
"""

from libra.resources.cost_model.requests import Requests
from libra.resources.cost_model.rollout import DEGREES, QueueModel, RolloutCosts, StepCost, partition_solver
from libra.resources.cost_model.training import TrainingCosts, TrainPrediction

__all__ = [
    "DEGREES",
    "QueueModel",
    "Requests",
    "RolloutCosts",
    "StepCost",
    "TrainPrediction",
    "TrainingCosts",
    "partition_solver",
]
