"""The shared vocabulary: frozen dataclasses that travel between rooms. Standard library and numpy only."""

from libra.resources.types.cluster import Bucket, InstanceFacts, RolloutInstance, WeightVersion
from libra.resources.types.identity import Stream, TrajectoryId
from libra.resources.types.kv import KVHandle, KVRoom, Migration
from libra.resources.types.planning import (
    Alternative,
    BucketPlan,
    InstancePlan,
    KindLayout,
    Placement,
    Plan,
    Recompute,
    RolloutLayout,
    TrainStrategy,
)
from libra.resources.types.request import RequestRecord
from libra.resources.types.trajectory import (
    NOT_SAMPLED,
    Failure,
    Finish,
    Segment,
    Served,
    Tokens,
    ToolReturn,
    ToolState,
    Trajectory,
)

__all__ = [
    "NOT_SAMPLED",
    "Alternative",
    "Bucket",
    "BucketPlan",
    "Failure",
    "Finish",
    "InstanceFacts",
    "InstancePlan",
    "KVHandle",
    "KVRoom",
    "KindLayout",
    "Migration",
    "Placement",
    "Plan",
    "Recompute",
    "RequestRecord",
    "RolloutInstance",
    "RolloutLayout",
    "Segment",
    "Served",
    "Stream",
    "Tokens",
    "ToolReturn",
    "ToolState",
    "TrainStrategy",
    "Trajectory",
    "TrajectoryId",
    "WeightVersion",
]
