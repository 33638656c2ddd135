"""A discrete-event core in virtual time that drives the objects of a run: admission, routing table, policies,
role state machine, planner, replanner.

Pure: no I/O, no wall clock; equal inputs give equal outcomes. Invariants: every trajectory that is submitted ends
exactly once (finished, failed or cancelled); an engine never holds more KV than it has; virtual time never goes back.
"""

from libra.scheduler_plugin.simulation.engine import Engine
from libra.scheduler_plugin.simulation.loop import LoopConfig, LoopResult, RunLoop, StepReport
from libra.scheduler_plugin.simulation.rollout import RolloutSimulation
from libra.scheduler_plugin.simulation.states import Ended, Moves, Totals
from libra.scheduler_plugin.simulation.traces import Trace, Turn

__all__ = [
    "Ended",
    "Engine",
    "LoopConfig",
    "LoopResult",
    "Moves",
    "RolloutSimulation",
    "RunLoop",
    "StepReport",
    "Totals",
    "Trace",
    "Turn",
]
