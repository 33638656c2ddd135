"""The global planner: how many devices train, how many roll out, and how each side is laid out.

Pure: no I/O, no tasks, no clock. Invariants: a plan names no device twice and fits the inventory; its predicted time is
never above that of the best homogeneous layout under the same costs; the same inputs give the same plan.
"""

from libra.scheduler_plugin.planner.planner import Planner, PlannerConfig
from libra.scheduler_plugin.planner.tree import PLANNED, Limits, Node, TrainTree, limits_of

__all__ = ["PLANNED", "Limits", "Node", "Planner", "PlannerConfig", "TrainTree", "limits_of"]
