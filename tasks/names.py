"""Names of a trajectory's randomness: what its sampling and its session draw from.

Invariants: they depend on the run's seeds and the trajectory alone, never on the worker, the attempt or the time; a
held-out trajectory's do not depend on the evaluation round, so that two evaluations differ by the policy only.
"""

from __future__ import annotations

from libra.resources import rng
from libra.resources.types import TrajectoryId
from libra.resources.types.run import RunSpec


def sample_stream(spec: RunSpec, trajectory: TrajectoryId) -> int:
    """The counter-RNG stream that the trajectory's tokens are drawn from."""
    if trajectory.stream == "heldout":
        return rng.stream(spec.eval_seed, "sample", "heldout", trajectory.member)
    return rng.stream(spec.seed, "sample", str(trajectory))


def temperature(spec: RunSpec, trajectory: TrajectoryId) -> float:
    """The temperature that the trajectory is sampled at."""
    return spec.eval_temperature if trajectory.stream == "heldout" else spec.temperature


def session_name(trajectory: TrajectoryId) -> str:
    """The name that `Environment.open` gets for the trajectory."""
    return f"heldout/{trajectory.member}" if trajectory.stream == "heldout" else str(trajectory)


def session_seed(spec: RunSpec, trajectory: TrajectoryId) -> int:
    """The seed that `Environment.open` gets for the trajectory."""
    return spec.eval_seed if trajectory.stream == "heldout" else spec.seed
