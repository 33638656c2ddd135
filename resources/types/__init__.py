"""The shared vocabulary: frozen dataclasses that travel between rooms. Standard library and numpy only."""

from libra.resources.types.cluster import Bucket, RolloutInstance, WeightVersion
from libra.resources.types.identity import Stream, TrajectoryId
from libra.resources.types.kv import KVHandle
from libra.resources.types.trajectory import (
    NOT_SAMPLED,
    Failure,
    Finish,
    Segment,
    Tokens,
    ToolReturn,
    ToolState,
    Trajectory,
)

__all__ = [
    "NOT_SAMPLED",
    "Bucket",
    "Failure",
    "Finish",
    "KVHandle",
    "RolloutInstance",
    "Segment",
    "Stream",
    "Tokens",
    "ToolReturn",
    "ToolState",
    "Trajectory",
    "TrajectoryId",
    "WeightVersion",
]
